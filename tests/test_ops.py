"""The model's operations against the documented vocabulary and against small values worked out by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import H100, Place, make_plan, model_ops, on_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from afdep_sim.kernels import ops as vocabulary
from afdep_sim.kernels import phases as ph
from afdep_sim.model.rows import ProtocolError, RouteError
from afdep_sim.plan import Plan
from afdep_sim.reference import reduce_rows
from afdep_sim.workload import Source

OPS = model_ops()
LOW_HALF = (1 << 32) - 1


def ask(body: Callable[[Place], Any], plan: Plan | None = None) -> Any:
    """What `body` answers when it runs as the text of one agent."""
    answers: list[Any] = []
    on_attention(lambda place: answers.append(body(place)), plan=plan)
    return answers[0]


# ---- the vocabulary --------------------------------------------------------------------------------------------------


def documented() -> dict[str, Callable[..., Any]]:
    return {name: f for name, f in vars(vocabulary).items() if inspect.isfunction(f) and not name.startswith("_")}


def test_the_model_has_exactly_the_documented_operations() -> None:
    mine = {name for name in vars(OPS) if not name.startswith("__")}
    assert mine == set(documented())
    assert len(mine) > 40


@pytest.mark.parametrize("name", sorted(documented()))
def test_an_operation_has_the_documented_parameters_in_order(name: str) -> None:
    mine, theirs = inspect.signature(getattr(OPS, name)), inspect.signature(documented()[name])
    assert [(p.name, p.kind, p.default) for p in mine.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]
    assert documented()[name].__doc__, f"{name} is not documented"


# ---- lane values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expert", "per_rank", "owner"),
    [
        ([], 4, []),
        ([-1, -1], 4, [-1, -1]),
        ([5], 4, [1]),
        ([0, 4, 8, 12], 4, [0, 1, 2, 3]),
        ([0, 1, 2, 3], 4, [-1, -1, -1, 0]),
        ([3, 4, 0, 7], 4, [-1, -1, 0, 1]),
        ([-1, 9, -1, 8, 1, -1], 4, [-1, -1, -1, 2, 0, -1]),
        ([0, -1], 4, [0, -1]),
        ([255, 0, 255], 256, [-1, -1, 0]),
        ([2047, 1984, 0], 64, [-1, 31, 0]),
    ],
)
def test_lanes_owner_keeps_the_highest_lane_of_each_owner(expert: list[int], per_rank: int, owner: list[int]) -> None:
    assert OPS.lanes_owner(expert, per_rank) == owner


@given(st.lists(st.integers(-1, 63), max_size=32), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_lanes_owner_is_its_definition(expert: list[int], per_rank: int) -> None:
    owners = [e // per_rank if e >= 0 else -1 for e in expert]
    want = [o if o >= 0 and o not in owners[lane + 1 :] else -1 for lane, o in enumerate(owners)]
    assert OPS.lanes_owner(expert, per_rank) == want


@pytest.mark.parametrize(
    ("lanes", "low", "count", "want"),
    [
        ([], 0, 4, []),
        ([3, 4, 7, 8, -1], 4, 4, [-1, 0, 3, -1, -1]),
        ([-1, 0, 1], 0, 1, [-1, 0, -1]),
        ([5, 5], 5, 0, [-1, -1]),
    ],
)
def test_lanes_in_range(lanes: list[int], low: int, count: int, want: list[int]) -> None:
    assert OPS.lanes_in_range(lanes, low, count) == want


def test_lanes_offset_leaves_minus_one_alone() -> None:
    assert OPS.lanes_offset([-1, 0, 7, -1], 16) == [-1, 16, 23, -1]
    assert OPS.lanes_offset([], 16) == []


def test_lanes_highest_and_max() -> None:
    assert OPS.lanes_highest([]) == -1
    assert OPS.lanes_highest([-1, -1]) == -1
    assert OPS.lanes_highest([9, -1, 0, -1]) == 2
    assert OPS.lanes_highest([0]) == 0
    assert OPS.lanes_max([-1, 4, 11, 3]) == 11
    assert OPS.lanes_max([-1, -1]) == -1


def test_lanes_count_counts_lanes_with_a_value() -> None:
    assert ask(lambda p: [p.ops.lanes_count(v) for v in ([-1] * 8, [0, -1, 5], [1, 2, 3])]) == [0, 2, 3]


def test_lanes_load_store_and_scatter() -> None:
    def body(p: Place) -> tuple[list[int], list[int], int]:
        at = p.tensors["combined_x"]
        p.ops.store_lanes(at, [0] * 8)
        p.ops.lanes_scatter(at, [5, -1, 0, 3], [10, 11, 12, -13])
        p.ops.store_lanes(at + 32, [-1, 7])
        p.ops.store_i32(at + 36, -9)
        return p.ops.load_lanes(at, 8), p.ops.load_lanes(at + 32, 2), p.ops.load_i32(at + 36)

    assert ask(body) == ([12, 0, 0, -13, 0, 10, 0, 0], [-1, -9], -9)


def test_lanes_fetch_add_takes_the_next_of_each_word() -> None:
    def body(p: Place) -> list[list[int]]:
        at = p.tensors["combined_x"]
        for word, value in enumerate((3, 0, 100)):
            p.ops.store_relaxed(at + 8 * word, value)
        taken = [p.ops.lanes_fetch_add(at, [2, -1, 0, 1]), p.ops.lanes_fetch_add(at, [-1, 0, -1, 1])]
        return [*taken, p.ops.lanes_fetch_add(at, []), [p.ops.load_relaxed(at + 8 * w) for w in range(3)]]

    assert ask(body) == [[100, -1, 3, 0], [-1, 4, -1, 1], [], [5, 2, 101]]


# ---- words -----------------------------------------------------------------------------------------------------------


def test_words_of_one_rank() -> None:
    def body(p: Place) -> list[int]:
        at = p.tensors["combined_x"]
        p.ops.store_relaxed(at, -5)
        p.ops.store_relaxed(at + 8, (1 << 40) + 1)
        p.ops.store_relaxed(at + 16, 3)
        before = p.ops.fetch_add_acq_rel(at, 12)
        p.ops.clear_words(at + 8, 1)
        return [before, *(p.ops.load_relaxed(at + 8 * word) for word in range(3))]

    assert ask(body) == [-5, 7, 0, 3]


def test_an_add_to_a_range_of_ranks_reaches_those_and_no_other() -> None:
    plan = make_plan("3A2F", "afdep", 8)
    offset = plan.exchanges[0].window.tensors["slot_of_lane"].offset

    def body(p: Place) -> list[list[int]]:
        words = [p.ops.peer(p.ctx, rank) + offset for rank in range(5)]
        p.ops.add_release_each(p.ctx, 1, 3, offset, 5)
        at_once = [p.ops.load_i32(word) for word in words]
        p.ops.wait_each_ge(p.ctx, p.window + offset, 1, 5, ph.DISPATCH_ARRIVAL)
        for _ in range(10):
            p.ops.load_relaxed(p.window)
        return [at_once, [p.ops.load_i32(word) for word in words]]

    assert plan.topology.attention[0] == 2
    assert ask(body, plan) == [[0, 0, 0, 0, 0], [0, 5, 5, 5, 0]]


def wait_end_ns(delay_turns: int) -> tuple[float, float]:
    """(when a word landed that was posted at once, when a wait for it that began `delay_turns` loads later ended)."""
    times: list[float] = []

    def body(p: Place) -> None:
        p.ops.phase(p.ctx, ph.DISPATCH_START)
        p.ops.add_release_each(p.ctx, p.rank, 1, 0, 1)
        for _ in range(delay_turns):
            p.ops.stage_fence()
        p.ops.wait_each_ge(p.ctx, p.window, 1, 1, ph.DISPATCH_ARRIVAL)
        p.ops.phase(p.ctx, ph.DISPATCH_END)

    events = on_attention(body).events
    times = [m.time_ns for m in events.marks if m.phase in (ph.DISPATCH_START, ph.DISPATCH_END)]
    assert len(times) == 2, f"{len(times)} marks"
    return times[0] + H100.local_word_ns, times[1]


def test_a_wait_ends_after_its_word_lands_and_not_before_one_load() -> None:
    landed, ended = wait_end_ns(0)
    assert ended >= landed
    for turns in (30, 60):
        _, ended = wait_end_ns(turns)
        began = landed - H100.local_word_ns + H100.store_word_ns + turns * H100.issue_ns
        assert ended >= max(landed, began + H100.load_ns), f"{turns} turns: began {began}, landed {landed}, {ended}"


def test_a_wait_that_begins_later_does_not_end_earlier() -> None:
    ends = [wait_end_ns(turns)[1] for turns in range(25, 45)]
    assert ends == sorted(ends), f"ends of waits that begin {H100.issue_ns} ns after one another: {ends}"


def test_a_word_that_lands_later_does_not_end_a_wait_earlier() -> None:
    # A slower port or signal would otherwise make an exchange faster: the first poll is a load in either case.
    def ended(local_word_ns: float) -> float:
        def body(p: Place) -> None:
            p.ops.add_release_each(p.ctx, p.rank, 1, 0, 1)
            for _ in range(30):
                p.ops.stage_fence()
            p.ops.wait_each_ge(p.ctx, p.window, 1, 1, ph.DISPATCH_ARRIVAL)
            p.ops.phase(p.ctx, ph.DISPATCH_END)

        profile = H100.scaled(local_word_ns=local_word_ns / H100.local_word_ns)
        marks = on_attention(body, profile=profile).events.marks
        return next(m.time_ns for m in marks if m.phase == ph.DISPATCH_END)

    landings = [500.0, 600.0, 620.0, 640.0, 660.0, 700.0, 800.0, 1000.0]
    ends = [ended(landing) for landing in landings]
    assert ends == sorted(ends), f"words that land {landings} ns after they are posted end waits at {ends}"


# ---- counts ----------------------------------------------------------------------------------------------------------


def brute_force_counts(topk: np.ndarray, block: int, blocks: int, receivers: int, experts: int) -> list[int]:
    ranks, per_expert = [0] * receivers, [0] * (receivers * experts)
    for token in range(block, len(topk), blocks):
        valid = [int(e) for e in topk[token] if e >= 0]
        for expert in valid:
            per_expert[expert] += 1
        for rank in {expert // experts for expert in valid}:
            ranks[rank] += 1
    return ranks + per_expert


def counted(topk: np.ndarray, receivers: int, experts: int, sms: int) -> list[list[int]]:
    """Every block's shared counters after `count_routes`, read back as what it adds to words of its own."""
    tokens, lanes = topk.shape
    words = receivers * (1 + experts)
    plan = make_plan("1A1F", "afdep", tokens, sms=sms, topk=lanes, experts=256, bucket=1024, hidden=1024)
    source = Source(np.zeros((tokens, 1024), np.uint16), topk, np.zeros(topk.shape, np.float32))
    answers: dict[int, list[int]] = {}

    def body(p: Place) -> None:
        block = p.ops.block_id()
        at = p.tensors["combined_x"] + 8 * words * block
        for word in range(words):
            p.ops.store_relaxed(at + 8 * word, 0)
        p.ops.count_routes(p.tensors["topk"], lanes, tokens, receivers, experts)
        p.ops.counts_add(at, words)
        p.ops.wait_each_ge(p.ctx, at, words, 1 << 32, ph.DISPATCH_COUNT_REDUCE)
        found = [p.ops.load_relaxed(at + 8 * word) for word in range(words)]
        assert {value >> 32 for value in found} == {1}, "a block adds itself once to each word"
        answers[block] = [value & LOW_HALF for value in found]

    on_attention(body, plan=plan, inputs=[{1: source}], every_block=True)
    return [answers[block] for block in range(sms)]


@pytest.mark.parametrize(
    ("tokens", "sms"), [(0, 3), (1, 3), (4, 1), (5, 1), (12, 3), (13, 3), (29, 3), (64, 1), (7, 24), (130, 24)]
)
@pytest.mark.parametrize("lanes", [2, 8])
def test_count_routes_equals_a_brute_force_count(tokens: int, sms: int, lanes: int) -> None:
    # Up to 4 tokens a block are counted one way, more another: both sizes occur on either side of it.
    receivers, experts = 3, 4
    rng = np.random.default_rng([tokens, sms, lanes])
    topk = rng.integers(-1, receivers * experts, (tokens, lanes)).astype(np.int64)
    topk[rng.random(tokens) < 0.2] = -1
    found = counted(topk, receivers, experts, sms)
    for block in range(sms):
        want = brute_force_counts(topk, block, sms, receivers, experts)
        assert found[block] == want, f"block {block} of {sms}, routes {topk[block::sms].tolist()}"


def test_count_routes_by_hand() -> None:
    topk = np.array([[0, 1, 4, -1], [4, 5, 6, 7], [-1, -1, -1, -1]], np.int64)
    #        rank 0, rank 1; experts 0 to 3 of rank 0, then 4 to 7 of rank 1.
    want = [1, 2, 1, 1, 0, 0, 2, 1, 1, 1]
    assert counted(topk, 2, 4, 1) == [want]
    repeated = np.concatenate([topk, topk])
    assert counted(repeated, 2, 4, 1) == [[2 * value for value in want]]


def prefixed(per_source: Sequence[Sequence[int]], first: int, alignment: int) -> tuple[list[int], list[int]]:
    """(psum_rank, psum_expert) for rows (first entry) and rows per expert of each source from rank `first` on."""
    sources, experts = len(per_source), len(per_source[0]) - 1
    ranks = first + sources
    rows = [counts[0] for counts in per_source]
    of_experts = [value for counts in per_source for value in counts[1:]]

    def body(p: Place) -> tuple[list[int], list[int]]:
        at = p.tensors["combined_x"]
        for word, value in enumerate([*rows, *of_experts]):
            p.ops.store_relaxed(at + 8 * word, -value - 1)
        p.ops.wait_counts(p.ctx, at, sources, 0, ph.DISPATCH_COUNT_WAIT)
        p.ops.wait_counts(p.ctx, at + 8 * sources, sources * experts, sources, ph.DISPATCH_COUNT_WAIT)
        p.ops.counts_clear(at, len(rows) + len(of_experts))
        cleared = [p.ops.load_relaxed(at + 8 * word) for word in range(len(rows) + len(of_experts))]
        assert not any(cleared)
        by_rank, by_expert = at + 2048, at + 3072
        p.ops.prefix_counts(by_rank, by_expert, ranks, first, experts, alignment)
        return (
            [p.ops.load_relaxed(by_rank + 8 * word) for word in range(ranks)],
            [p.ops.load_relaxed(by_expert + 8 * word) for word in range(experts + 1)],
        )

    answer: tuple[list[int], list[int]] = ask(body)
    return answer


@pytest.mark.parametrize(
    ("per_source", "first", "alignment", "psum_rank", "psum_expert"),
    [
        ([[0, 0, 0]], 0, 1, [0], [0, 0, 0]),
        ([[3, 2, 1, 1]], 1, 1, [0, 3], [0, 2, 3, 4]),
        ([[3, 2, 1], [0, 0, 0], [4, 0, 4]], 2, 1, [0, 0, 3, 3, 7], [0, 2, 7]),
        ([[3, 2, 1], [0, 0, 0], [4, 0, 4]], 0, 4, [3, 3, 7], [0, 4, 12]),
        ([[5, 5, 0, 3]], 1, 16, [0, 5], [0, 16, 16, 32]),
        ([[16, 16, 17]], 1, 16, [0, 16], [0, 16, 48]),
    ],
)
def test_prefix_counts(
    per_source: list[list[int]], first: int, alignment: int, psum_rank: list[int], psum_expert: list[int]
) -> None:
    assert prefixed(per_source, first, alignment) == (psum_rank, psum_expert)


def test_the_count_reduction_waits_for_every_block() -> None:
    plan = make_plan("1A1F", "afdep", 8, sms=5)
    found: list[list[int]] = []

    def body(p: Place) -> None:
        at = p.tensors["combined_x"]
        p.ops.count_routes(p.tensors["topk"], 8, 8, 1, 128)
        for _ in range(10 * p.ops.block_id()):
            p.ops.load_relaxed(at)
        p.ops.counts_add(p.window, 129)
        if p.ops.block_id() == 0:
            p.ops.wait_counts_reduced(p.ctx, p.window, 129, ph.DISPATCH_COUNT_REDUCE)
            found.append([p.ops.load_relaxed(p.window + 8 * word) for word in (0, 128)])

    on_attention(body, plan=plan, every_block=True)
    assert [value >> 32 for value in found[0]] == [5, 5]
    assert found[0][0] & LOW_HALF == 8


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_find_row_skips_empty_sources() -> None:
    psum = [0, 2, 2, 5, 5]

    def body(p: Place) -> list[int]:
        at = p.tensors["combined_x"]
        for word, value in enumerate(psum):
            p.ops.store_relaxed(at + 8 * word, value)
        return [p.ops.find_row(at, 5, 100, row) for row in range(5)]

    assert ask(body) == [100, 101, 300, 301, 302]


@pytest.mark.parametrize("psum", [[0, 0], [2, 4]])
def test_find_row_beyond_the_rows_received_is_a_protocol_error(psum: list[int]) -> None:
    def body(p: Place) -> None:
        at = p.tensors["combined_x"]
        for word, value in enumerate(psum):
            p.ops.store_relaxed(at + 8 * word, value)
        p.ops.find_row(at, len(psum), 8, psum[-1])

    with pytest.raises(ProtocolError, match=rf"rank 1 dispatch .* row {psum[-1]} beyond the {psum[-1]} rows"):
        on_attention(body)


SPECIAL = np.array(
    [0x0000, 0x8000, 0x3F80, 0xBF80, 0x4049, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x3F81, 0x3B80, 0xBB80], np.uint16
)
"""BF16: both zeros, ones, pi, the smallest and the largest of both signs, and small ones that round away."""


def rows_of_bits(case: str, count: int, hidden: int) -> np.ndarray:
    rng = np.random.default_rng([count, hidden])
    if case == "negative zeros":
        return np.full((count, hidden), 0x8000, np.uint16)
    if case == "special":
        return SPECIAL[rng.integers(0, len(SPECIAL), (count, hidden))]
    bits = rng.integers(0, 1 << 16, (count, hidden), dtype=np.uint16)
    return (bits & np.uint16(0x807F)) | (((bits >> np.uint16(7)) % np.uint16(40) + np.uint16(110)) << np.uint16(7))


@pytest.mark.parametrize("case", ["random", "negative zeros", "special"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("hidden", [256, 2048])
@pytest.mark.filterwarnings("ignore:overflow encountered in add")  # sums of the largest values are infinite
def test_row_reduce_equals_the_reference_bit_for_bit(case: str, count: int, hidden: int) -> None:
    plan = make_plan("1A1F", "afdep", 8, hidden=hidden)
    rows = rows_of_bits(case, 8, hidden)
    rng = np.random.default_rng([count, hidden, 1])
    slots = np.full(8, -1)
    slots[np.sort(rng.permutation(8)[:count])] = rng.permutation(8)[:count]
    source = Source(rows, plan.inputs()[0][1].topk, plan.inputs()[0][1].weights)
    found: list[bytes] = []

    def body(p: Place) -> None:
        size = 2 * hidden
        stage = p.ops.stage(0, size)
        p.ops.row_reduce(stage, size, p.tensors["x"], slots.tolist(), size, 4)
        found.append(bytes(stage[:size]))
        p.ops.stage_fence()
        p.ops.row_store(stage, size, p.tensors["combined_x"] + 3 * size)
        p.ops.stores_wait()

    run = on_attention(body, plan=plan, inputs=[{1: source}])
    want = reduce_rows(rows[slots[slots >= 0]])
    got = np.frombuffer(found[0], np.uint16)
    where = f"{case}, slots {slots.tolist()}"
    assert np.array_equal(got, want), f"{where}: first difference at {np.flatnonzero(got != want)[:1]}"
    assert np.array_equal(run.combined[0][1][3], want), f"{where}: the stored row"
    assert (run.combined[0][1][2] == 0x7FC0).all(), "a row that nobody wrote is poison"


def test_a_row_is_loaded_changed_and_stored() -> None:
    plan = make_plan("1A1F", "afdep", 8)
    source = plan.inputs()[0][1]

    def body(p: Place) -> None:
        stage = p.ops.stage(0, 640)
        parity = 0
        for token in (5, 2):
            p.ops.stores_wait()
            p.ops.row_load(stage, p.tensors["x"] + 512 * token, 512)
            assert p.ops.row_wait(stage, parity) == 1 - parity
            parity = 1 - parity
            p.ops.stage_lanes(stage, 4, [-1, 77])
            p.ops.stage_i32(stage, 12, 78)
            p.ops.stage_fence()
            p.ops.row_store(stage, 512, p.tensors["combined_x"] + 512 * token)
        p.ops.stores_wait()
        p.ops.row_scatter(stage, 512, p.tensors["combined_x"], [7, -1, 0])
        p.ops.stores_wait()

    out = on_attention(body, plan=plan, inputs=[{1: source}]).combined[0][1].view(np.int32)
    want = np.array(source.x).view(np.int32)
    want[:, 1:4] = [-1, 77, 78]
    for token, origin in ((5, 5), (2, 2), (7, 2), (0, 2)):
        assert np.array_equal(out[token], want[origin]), f"token {token} holds row {origin}"
    assert (out.view(np.uint16)[[1, 3, 4, 6]] == 0x7FC0).all()


def test_a_row_goes_to_every_rank_named_and_lands_only_after_its_latency() -> None:
    plan = make_plan("2A2F", "afdep", 8)
    source = plan.inputs()[0][2]
    offset = plan.exchanges[0].window.tensors["combined_x"].offset
    found: list[list[int]] = []

    def body(p: Place) -> None:
        peers = [p.ops.peer(p.ctx, rank) + offset for rank in range(4)]
        stage = p.ops.stage(0, 512)
        p.ops.row_load(stage, p.tensors["x"], 512)
        p.ops.row_wait(stage, 0)
        p.ops.row_store_peers(p.ctx, stage, 512, [1, -1, 3, 0], offset, [2, -1, 0, 1])
        found.append([p.ops.load_i32(peers[1] + 1024)])
        p.ops.stores_wait()
        found.append([p.ops.load_i32(at) for at in (peers[1] + 1024, peers[3], peers[0] + 512, peers[1], peers[2])])

    on_attention(body, plan=plan, inputs=[{2: source, 3: plan.inputs()[0][3]}])
    first = int(np.array(source.x).view(np.int32)[0, 0])
    assert found[0] == [0], "it has landed at once"
    poison = 0x7FC07FC0
    assert found[1] == [first, first, first, 0, poison]


# ---- route checks and the lanes of weights and layouts ---------------------------------------------------------------


def on_lanes(body: Callable[[Any, Place], Any]) -> Any:
    """What `body(ops, place)` returns, run as the text of one agent."""
    found: list[Any] = []
    on_attention(lambda p: found.append(body(p.ops, p)))
    return found[0]


@pytest.mark.parametrize("lanes", [[0, 5, -1, 7], [-1, -1], [7, 6, 5, 4, 3, 2, 1, 0]])
def test_check_lanes_passes_good_routes(lanes: list[int]) -> None:
    assert on_lanes(lambda ops, p: ops.check_lanes(p.ctx, lanes, 3, 8)) is None


@pytest.mark.parametrize(
    ("lanes", "sentence"),
    [
        ([0, 8], "token 3 lane 1 has expert 8, outside 0 to 7"),
        ([0, -2], "token 3 lane 1 has expert -2, outside 0 to 7"),
        ([1, 2, 1], "token 3 lane 2 has expert 1, which the token has already"),
        ([0, 1 << 40], f"token 3 lane 1 has expert {1 << 40}, outside 0 to 7"),
    ],
)
def test_check_lanes_stops_at_a_bad_route_by_itself(lanes: list[int], sentence: str) -> None:
    """The payload warps' own check, without the notify group's."""
    with pytest.raises(RouteError, match=sentence):
        on_lanes(lambda ops, p: ops.check_lanes(p.ctx, lanes, 3, 8))


def test_lanes_that_name_regions() -> None:
    lanes = [9, -1, 4, 13, -1, 5]
    assert on_lanes(lambda ops, p: ops.lanes_divide(lanes, 4)) == [2, -1, 1, 3, -1, 1]
    assert on_lanes(lambda ops, p: ops.lanes_index(lanes)) == [0, -1, 2, 3, -1, 5]
    assert on_lanes(lambda ops, p: ops.lanes_master([2, -1, 1, 3, 2, 1])) == [4, -1, 5, 3, 4, 5]


def test_lanes_gather_takes_each_lanes_own_word() -> None:
    def body(ops: Any, p: Place) -> list[int]:
        base = p.tensors["combined_x"]
        for region in range(3):
            ops.store_lanes(base + 64 * region, [100 * region + lane for lane in range(4)])
        return list(ops.lanes_gather(base, [2, -1, 0, 1], 64))

    assert on_lanes(body) == [200, 0, 2, 103]


def test_packs_go_to_their_slots_pack_by_pack() -> None:
    """Column-major: pack p of slot s at 4 * s + p * stride."""

    def body(ops: Any, p: Place) -> tuple[list[int], list[int]]:
        base, source = p.tensors["combined_x"], p.tensors["weights"]
        ops.store_lanes(source, [71, 72, 73])
        stage = ops.stage(0, 256)
        ops.row_load_packs(stage, 128, source, 3)
        ops.packs_scatter(stage, 128, 3, base, [1, -1, 4], 64)
        ops.packs_store(stage, 128, 3, base + 4 * 6, 64)
        return [[ops.load_i32(base + 4 * slot + 64 * pack) for pack in range(3)] for slot in (1, 4, 6)]

    assert on_lanes(body) == [[71, 72, 73]] * 3


@pytest.mark.parametrize("alignment", [1, 4])
def test_counts_for_the_host(alignment: int) -> None:
    """-v-1, rows per rank and then aligned rows per expert; ranks before the first source have none."""
    per_source = [[3, 2, 0, 5], [1, 1, 0, 0]]

    def body(ops: Any, p: Place) -> list[int]:
        at, host = p.tensors["combined_x"], p.tensors["combined_x"] + 512
        words = [counts[0] for counts in per_source] + [v for counts in per_source for v in counts[1:]]
        for word, value in enumerate(words):
            ops.store_relaxed(at + 8 * word, -value - 1)
        ops.wait_counts(p.ctx, at, 2, 0, ph.DISPATCH_COUNT_WAIT)
        ops.wait_counts(p.ctx, at + 16, 6, 2, ph.DISPATCH_COUNT_WAIT)
        ops.store_host_counts(host, 3, 1, 3, alignment)
        return [-ops.load_relaxed(host + 8 * word) - 1 for word in range(6)]

    aligned = [3, 0, 5] if alignment == 1 else [4, 0, 8]
    assert on_lanes(body) == [0, 3, 1, *aligned]
