"""What must always hold of a run, checked on the observer's log; and every checker, seen to fail on a tampered log.

(a) no remote write lands in an inbox row before its previous reader has finished; (b) count words are set once and
cleared once per exchange, arrival words are set as often as their life cycle says; (c) every row of an inbox has one
writer per exchange; (e) rows per source and destination are the reference's; (h) bytes through each port are rows
times bytes per row; (i) event counts equal the published formulas. And every word is left as its life cycle says.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import (
    BASIC_ARMS,
    CONTROL_ARMS,
    H100,
    Inputs,
    assert_equal_events,
    broken,
    describe,
    make_plan,
    replay,
    run_checked,
    run_timed,
)

from afdep_sim.model.machine import Machine
from afdep_sim.model.profiles import Profile
from afdep_sim.plan import Plan
from afdep_sim.protocol import Exit
from afdep_sim.reference import rows_expected
from afdep_sim.run import Run
from afdep_sim.topology import Role
from afdep_sim.window import CLEARED, MONOTONIC, WORD, WORD_OFFSETS, WORDS, WORKSPACE_BYTES, Region


class Event(NamedTuple):
    """One call of the observer."""

    kind: str
    rank: int
    offset: int
    bytes: int
    agent: int
    time_ns: float
    exchange: int


@dataclass(frozen=True)
class Log:
    """A run with everything its observer saw, in order."""

    plan: Plan
    inputs: Inputs
    run: Run
    events: list[Event]

    @property
    def exchanges(self) -> int:
        return len(self.plan.exchanges)

    def inbox(self, rank: int) -> Region:
        """The inbox that `rank` uses: that of its role, whatever the arm; nothing is sent to the other."""
        window = self.plan.exchanges[0].window
        return window.dispatch_inbox if self.plan.topology.role(rank) is Role.FFN else window.combine_inbox

    def row_bytes(self, rank: int) -> int:
        """Bytes that are written of an inbox row: all of a dispatched one, the hidden part of a reply."""
        if self.plan.topology.role(rank) is Role.FFN:
            return self.inbox(rank).row_bytes
        return self.plan.workload.hidden_bytes

    def in_inbox(self, kind: str) -> Iterator[Event]:
        """Landings or reads of either inbox region of a rank, whichever its role."""
        for event in self.events:
            window = self.plan.exchanges[event.exchange].window
            end = max(window.dispatch_inbox.end, window.combine_inbox.end)
            if event.kind == kind and WORKSPACE_BYTES <= event.offset < end:
                yield event

    def on_words(self, kind: str, name: str) -> Iterator[tuple[int, Event]]:
        """(index in its group, event) for every word of group `name` that was set or cleared, one by one."""
        low = WORD_OFFSETS[name]
        high = low + WORD * next(w.count for w in WORDS if w.name == name)
        for event in self.events:
            if event.kind == kind and event.offset < high and low < event.offset + event.bytes:
                for at in range(max(low, event.offset), min(high, event.offset + event.bytes), WORD):
                    yield (at - low) // WORD, event


def record(layout: str, arm: str, tokens: Any, exchanges: int = 3, factories: Any = None, **fields: Any) -> Log:
    plan = make_plan(layout, arm, tokens, exchanges=exchanges, **fields)
    inputs = plan.inputs()
    seen: list[Event] = []
    with replay(describe(plan)):
        run = Machine(H100, observer=lambda *event: seen.append(Event(*event))).run(plan, inputs, factories)
    return Log(plan, inputs, run, seen)


# ---- the checkers ----------------------------------------------------------------------------------------------------


def check_readers(log: Log) -> None:
    """(a) A row's landing comes after the end of every earlier exchange's kernel that reads the inbox, and every read
    of a row comes after that exchange's landing of it."""
    readers = {"copy_epilogue": Role.FFN, "reduce_epilogue": Role.ATTENTION}
    finished: dict[tuple[int, int], float] = {}
    for launch in log.run.events.launches:
        if readers.get(launch.kernel) is log.plan.topology.role(launch.rank):
            finished[launch.rank, launch.exchange] = launch.end_ns
    landed: dict[tuple[int, int], int] = {}
    read: dict[tuple[int, int], int] = {}
    for event in log.events:
        inbox = log.inbox(event.rank)
        if not inbox.offset <= event.offset < inbox.end:
            continue
        row = (event.rank, event.offset)
        if event.kind == "land":
            landed[row] = event.exchange
            before = finished.get((event.rank, event.exchange - 1), 0.0)
            assert event.time_ns >= before, f"{event} lands before the previous reader's end at {before}"
            assert read.get(row, -1) < event.exchange, f"{event} lands after a read of its own exchange"
        elif event.kind == "read":
            assert landed.get(row) == event.exchange, f"{event} reads what landed in exchange {landed.get(row)}"
            read[row] = event.exchange


def receivers_of_counts(plan: Plan) -> tuple[range, range]:
    """(sources, receivers) of the count exchange."""
    topology = plan.topology
    if plan.resolved.union_counts:
        return range(topology.ranks), range(topology.ranks)
    return topology.attention, topology.ffn


def check_count_words(log: Log) -> None:
    """(b) Each count word that a receiver awaits is set once per exchange and cleared before its next set."""
    topology = log.plan.topology
    experts = log.plan.workload.experts_per_rank(topology)
    sources, receivers = receivers_of_counts(log.plan)
    awaited = {
        (rank, index)
        for rank in receivers
        for source in sources
        for index in (source, *range(topology.ranks + experts * source, topology.ranks + experts * (source + 1)))
    }
    history: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    order = [e for e in log.events if e.kind in ("set", "clear")]
    wanted = [(kind, n) for n in range(log.exchanges) for kind in ("set", "clear")]
    for event in order:
        one = replace(log, events=[event])
        for index, _ in one.on_words(event.kind, "counts"):
            history[event.rank, index].append((event.kind, event.exchange))
    assert set(history) == awaited, f"words set or cleared that nobody awaits: {sorted(set(history) ^ awaited)[:5]}"
    for (rank, index), found in history.items():
        assert found == wanted, f"rank {rank} counts[{index}]: {found}"


def arrivals_expected(plan: Plan) -> dict[str, Counter[tuple[int, int]]]:
    """Word group -> (rank, index) -> sets per exchange.

    Record section 3: every sending block releases one arrival to each receiver, or with grid synchronisation block 0
    releases one per rank; with upstream's exit (upstream section 3.3) nobody does, all ranks meet at the barrier.
    """
    topology, exit_ = plan.topology, plan.resolved.exit
    per_source = {Exit.PER_BLOCK: plan.resolved.transport_sms, Exit.GRID: 1, Exit.ALL_RANKS: 0}[exit_]
    dispatch = {(ffn, source): per_source for ffn in topology.ffn for source in topology.attention if per_source}
    combine = {(to, ffn): per_source for to in topology.attention for ffn in topology.ffn if per_source}
    return {"dispatch_arrivals": Counter(dispatch), "combine_arrivals": Counter(combine)}


def barriers_per_exchange(plan: Plan) -> int:
    """Two kernels, each with an entry barrier (upstream sections 3.0 and 5) and an exit barrier (section 3.3)."""
    return 2 * plan.resolved.entry_barriers + 2 * (plan.resolved.exit is Exit.ALL_RANKS)


def check_arrival_words(log: Log) -> None:
    """(b) Arrival words and barrier words are set as often per exchange as their life cycle says, never cleared."""
    for name, expected in arrivals_expected(log.plan).items():
        assert not list(log.on_words("clear", name)), f"{name} is cleared"
        found = Counter((event.exchange, event.rank, index) for index, event in log.on_words("set", name))
        wanted = {(n, *word): sets for n in range(log.exchanges) for word, sets in expected.items()}
        assert found == wanted, f"{name}: {found - Counter(wanted)} too many, {Counter(wanted) - found} too few"
    ranks, calls = log.plan.topology.ranks, barriers_per_exchange(log.plan)
    found = Counter((event.exchange, event.rank) for _, event in log.on_words("set", "barrier_signals"))
    wanted = {(n, r): calls * ranks for n in range(log.exchanges) for r in range(ranks) if calls}
    assert found == wanted, f"barrier signals by (exchange, rank): {found}, not {wanted}"


def check_writers(log: Log) -> None:
    """(c) Every (region, row) of an inbox is written at most once per exchange, whole, and nothing lies between."""
    written: set[tuple[int, int, int]] = set()
    for event in log.in_inbox("land"):
        inbox = log.inbox(event.rank)
        at = (event.exchange, event.rank, event.offset)
        assert at not in written, f"{event} is the second writer of its row"
        assert event.offset < inbox.end, f"{event} is beyond the inbox of its rank's role"
        assert (event.offset - inbox.offset) % inbox.row_bytes == 0, f"{event} is not at the start of a row"
        assert event.bytes == log.row_bytes(event.rank), f"{event} is not a whole row"
        written.add(at)


def first_region(plan: Plan, rank: int) -> int:
    """The rank that owns region 0 of `rank`'s inbox."""
    return 0 if plan.resolved.union_buffers or plan.topology.role(rank) is Role.ATTENTION else plan.topology.ffn_ranks


def landed_rows(log: Log, exchange: int) -> Counter[tuple[int, int]]:
    """(writer by the region written, rank) -> rows that landed in an inbox."""
    rows: Counter[tuple[int, int]] = Counter()
    for event in log.in_inbox("land"):
        if event.exchange == exchange:
            inbox = log.inbox(event.rank)
            region = (event.offset - inbox.offset) // inbox.row_bytes // inbox.rows
            rows[first_region(log.plan, event.rank) + region, event.rank] += 1
    return rows


def expected_rows(log: Log, exchange: int) -> Counter[tuple[int, int]]:
    """(sender, receiver) -> rows of one exchange: those of the reference, and one reply for each."""
    sent = rows_expected(log.plan.topology, log.plan.exchanges[exchange].workload, log.inputs[exchange])
    return Counter({**sent, **{(ffn, source): rows for (source, ffn), rows in sent.items()}})


def check_rows(log: Log) -> None:
    """(e) As many rows land per (sender, receiver) as the reference counts."""
    for exchange in range(log.exchanges):
        found, wanted = landed_rows(log, exchange), expected_rows(log, exchange)
        assert found == +wanted, f"exchange {exchange}: rows by (sender, receiver) are {found}, not {+wanted}"


def check_bytes(log: Log) -> None:
    """(h) Bytes out of and into every port are dR per dispatched row and 2H per reply, words apart."""
    topology = log.plan.topology
    out, into, rows = ([0] * topology.ranks for _ in range(3))
    for exchange in range(log.exchanges):
        for (sender, receiver), count in expected_rows(log, exchange).items():
            out[sender] += count * log.row_bytes(receiver)
            into[receiver] += count * log.row_bytes(receiver)
            rows[sender] += count
    counters = log.run.events.counters
    assert [c["bytes_out"] for c in counters] == out
    assert [c["bytes_in"] for c in counters] == into
    assert [c["rows"] for c in counters] == rows
    landed = Counter[int]()
    for event in log.in_inbox("land"):
        landed[event.rank] += event.bytes
    assert [landed[rank] for rank in range(topology.ranks)] == into, "landed bytes are not those of the port"


def counts_expected(plan: Plan, rank: int) -> dict[str, int]:
    """Protocol events of `rank` per exchange.

    M2N (upstream): kernels 4, dispatch, copy epilogue, combine and reduce epilogue on every rank (sections 3 to 6);
    barriers 4, entry and exit of dispatch and combine (sections 3.0, 3.3 and 5); count words R * (1 + El): a rank word
    and El expert words published to each of R ranks, itself included (section 3.1 step 5); signals R per barrier
    (section 10.1) and no others.

    afdEP-comm (record sections 1 to 3): kernels 3, the epilogue of the rank's own role only; barriers 0; count words
    F * (1 + El) from each source, none from an FFN rank; signals G per peer of the other role in the phase in which the
    rank sends. The controls put one or the other back.
    """
    topology, resolved = plan.topology, plan.resolved
    attention = topology.role(rank) is Role.ATTENTION
    words = 1 + plan.workload.experts_per_rank(topology)
    barriers = barriers_per_exchange(plan)
    peers = topology.ffn_ranks if attention else topology.attention_ranks
    arrivals = {Exit.PER_BLOCK: resolved.transport_sms, Exit.GRID: 1, Exit.ALL_RANKS: 0}[resolved.exit]
    count_words = topology.ranks * words if resolved.union_counts else topology.ffn_ranks * words if attention else 0
    return {
        "kernels": 3 if resolved.role_aware else 4,
        "barriers": barriers,
        "count_words": count_words,
        "signals": barriers * topology.ranks + arrivals * peers,
    }


def check_counts(log: Log) -> None:
    """(i) Events per rank equal the formulas of upstream and of the record."""
    for rank, counters in enumerate(log.run.events.counters):
        wanted = {name: count * log.exchanges for name, count in counts_expected(log.plan, rank).items()}
        found = {name: counters[name] for name in wanted}
        assert found == wanted, f"rank {rank}: {found}, not {wanted}"
    kernels = Counter((launch.rank, launch.exchange) for launch in log.run.events.launches)
    for (rank, exchange), count in kernels.items():
        assert count == counts_expected(log.plan, rank)["kernels"], f"rank {rank} exchange {exchange}: {count} kernels"


def words_expected(log: Log, rank: int) -> dict[str, dict[int, int]]:
    """Monotonic word group -> index -> value after the run; every other index of the group is 0."""
    plan, n = log.plan, log.exchanges
    attention = plan.topology.role(rank) is Role.ATTENTION
    resolved = plan.resolved
    calls = n * barriers_per_exchange(plan)
    # Call i raises (i mod 4 = 0, 1) or lowers (2, 3) word i mod 2 by one for each rank (upstream section 10.1).
    signals = {word: plan.topology.ranks * sum(1 - (i & 2) for i in range(word, calls, 2)) for word in (0, 1)}
    # An entry barrier is followed by a grid synchronisation, upstream's exit barrier and the grid exit are preceded
    # by one; the grid exit only where rows are sent, which each role does in one of the two kernels.
    per_exchange = 2 * resolved.entry_barriers + {Exit.PER_BLOCK: 0, Exit.GRID: 1, Exit.ALL_RANKS: 2}[resolved.exit]
    rounds = n if resolved.exit is not Exit.ALL_RANKS else 0
    arrivals = {
        name: {index: n * sets for (r, index), sets in expected.items() if r == rank}
        for name, expected in arrivals_expected(plan).items()
    }
    return {
        "barrier_calls": {0: calls},
        "barrier_signals": signals,
        "grid_arrivals": {0: n * per_exchange * resolved.transport_sms},
        "dispatch_round": {0: 0 if attention else rounds},
        "combine_round": {0: rounds if attention else 0},
        **arrivals,
    }


def check_final_words(log: Log) -> None:
    """Every cleared word is 0 on every rank, every monotonic one has the value its life cycle implies."""
    assert {w.kind for w in WORDS} == {CLEARED, MONOTONIC}
    for rank, words in enumerate(log.run.words):
        want = np.zeros(WORKSPACE_BYTES // WORD, np.int64)
        expected = words_expected(log, rank)
        assert set(expected) == {w.name for w in WORDS if w.kind == MONOTONIC}
        for name, values in expected.items():
            for index, value in values.items():
                want[WORD_OFFSETS[name] // WORD + index] = value
        for word in WORDS:
            low = WORD_OFFSETS[word.name] // WORD
            got, wanted = words[low : low + word.count], want[low : low + word.count]
            at = np.flatnonzero(got != wanted)
            assert not at.size, f"rank {rank} {word.name}[{at[0]}] is {got[at[0]]}, not {wanted[at[0]]} ({word.kind})"
        assert np.array_equal(words, want), f"rank {rank} has a word set that belongs to no group"


CHECKERS = (
    check_readers,
    check_count_words,
    check_arrival_words,
    check_writers,
    check_rows,
    check_bytes,
    check_counts,
    check_final_words,
)

# ---- every run -------------------------------------------------------------------------------------------------------

RUNS = [
    *(("2A2F", arm, tokens) for arm in BASIC_ARMS for tokens in (0, 1, 33, 128)),
    *(("2A2F", arm, 33) for arm in CONTROL_ARMS),
    *(("2A2F", arm, tokens) for arm in BASIC_ARMS for tokens in ((0, 40), (40, 0))),
    *((layout, arm, 9) for arm in BASIC_ARMS for layout in ("1A1F", "3A1F", "1A3F", "2A1F", "5A2F")),
    ("2A1F", "afdep+AFDEP_KEEP_ENTRY_BARRIERS=1+AFDEP_UNION_NOTIFY=1+AFDEP_UNION_BUFFERS=1", 9),
    ("2A1F", "afdep+AFDEP_KEEP_ENTRY_BARRIERS=1+AFDEP_GRID_SYNC_EXIT=1", 9),
]


@pytest.mark.parametrize(("layout", "arm", "tokens"), RUNS)
def test_everything_that_must_hold_holds(layout: str, arm: str, tokens: Any) -> None:
    log = record(layout, arm, tokens)
    with replay(describe(log.plan)):
        for check in CHECKERS:
            check(log)


@pytest.mark.parametrize("arm", BASIC_ARMS)
@pytest.mark.parametrize("exchanges", [1, 2, 5])
def test_everything_holds_after_any_number_of_exchanges(arm: str, exchanges: int) -> None:
    log = record("2A2F", arm, 5, exchanges, sms=3, hidden=512)
    with replay(describe(log.plan)):
        for check in CHECKERS:
            check(log)


UNSCALED = ("name", "gpu", "gather_pass_bytes", "gather_in_flight_slots", "words_queue_behind_rows")
TIMES_AND_RATES = [f.name for f in fields(Profile) if f.name not in UNSCALED]


def check_any_machine(seed: int) -> None:
    """A random layout, arm, load and profile: whatever is slow or fast, rows, words and counts are right."""
    rng = random.Random(seed)
    layout = rng.choice(["2A2F", "1A1F", "3A1F", "1A3F", "2A1F", "4A2F"])
    switches = [arm.removeprefix("afdep") for arm in CONTROL_ARMS if rng.random() < 0.3]
    arm = "fastafd_m2n" if rng.random() < 0.3 else "afdep" + "".join(switches)
    tokens = tuple(rng.choice([0, 1, 2, 7, 23, 24, 25, 40]) for _ in range(int(layout[0])))
    sms, routing, alignment = rng.choice([1, 2, 3, 24]), rng.choice(["random", "skew"]), rng.choice([1, 8])
    plan = make_plan(layout, arm, tokens, exchanges=2, sms=sms, routing=routing, expert_alignment=alignment, seed=seed)
    factors = {name: rng.choice([0.01, 0.1, 0.5, 2, 10, 50]) for name in TIMES_AND_RATES if rng.random() < 0.4}
    profile = H100.scaled(**factors, words_queue_behind_rows=rng.choice([0, 1]))
    seen: list[Event] = []
    with replay(f"check_any_machine({seed}): {describe(plan)}, profile scaled by {factors}"):
        inputs = plan.inputs()
        observer: Any = lambda *event: seen.append(Event(*event))  # noqa: E731
        run = run_checked(plan, profile=profile, inputs=inputs, seed=seed, observer=observer)
        for check in CHECKERS:
            check(Log(plan, inputs, run, seen))
        timed = run_timed(plan, profile=profile, inputs=inputs, seed=seed)
        assert_equal_events(timed, run.events, "runs without and with data")


@pytest.mark.parametrize("seed", range(12))
def test_everything_holds_on_any_machine(seed: int) -> None:
    check_any_machine(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_everything_holds_on_any_machine_soak(seed: int) -> None:
    check_any_machine(seed)


def test_the_formulas_in_figures() -> None:
    # 2A2F, 128 experts, 24 transport SMs: 64 experts a rank.
    m2n, afdep = (make_plan("2A2F", arm, 8) for arm in ("fastafd_m2n", "afdep"))
    every_rank = {"kernels": 4, "barriers": 4, "count_words": 4 * 65, "signals": 16}
    assert [counts_expected(m2n, rank) for rank in range(4)] == [every_rank] * 4
    ffn = {"kernels": 3, "barriers": 0, "count_words": 0, "signals": 24 * 2}
    attention = {"kernels": 3, "barriers": 0, "count_words": 2 * 65, "signals": 24 * 2}
    assert [counts_expected(afdep, rank) for rank in range(4)] == [ffn, ffn, attention, attention]


# ---- every checker can fail ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[*BASIC_ARMS, "afdep+AFDEP_GRID_SYNC_EXIT=1"])
def log(request: pytest.FixtureRequest) -> Log:
    return record("2A2F", request.param, 9, exchanges=2)


def first(log: Log, kind: str, exchange: int, low: int, high: int, rank: int | None = None) -> int:
    """The first event of a kind and exchange whose offset is in [low, high)."""
    return next(
        i
        for i, e in enumerate(log.events)
        if e.kind == kind and e.exchange == exchange and low <= e.offset < high and rank in (None, e.rank)
    )


def first_word(log: Log, kind: str, exchange: int, name: str) -> int:
    count = next(w.count for w in WORDS if w.name == name)
    return first(log, kind, exchange, WORD_OFFSETS[name], WORD_OFFSETS[name] + WORD * count)


def first_landing(log: Log, exchange: int, rank: int) -> int:
    return first(log, "land", exchange, WORKSPACE_BYTES, log.inbox(rank).end, rank)


def changed(log: Log, at: int, *events: Event) -> Log:
    """The log with event `at` replaced by `events`."""
    return replace(log, events=[*log.events[:at], *events, *log.events[at + 1 :]])


def landing_early(log: Log, rank: int) -> Log:
    """A landing of the second exchange right after the first row of the first exchange was read."""
    at = first_landing(log, 1, rank)
    event = log.events[at]
    time_ns = log.run.events.ends_ns[rank][0] / 2
    rest = log.events[:at] + log.events[at + 1 :]
    place = next(i for i, e in enumerate(rest) if e.time_ns > time_ns)
    return replace(log, events=[*rest[:place], event._replace(time_ns=time_ns), *rest[place:]])


def read_early(log: Log, rank: int) -> Log:
    """A row read before it landed."""
    at = first_landing(log, 0, rank)
    event = log.events[at]
    return changed(log, at, event._replace(kind="read"), event)


def dropped(log: Log, at: int) -> Log:
    return changed(log, at)


def doubled(log: Log, at: int) -> Log:
    return changed(log, at, log.events[at], log.events[at])


def moved(log: Log, at: int, **fields: Any) -> Log:
    return changed(log, at, log.events[at]._replace(**fields))


def counters_changed(log: Log, rank: int, name: str) -> Log:
    counters = [dict(c) for c in log.run.events.counters]
    counters[rank][name] += 1
    return replace(log, run=replace(log.run, events=replace(log.run.events, counters=counters)))


def word_changed(log: Log, rank: int, offset: int) -> Log:
    words = [w.copy() for w in log.run.words]
    words[rank][offset // WORD] += 1
    return replace(log, run=replace(log.run, words=words))


def launch_dropped(log: Log) -> Log:
    events = replace(log.run.events, launches=log.run.events.launches[1:])
    return replace(log, run=replace(log.run, events=events))


def of_another_row(log: Log, rank: int) -> int:
    """The offset of the second row of the inbox that landed in the first exchange."""
    at = first_landing(log, 0, rank)
    return next(
        e.offset
        for e in log.in_inbox("land")
        if e.rank == rank and e.exchange == 0 and e.offset != log.events[at].offset
    )


def cleared_late(log: Log) -> Log:
    """The first clear of count words right after their next set."""
    at = first_word(log, "clear", 0, "counts")
    clear = log.events[at]
    again = first(log, "set", 1, clear.offset, clear.offset + clear.bytes, clear.rank)
    events = [*log.events[: again + 1], clear, *log.events[again + 1 :]]
    return replace(log, events=events[:at] + events[at + 1 :])


def landing_elsewhere(log: Log) -> Log:
    """A dispatched row in the last row of the other source's region, where no row of its own lands."""
    at = first_landing(log, 1, FFN)
    inbox = log.inbox(FFN)
    region_bytes = inbox.rows * inbox.row_bytes
    mine = (log.events[at].offset - inbox.offset) // region_bytes
    other = next(s for s in log.plan.topology.attention if s - first_region(log.plan, FFN) != mine)
    end = inbox.offset + (other - first_region(log.plan, FFN) + 1) * region_bytes
    return moved(log, at, offset=end - inbox.row_bytes)


FFN, ATTENTION = 0, 2
Tamper = Callable[[Log], Log]
TAMPERED: dict[str, tuple[Callable[[Log], None], Tamper]] = {
    "an FFN row of the next exchange lands early": (check_readers, lambda log: landing_early(log, FFN)),
    "a reply of the next exchange lands early": (check_readers, lambda log: landing_early(log, ATTENTION)),
    "an FFN row is read before it landed": (check_readers, lambda log: read_early(log, FFN)),
    "a reply is read before it landed": (check_readers, lambda log: read_early(log, ATTENTION)),
    "a row that is read never landed": (check_readers, lambda log: dropped(log, first_landing(log, 1, FFN))),
    "a count word is not cleared": (check_count_words, lambda log: dropped(log, first_word(log, "clear", 0, "counts"))),
    "a count word is cleared too late": (check_count_words, cleared_late),
    "a count word is not set": (check_count_words, lambda log: dropped(log, first_word(log, "set", 1, "counts"))),
    "a count word is set twice": (check_count_words, lambda log: doubled(log, first_word(log, "set", 1, "counts"))),
    "a count word is set for nobody": (
        check_count_words,
        lambda log: moved(log, first_word(log, "set", 0, "counts"), offset=WORD_OFFSETS["counts"] + WORD * 3000),
    ),
    "a row lands twice": (check_writers, lambda log: doubled(log, first_landing(log, 0, FFN))),
    "a reply lands twice": (check_writers, lambda log: doubled(log, first_landing(log, 1, ATTENTION))),
    "two rows land in one place": (
        check_writers,
        lambda log: moved(log, first_landing(log, 0, FFN), offset=of_another_row(log, FFN)),
    ),
    "a row lands between two": (
        check_writers,
        lambda log: moved(log, first_landing(log, 0, FFN), offset=WORKSPACE_BYTES + 32),
    ),
    "a row is cut short": (check_writers, lambda log: moved(log, first_landing(log, 0, FFN), bytes=512)),
    "a row lands in the region of another source": (check_rows, landing_elsewhere),
    "a row is lost": (check_rows, lambda log: dropped(log, first_landing(log, 1, FFN))),
    "a reply is lost": (check_rows, lambda log: dropped(log, first_landing(log, 0, ATTENTION))),
    "a reply lands twice, counted": (check_rows, lambda log: doubled(log, first_landing(log, 0, ATTENTION))),
    "a landed row is too short for the port": (
        check_bytes,
        lambda log: moved(log, first_landing(log, 0, FFN), bytes=512),
    ),
    "a byte leaves that no row has": (check_bytes, lambda log: counters_changed(log, ATTENTION, "bytes_out")),
    "a byte comes in that no row has": (check_bytes, lambda log: counters_changed(log, FFN, "bytes_in")),
    "a row is sent that nobody expects": (check_bytes, lambda log: counters_changed(log, FFN, "rows")),
    **{
        f"one of the {name} too many": (check_counts, lambda log, name=name: counters_changed(log, 1, name))
        for name in ("kernels", "barriers", "count_words", "signals")
    },
    "a kernel is not launched": (check_counts, launch_dropped),
    **{
        f"{word.name} is one too high": (
            check_final_words,
            lambda log, word=word: word_changed(log, 3, WORD_OFFSETS[word.name] + WORD * (word.count - 1)),
        )
        for word in WORDS
    },
    "a word between two groups is set": (
        check_final_words,
        lambda log: word_changed(log, 0, WORD_OFFSETS["barrier_calls"] + WORD),
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_log_is_seen(log: Log, name: str) -> None:
    check, tamper = TAMPERED[name]
    check(log)
    with pytest.raises(AssertionError):
        check(tamper(log))


@pytest.mark.parametrize("change", ["dropped", "doubled", "moved"])
def test_a_tampered_arrival_is_seen(log: Log, change: str) -> None:
    name = "barrier_signals" if log.plan.resolved.exit is Exit.ALL_RANKS else "dispatch_arrivals"
    check_arrival_words(log)
    at = first_word(log, "set", 1, name)
    tampered = {
        "dropped": lambda: dropped(log, at),
        "doubled": lambda: doubled(log, at),
        "moved": lambda: moved(log, at, rank=1 - log.events[at].rank),
    }[change]()
    with pytest.raises(AssertionError):
        check_arrival_words(tampered)


def test_a_cleared_arrival_is_seen(log: Log) -> None:
    clear = Event("clear", 0, WORD_OFFSETS["combine_arrivals"], WORD, -1, log.events[-1].time_ns, 1)
    with pytest.raises(AssertionError):
        check_arrival_words(replace(log, events=[*log.events, clear]))


def test_the_checkers_see_a_broken_text() -> None:
    clear = "                ops.counts_clear(by_rank, sources)\n"
    log = record("2A2F", "afdep", 1, exchanges=1, factories=broken("dispatch", (clear, "")))
    with pytest.raises(AssertionError, match=r"rank \d counts\[[23]\]: \[\('set', 0\)\]"):
        check_count_words(log)
    with pytest.raises(AssertionError, match=r"rank 0 counts\[2\] is -\d, not 0 \(cleared\)"):
        check_final_words(log)
