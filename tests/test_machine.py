"""The machine that runs the text: every row right, the same run however it is represented, and broken texts caught."""

from __future__ import annotations

import gc
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import (
    ARMS,
    BASIC_ARMS,
    CONTROL_ARMS,
    H100,
    Inputs,
    assert_equal_events,
    broken,
    describe,
    make_plan,
    replay,
    rewritten,
    run_checked,
    run_timed,
    same_every_exchange,
    without_routes,
)

from afdep_sim.kernels import barrier
from afdep_sim.model import ops as model_ops
from afdep_sim.model import rows as model_rows
from afdep_sim.model.fabric import Fabric, Port
from afdep_sim.model.machine import Deadlock, Machine
from afdep_sim.model.memory import Memory
from afdep_sim.model.profiles import Profile, load_profile
from afdep_sim.model.rows import ProtocolError
from afdep_sim.plan import Launch, Plan
from afdep_sim.protocol import SWITCHES, Protocol
from afdep_sim.reference import Mismatch
from afdep_sim.run import Events, Run
from afdep_sim.topology import Role
from afdep_sim.trace import phase_costs_us, round_trip_us
from afdep_sim.window import WORD_OFFSETS

ROOT = Path(__file__).resolve().parent.parent

# ---- every row is right ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("tokens", [0, 1, 8, 33, 128])
def test_three_exchanges_return_every_row(arm: str, tokens: int) -> None:
    plan = make_plan("2A2F", arm, tokens, exchanges=3)
    inputs = plan.inputs()
    if tokens:
        assert len({inputs[n][2].topk.tobytes() for n in range(3)}) == 3, "the inputs must change"
    run = run_checked(plan, inputs=inputs)
    assert [len(ends) for ends in run.events.ends_ns] == [3] * 4
    assert all(ends == sorted(ends) and ends[0] > 0 for ends in run.events.ends_ns)


def test_the_other_state_of_every_control_is_the_shipped_protocol() -> None:
    for switch in SWITCHES:
        shipped = int(getattr(Protocol.afdep(), switch.field))
        assert Protocol.parse(f"afdep+{switch.env}={shipped}") == Protocol.afdep()
        if switch.built == (False, True):
            assert f"afdep+{switch.env}={1 - shipped}" in CONTROL_ARMS


@pytest.mark.parametrize(
    "switches",
    [
        [s.env for s in SWITCHES],
        ["AFDEP_KEEP_ENTRY_BARRIERS", "AFDEP_GRID_SYNC_EXIT"],
        ["AFDEP_UNION_NOTIFY", "AFDEP_UNION_BUFFERS", "AFDEP_GRID_SYNC_EXIT"],
        ["AFDEP_KEEP_ENTRY_BARRIERS", "AFDEP_UNION_NOTIFY", "AFDEP_ALL_RANK_EXIT"],
    ],
    ids=len,
)
@pytest.mark.parametrize("layout", ["2A2F", "2A1F"])
def test_controls_go_together(layout: str, switches: list[str]) -> None:
    arm = "+".join(["afdep", *(f"{name}=1" for name in switches)])
    run_checked(make_plan(layout, arm, 17, exchanges=3))


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("tokens", [(0, 33), (33, 0), (1, 40)])
def test_one_source_is_empty_or_nearly(arm: str, tokens: tuple[int, int]) -> None:
    run_checked(make_plan("2A2F", arm, tokens, exchanges=3))


@pytest.mark.parametrize("arm", BASIC_ARMS)
@pytest.mark.parametrize("layout", ["1A1F", "3A1F", "1A3F", "2A1F", "5A2F"])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_other_layouts(layout: str, arm: str, tokens: int) -> None:
    run_checked(make_plan(layout, arm, tokens, exchanges=3))


@pytest.mark.parametrize("arm", BASIC_ARMS)
@pytest.mark.parametrize("hidden", [2048, 4096])
@pytest.mark.parametrize("tokens", [1, 33])
def test_real_hidden_sizes(hidden: int, arm: str, tokens: int) -> None:
    run_checked(make_plan("2A2F", arm, tokens, exchanges=2, hidden=hidden))


@pytest.mark.parametrize("arm", BASIC_ARMS)
@pytest.mark.parametrize(
    "fields",
    [
        {"expert_alignment": 16},
        {"bucket": 256},
        {"routing": "skew"},
        {"topk": 4, "experts": 8},
        {"topk": 32},
        {"sms": 1},
        {"sms": 132},
        {"experts_between": "precomputed"},
        {"seed": 7, "hidden": 512},
    ],
    ids=str,
)
def test_other_workloads(arm: str, fields: dict[str, Any]) -> None:
    run_checked(make_plan("2A2F", arm, 40, exchanges=2, **fields))


@pytest.mark.parametrize("arm", BASIC_ARMS)
@pytest.mark.parametrize("tokens", [[0], slice(None), slice(0, None, 2)], ids=str)
def test_tokens_without_a_route_come_back_as_zeros(arm: str, tokens: Any) -> None:
    plan = make_plan("2A2F", arm, 30, exchanges=2)
    inputs = [{2: without_routes(e[2], tokens), 3: e[3]} for e in plan.inputs()]
    run = run_checked(plan, inputs=inputs)
    assert not run.combined[1][2][tokens].any()


@pytest.mark.parametrize("arm", BASIC_ARMS)
def test_some_lanes_without_a_route(arm: str) -> None:
    plan = make_plan("2A2F", arm, 30, exchanges=2)
    inputs = plan.inputs()
    for exchange in inputs:
        for source in exchange.values():
            source.topk[np.random.default_rng(0).random(source.topk.shape) < 0.6] = -1
    run_checked(plan, inputs=inputs)


@pytest.mark.parametrize("arm", BASIC_ARMS)
def test_workloads_may_change_from_exchange_to_exchange(arm: str) -> None:
    plan = make_plan("2A2F", arm, 8)
    plans = [make_plan("2A2F", arm, t, bucket=64) for t in (33, 1, (0, 50), 64, 0, 5)]
    mixed = replace(plan, exchanges=tuple(p.exchanges[0] for p in plans))
    run_checked(mixed)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", range(2))
def test_late_ranks_get_every_row(arm: str, seed: int) -> None:
    run = run_checked(make_plan("2A2F", arm, 9, exchanges=3), profile=H100.scaled(launch_skew_ns=400), seed=seed)
    first = [next(e.start_ns for e in run.events.launches if e.rank == rank) for rank in range(4)]
    assert max(first) - min(first) > 50e3, f"nobody was late: first launches at {first}"


# ---- one run, however it is represented ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "tokens"),
    [*((arm, tokens) for arm in BASIC_ARMS for tokens in (0, 1, 33)), *((arm, 5) for arm in CONTROL_ARMS)],
)
def test_idle_warps_may_be_represented_once(arm: str, tokens: int) -> None:
    plan = make_plan("2A2F", arm, tokens, exchanges=2)
    whole, collapsed = (run_timed(plan, collapse=collapse) for collapse in (False, True))
    assert_equal_events(collapsed, whole, f"collapsed and full runs of {describe(plan)}")
    assert len(whole.agents) >= 4


@pytest.mark.parametrize(("layout", "tokens"), [("3A1F", (0, 30, 2)), ("1A3F", 25)])
@pytest.mark.parametrize("arm", BASIC_ARMS)
def test_idle_warps_may_be_represented_once_on_other_layouts(layout: str, arm: str, tokens: Any) -> None:
    plan = make_plan(layout, arm, tokens)
    profile = H100.scaled(launch_skew_ns=20)
    whole, collapsed = (run_timed(plan, collapse=collapse, profile=profile, seed=3) for collapse in (False, True))
    assert_equal_events(collapsed, whole, f"collapsed and full runs of {describe(plan)}")


@pytest.mark.parametrize(
    ("arm", "tokens"),
    [*((arm, tokens) for arm in BASIC_ARMS for tokens in (0, 1, 33, 128)), *((arm, 33) for arm in CONTROL_ARMS)],
)
def test_moving_no_payload_changes_no_time(arm: str, tokens: int) -> None:
    plan = make_plan("2A2F", arm, tokens, exchanges=2)
    timed, moved = run_timed(plan), Machine(H100).run(plan).events
    assert_equal_events(timed, moved, f"runs without and with data of {describe(plan)}")


@pytest.mark.parametrize(("arm", "tokens"), [("afdep", 0), ("afdep", 33), ("fastafd_m2n", 33)])
def test_early_agents_of_dependents_change_no_time(arm: str, tokens: int) -> None:
    plan = make_plan("2A2F", arm, tokens)
    late = run_timed(plan)
    early = run_checked(plan, early_dependents=True).events
    assert early.ends_ns == late.ends_ns, describe(plan)
    assert early.launches == late.launches, describe(plan)
    assert early.counters[0]["signals"] == late.counters[0]["signals"]


def test_an_observer_changes_nothing() -> None:
    plan = make_plan("2A2F", "afdep", 33, exchanges=2)
    seen: list[tuple[Any, ...]] = []
    watched = Machine(H100, observer=lambda *event: seen.append(event)).run(plan)
    assert_equal_events(watched.events, Machine(H100).run(plan).events, f"watched and other run of {describe(plan)}")
    assert {event[0] for event in seen} == {"land", "read", "set", "clear"}
    assert [event[5] for event in seen] == sorted(event[5] for event in seen)


DIGESTS = """
import sys
from afdep_sim.model.machine import Machine
from afdep_sim.model.profiles import load_profile
from afdep_sim.plan import build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.trace import digest
from afdep_sim.workload import Workload

for arm in ("afdep", "fastafd_m2n"):
    plan = build_plan(Topology.parse("2A2F"), Workload(tokens=33, hidden=256), Protocol.parse(arm), 3)
    for seed in (0, 0, 1):
        print(digest(Machine(load_profile("H100"), seed=seed).run(plan)))
"""


def digests(hash_seed: str) -> list[str]:
    """The digests a fresh process prints: for each arm that of seed 0, of seed 0 again, and of seed 1."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_run_is_a_function_of_plan_inputs_and_seed_in_every_process() -> None:
    first, second = digests("1"), digests("4242")
    assert first == second
    for a, again, other in (first[:3], first[3:]):
        assert a == again
        assert a != other
    assert first[0] != first[3]


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", BASIC_ARMS)
@pytest.mark.parametrize("tokens", [1, 32])
def test_two_exchanges_after_the_first_are_enough(arm: str, tokens: int) -> None:
    # The same routes in every exchange: what is asked is whether the pipeline of exchanges has settled, not how much
    # routes differ (at T = 1 they do, by several per cent from exchange to exchange).
    found = {}
    for k in (2, 16):
        plan = make_plan("2A2F", arm, tokens, exchanges=k + 1, hidden=2048)
        found[k], _ = round_trip_us(run_timed(plan, inputs=same_every_exchange(plan)), plan.topology)
    assert found[2] == pytest.approx(found[16], rel=0.01)


def test_the_two_arms_differ_by_the_barriers() -> None:
    found = {}
    for arm in BASIC_ARMS:
        plan = make_plan("2A2F", arm, 32, exchanges=3, hidden=2048)
        found[arm], _ = round_trip_us(run_timed(plan), plan.topology)
    assert 1.2 < found["fastafd_m2n"] / found["afdep"] < 2


# ---- resources, not formulas -----------------------------------------------------------------------------------------


def whole_us(events: Events) -> float:
    return max(ends[-1] for ends in events.ends_ns) / 1e3


class Cost(NamedTuple):
    """What is kept of a run at 1 or 2,048 tokens; the events themselves are large."""

    whole_us: float
    dispatch_us: float
    """The longest dispatch kernel of a source."""
    barriers: int

    @classmethod
    def of(cls, plan: Plan, events: Events) -> Cost:
        dispatches = [e for e in events.launches if e.kernel == "dispatch" and e.rank in plan.topology.attention]
        return cls(
            whole_us(events), max(e.end_ns - e.start_ns for e in dispatches) / 1e3, events.counters[0]["barriers"]
        )


Costs = dict[tuple[int, str], Cost]


@pytest.fixture(scope="module", params=BASIC_ARMS)
def costs(request: pytest.FixtureRequest) -> Costs:
    """Runs of one arm at 1 and 2,048 tokens: with the shipped profile, at half the port rate, at twice the signal.

    The run with the shipped profile moves data, and every row of it is compared with the reference.
    """
    profiles = {"port": H100.scaled(port_bytes_per_ns=0.5), "signal": H100.scaled(signal_ns=2)}
    found = {}
    for tokens, exchanges in ((1, 3), (2048, 1)):
        plan = make_plan("2A2F", request.param, tokens, exchanges=exchanges, hidden=2048)
        inputs = plan.inputs()
        found[tokens, ""] = Cost.of(plan, run_checked(plan, inputs=inputs).events)
        for name, profile in profiles.items():
            found[tokens, name] = Cost.of(plan, run_timed(plan, profile=profile, inputs=inputs))
    return found


def added_pct(costs: Costs, tokens: int, name: str, field_: str = "whole_us") -> float:
    return 100 * (getattr(costs[tokens, name], field_) / getattr(costs[tokens, ""], field_) - 1)


def test_half_the_port_rate_is_felt_at_2048_tokens(costs: Costs) -> None:
    # Two passes of the ports, about 110 of 174 us; payload and combine are bound by them, the epilogues are not.
    assert 80 < added_pct(costs, 2048, "port", "dispatch_us") < 100
    assert 50 < added_pct(costs, 2048, "port") < 70


def test_half_the_port_rate_is_not_felt_at_one_token(costs: Costs) -> None:
    assert -0.05 < added_pct(costs, 1, "port") < 1


def test_twice_the_signal_latency_is_felt_at_one_token(costs: Costs) -> None:
    low, high = (15, 22) if costs[1, ""].barriers else (8, 14)
    assert low < added_pct(costs, 1, "signal") < high


def test_twice_the_signal_latency_is_not_felt_at_2048_tokens(costs: Costs) -> None:
    # Two signals lie on the critical path of one exchange, four where every kernel enters and leaves by a barrier.
    barriers = costs[2048, ""].barriers
    assert 0.5 < added_pct(costs, 2048, "signal") < (2.5 if barriers else 1.5)
    added_ns = 1e3 * (costs[2048, "signal"].whole_us - costs[2048, ""].whole_us)
    assert added_ns / H100.signal_ns == pytest.approx(4 if barriers else 2, abs=0.05)


def test_rows_queue_at_both_ports_and_pay_the_latency_once() -> None:
    size, start = 3160, 100.0
    busy, latency, back = size / H100.port_bytes_per_ns, H100.row_latency_ns, H100.row_acknowledge_ns
    fabric = Fabric(H100, 4, 1)
    first = start + busy + latency
    assert fabric.row(2, 0, size, start, start) == pytest.approx((first, first + back))
    # The same source to another peer: behind the first at its egress.
    assert fabric.row(2, 1, size, start, start)[0] == pytest.approx(first + busy)
    # Another source to the first peer: its egress is free, the peer's ingress is not.
    assert fabric.row(3, 0, size, start, start)[0] == pytest.approx(first + busy)
    # Later than everything: as if alone.
    assert fabric.row(3, 1, size, 1e6, 1e6)[0] == pytest.approx(1e6 + busy + latency)
    assert (fabric.bytes_out, fabric.bytes_in) == ([0, 0, 2 * size, 2 * size], [2 * size, 2 * size, 0, 0])
    assert fabric.rows_out == [0, 0, 2, 2]


def test_a_row_that_reaches_a_port_earlier_passes_first_though_it_was_posted_later() -> None:
    """One source's backlog must not block a peer's ingress for the times at which nothing of it arrives."""
    size = 3160
    busy, latency = size / H100.port_bytes_per_ns, H100.row_latency_ns
    fabric = Fabric(H100, 4, 1)
    # Source 2 posts to peers 0 and 1 in turn: its rows reach each of the two at every second time only.
    for _ in range(8):
        for peer in (0, 1):
            fabric.row(2, peer, size, 0.0, 0.0)
    # Source 3's rows, posted after all of them, take the times between.
    found = [fabric.row(3, 0, size, 0.0, 0.0)[0] - latency for _ in range(4)]
    assert found == pytest.approx([2 * busy, 4 * busy, 6 * busy, 8 * busy])
    # A port is never in two places: 8 + 4 rows to peer 0 take 12 times, the last of source 2's at 15.
    assert fabric.ingress[0].free == pytest.approx(15 * busy)
    late = [fabric.row(3, 0, size, 0.0, 0.0)[0] - latency for _ in range(4)]
    assert late == pytest.approx([10 * busy, 12 * busy, 14 * busy, 16 * busy])


@pytest.mark.parametrize("seed", range(20))
def test_a_port_serves_one_row_at_a_time(seed: int) -> None:
    """Random arrivals: no two rows overlap, and none passes before it has arrived."""
    generator = random.Random(seed)
    port, rows, now = Port(), [], 0.0
    for _ in range(300):
        now += generator.choice([0.0, 1.0, 40.0])
        start = now + generator.choice([0.0, 5.0, 200.0])
        busy = generator.choice([3.0, 10.0])
        passed = port.take(start, busy, now)
        assert passed >= start + busy - 1e-2
        rows.append((passed - busy, passed, start))
    rows.sort()
    for (_, first_end, _), (second_begin, _, _) in itertools.pairwise(rows):
        assert second_begin >= first_end - 1e-2


@pytest.mark.parametrize("behind", [0, 1])
def test_words_wait_behind_rows_or_pass_them_as_the_profile_says(behind: int) -> None:
    profile = H100.scaled(words_queue_behind_rows=behind)
    fabric = Fabric(profile, 3, 1)
    fabric.row(2, 0, 316_000, 0.0, 0.0)
    busy = 316_000 / profile.port_bytes_per_ns
    found = {peer: time for time, peers in fabric.words(2, 0, 3, 10.0) for peer in peers}
    sent = busy if behind else 10.0
    assert found == pytest.approx({0: sent + H100.signal_ns, 1: sent + H100.signal_ns, 2: 10.0 + H100.local_word_ns})


def test_three_sources_share_one_ingress() -> None:
    found = {}
    for layout in ("1A1F", "3A1F"):
        plan = make_plan(layout, "afdep", 512, hidden=2048)
        found[layout] = Cost.of(plan, run_timed(plan))
    port_us = 512 * 4224 / H100.port_bytes_per_ns / 1e3
    assert found["3A1F"].dispatch_us - found["1A1F"].dispatch_us == pytest.approx(2 * port_us, rel=0.1)


def test_phases_sum_to_the_round_trip() -> None:
    for arm in BASIC_ARMS:
        plan = make_plan("2A2F", arm, 33, exchanges=3)
        events = run_timed(plan)
        value, rank = round_trip_us(events, plan.topology)
        assert sum(phase_costs_us(events, rank).values()) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("arm", BASIC_ARMS)
def test_profiles_differ_where_their_numbers_do(arm: str) -> None:
    plan = make_plan("2A2F", arm, 33, exchanges=2, hidden=2048)
    h100, h200 = (whole_us(run_timed(plan, profile=load_profile(name))) for name in ("H100", "H200"))
    assert h200 < h100


# ---- broken texts ----------------------------------------------------------------------------------------------------

WRONG = (Mismatch, Deadlock, ProtocolError)
Change = tuple[str, str]

SLOW_ROWS = H100.scaled(port_bytes_per_ns=0.002, words_queue_behind_rows=0)
"""Rows crawl and words pass them, so that whoever does not wait for a row has gone on long before it lands."""


@dataclass(frozen=True)
class Mutant:
    """One change of the text and a run in which it must be seen. `inputs` makes the run's inputs from the plan's."""

    kernel: str
    changes: tuple[Change, ...]
    tokens: int | tuple[int, ...]
    layout: str = "2A2F"
    arm: str = "afdep"
    exchanges: int = 1
    sms: int = 24
    profile: Profile = H100
    inputs: Callable[[Plan], Inputs] = Plan.inputs
    machine: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        return make_plan(self.layout, self.arm, self.tokens, exchanges=self.exchanges, sms=self.sms)

    def run(self, factories: dict[str, Any] | None) -> Run:
        plan = self.plan()
        return run_checked(plan, profile=self.profile, inputs=self.inputs(plan), factories=factories, **self.machine)


def nothing_in_block_0(plan: Plan) -> Inputs:
    """The plan's inputs without routes for the tokens of block 0, which then has nothing to send."""
    grid = plan.protocol.transport_sms
    return [{r: without_routes(s, slice(0, None, grid)) for r, s in e.items()} for e in plan.inputs()]


TARGET = "                    target * blocks_of_a_source,\n"
CLEAR_COUNTS = """                ops.counts_clear(by_rank, sources)
                ops.counts_clear(by_expert, sources * experts)
"""
SOURCES_AWAITED = "                    ranks - ffn_ranks,\n                    target"
BEFORE_EXIT = "        if exit_all_ranks:\n            ops.grid_sync(ctx, window + grid_word, ph.DISPATCH_EXIT)\n"
START = "        ops.phase(ctx, ph.DISPATCH_START)\n"
EMPTY_SOURCE_LEAVES = "        if sends and tokens == 0:\n            return\n"
COLLECT = (
    "                ops.wait_each_ge(ctx, window + arrivals, ffn_ranks, "
    "target * blocks_of_a_sender, ph.COMBINE_ARRIVAL)\n"
)
DEPENDENCY = "        ops.wait_dependencies(ctx)\n"
LAST_BLOCK_RESETS = """                    if ops.fetch_add_acq_rel(window + done, 1) == ops.blocks() - 1:
                        ops.clear_words(window + done, 1)
"""
ARRIVAL_OF_A_BLOCK = """                if warp == 0:
                    ops.add_release_each(ctx, 0, ffn_ranks, arrivals + 8 * rank, 1)
                    # Only"""
ARRIVAL_OF_BLOCK_0 = """                if warp == 0:
                    if block == 0:
                        ops.add_release_each(ctx, 0, ffn_ranks, arrivals + 8 * rank, 1)
                    # Only"""
ROWS_COMPLETE = " speaks for these rows at the receiver.\n        ops.stores_wait()\n"
REPLIES_COMPLETE = " speaks for these rows.\n        ops.stores_wait()\n"
AFTER_ARRIVALS = "                    ph.DISPATCH_ARRIVAL,\n                )\n"
LAST_SOURCE_MISSES = (
    ("ops.wait_counts(ctx, by_rank, sources, 0,", "ops.wait_counts(ctx, by_rank, sources - 1, 0,"),
    (
        "ops.wait_counts(ctx, by_expert, sources * experts, sources,",
        "ops.wait_counts(ctx, by_expert, (sources - 1) * experts, sources - 1,",
    ),
    ("ops.prefix_counts(psum_rank, psum_expert, ranks,", "ops.prefix_counts(psum_rank, psum_expert, ranks - 1,"),
)

MUTANTS = {
    "FFN receive waits for source 0's arrivals only": Mutant(
        "dispatch",
        ((SOURCES_AWAITED, "                    1,\n                    target"),),
        (0, 8),
        profile=SLOW_ROWS,
    ),
    "FFN receive waits for round x G + 1": Mutant("dispatch", ((TARGET, TARGET.replace(",", " + 1,")),), 8),
    "one arrival per rank, of block 0 only": Mutant(
        "dispatch",
        (
            (ARRIVAL_OF_A_BLOCK, ARRIVAL_OF_BLOCK_0),
            ("blocks_of_a_source = 1 if exit_grid else ops.blocks()", "blocks_of_a_source = 1"),
        ),
        8,
        profile=SLOW_ROWS,
    ),
    "a sending block releases before its rows are complete": Mutant(
        "dispatch", ((ROWS_COMPLETE, " speaks for no rows.\n"),), 8, arm="fastafd_m2n", profile=SLOW_ROWS
    ),
    "a payload warp loads its next row while its stores still read the last": Mutant(
        "dispatch",
        (("            ops.stores_wait()\n            ops.row_load(stage, x", "            ops.row_load(stage, x"),),
        112,
        sms=2,
    ),
    "only block 0 completes its rows before the grid synchronisation": Mutant(
        "combine",
        ((REPLIES_COMPLETE, " speaks for these rows.\n        if block == 0:\n            ops.stores_wait()\n"),),
        8,
        arm="afdep+AFDEP_GRID_SYNC_EXIT=1",
        profile=SLOW_ROWS,
    ),
    "a replying block releases before its rows are complete": Mutant(
        "combine", ((REPLIES_COMPLETE, " speaks for no rows.\n"),), 2, profile=SLOW_ROWS
    ),
    "Attention waits for no reply": Mutant("combine", ((COLLECT, ""),), 8, profile=H100.scaled(port_bytes_per_ns=0.01)),
    "copy epilogue does not wait for its primary": Mutant(
        "copy_epilogue", ((DEPENDENCY, ""),), 8, machine={"early_dependents": True}
    ),
    "reduce epilogue does not wait for its primary": Mutant(
        "reduce_epilogue", ((DEPENDENCY, ""),), 8, machine={"early_dependents": True}
    ),
    # Two blocks with two tokens a warp; those of block 0 have no route, so it is done while block 1 still draws slots.
    "slots reset by block 0 as soon as it is done": Mutant(
        "dispatch",
        ((LAST_BLOCK_RESETS, "                    if block == 0:\n"),),
        112,
        sms=2,
        profile=H100.scaled(port_bytes_per_ns=0.02),
        inputs=nothing_in_block_0,
    ),
    "FFN does not clear the count words, 2 tokens": Mutant("dispatch", ((CLEAR_COUNTS, ""),), 2, exchanges=2),
    "FFN does not clear the count words, 33 tokens": Mutant("dispatch", ((CLEAR_COUNTS, ""),), 33, exchanges=2),
    "an empty source returns before its arrivals": Mutant(
        "dispatch", ((BEFORE_EXIT, EMPTY_SOURCE_LEAVES + BEFORE_EXIT),), (8, 0)
    ),
    "an empty source returns at once": Mutant("dispatch", ((START, START + EMPTY_SOURCE_LEAVES),), (0, 8)),
    "arrival counters reset by the receiver": Mutant(
        "dispatch",
        (
            (
                AFTER_ARRIVALS,
                AFTER_ARRIVALS
                + "                ops.clear_words(window + arrivals + 8 * ffn_ranks, ranks - ffn_ranks)\n",
            ),
        ),
        8,
        exchanges=2,
    ),
    "prefix sums without the last source": Mutant("dispatch", LAST_SOURCE_MISSES, 8),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_text_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    mutant.run(None)
    with pytest.raises(WRONG), replay(name):
        mutant.run(broken(mutant.kernel, *mutant.changes))


DEADLOCKS = {
    "FFN receive waits for round x G + 1": (
        r"rank 0 dispatch of exchange 0 block 0 warp 0 waits in 'dispatch arrival' for >= 25 at "
        r"dispatch_arrivals\[2\]: value 24, last written by agent rank 2 dispatch of exchange 0 block \d+ warp 0 at"
    ),
    "an empty source returns before its arrivals": (
        r"rank 1 dispatch of exchange 0 block 0 warp 0 waits in 'dispatch arrival' for >= 24 at "
        r"dispatch_arrivals\[3\]: value 0, last written by nobody"
    ),
    "an empty source returns at once": (
        r"rank 0 dispatch of exchange 0 block 0 warp 0 waits in 'dispatch count wait' for a count at "
        r"counts\[2\]: value 0, last written by nobody"
    ),
    "arrival counters reset by the receiver": (
        r"rank 0 dispatch of exchange 1 block 0 warp 0 waits in 'dispatch arrival' for >= 48 at "
        r"dispatch_arrivals\[2\]: value 24, last written by agent rank 2 dispatch of exchange 1"
    ),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_names_rank_phase_word_and_values(name: str) -> None:
    mutant = MUTANTS[name]
    with pytest.raises(Deadlock, match=DEADLOCKS[name]) as caught:
        mutant.run(broken(mutant.kernel, *mutant.changes))
    lines = str(caught.value).splitlines()
    for rank in (0, 1):
        assert any(line.startswith(f"rank {rank} dispatch") and " waits in " in line for line in lines)
    for rank in (2, 3):
        waits = [line for line in lines if line.startswith(f"rank {rank} combine") and " waits in " in line]
        assert waits
        assert "'combine arrival'" in waits[0]
        assert "at combine_arrivals[0]" in waits[0]
    assert any("rank 0 dispatch" in line and "1 of 24 blocks left" in line for line in lines)


def test_a_count_reduction_that_misses_a_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # With one token only block 0 counts anything, one counting step after all others have added: the block that is
    # missing when 23 have is the one that matters. Where several blocks are last together, all have added by the time
    # the reader has seen 23 and reads again; slow atomics keep block 0's own addition away from its first look.
    line = "        grid = engine.current.run.launch.grid\n        # The last word first"
    copy = rewritten(model_rows, (line, line.replace(".grid\n", ".grid - 1\n")))
    plans = [make_plan("2A2F", arm, 1) for arm in BASIC_ARMS]
    slow = H100.scaled(atomic_ns=4)
    for plan in plans:
        run_checked(plan, profile=slow)
    monkeypatch.setattr(model_ops, "add_rows", copy.add_rows)
    for plan in plans:
        with pytest.raises(WRONG):
            run_checked(plan, profile=slow)


def test_a_barrier_without_alternating_words_is_caught() -> None:
    copy = rewritten(barrier, ("word = signals + 8 * (calls & 1)", "word = signals"))
    names = {"make_barrier": copy.make_barrier, "make_entry": copy.make_entry}
    factories = {**broken("dispatch", **names), "combine": broken("combine", **names)["combine"]}
    plan = make_plan("2A1F", "fastafd_m2n", 8, exchanges=2)
    run_checked(plan)
    with pytest.raises(WRONG):
        run_checked(plan, factories=factories)


def test_one_rank_with_another_bucket_is_caught() -> None:
    plan = make_plan("2A2F", "afdep", 8)

    def other(launch: Launch) -> Launch:
        at = {"dispatch": 6}.get(launch.kernel)
        if launch.rank != 3 or at is None:
            return launch
        assert launch.arguments[at] == plan.workload.bucket
        arguments = (*launch.arguments[:at], 2 * plan.workload.bucket, *launch.arguments[at + 1 :])
        return replace(launch, arguments=arguments)

    streams = tuple(tuple(other(launch) for launch in stream) for stream in plan.exchanges[0].streams)
    with pytest.raises(WRONG):
        run_checked(replace(plan, exchanges=(replace(plan.exchanges[0], streams=streams),)))


@pytest.mark.parametrize("tokens", [1, 33])
def test_m2n_without_entry_barriers_is_equivalent_in_its_values(tokens: int) -> None:
    change = ("        if entry_barrier:\n", "        if False:\n")
    factories = {**broken("dispatch", change), "combine": broken("combine", change)["combine"]}
    plan = make_plan("2A1F", "fastafd_m2n", tokens, exchanges=3)
    run = run_checked(plan, factories=factories)
    assert {c["barriers"] for c in run.events.counters} == {2 * 3}


def test_a_rewriting_that_finds_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="0 times"):
        broken("dispatch", ("no such text", ""))


# ---- what is left behind ---------------------------------------------------------------------------------------------


def test_one_machine_runs_many_plans() -> None:
    machine = Machine(H100, received=True)
    for arm in (*BASIC_ARMS, "afdep"):
        plan = make_plan("2A2F", arm, 9)
        inputs = plan.inputs()
        first, second = machine.run(plan, inputs), machine.run(plan, inputs)
        assert_equal_events(first.events, second.events, f"two runs of {describe(plan)}")
        assert all(np.array_equal(a, b) for a, b in zip(first.words, second.words, strict=True))


def test_a_failed_run_leaves_the_machine_fit_for_the_next() -> None:
    machine, plan = Machine(H100), make_plan("2A2F", "afdep", 8)
    for _ in range(2):
        with pytest.raises(Deadlock):
            machine.run(plan, factories=broken("dispatch", (TARGET, TARGET.replace(",", " + 1,"))))
        run = machine.run(plan)
        assert run.words[0][WORD_OFFSETS["dispatch_arrivals"] // 8 + 2] == 24
    assert all(plan.topology.role(rank) is Role.FFN for rank in (0, 1))


# ---- what a run leaves behind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken_text", [False, True], ids=["a run that ends", "a run that hangs"])
def test_a_run_keeps_no_arena_alive(broken_text: bool) -> None:
    """Parked and blocked greenlets hold the whole simulation unless they are ended."""

    def arenas() -> int:
        gc.collect()
        return sum(isinstance(o, Memory) for o in gc.get_objects())

    def run() -> None:
        plan = make_plan("2A2F", "afdep", 8)
        if not broken_text:
            run_checked(plan)
            return
        try:
            Machine(H100).run(plan, factories=broken("dispatch", (TARGET, TARGET.replace(",", " + 1,"))))
        except Deadlock:
            return
        pytest.fail("the broken text did not hang")

    before = arenas()
    run()
    assert arenas() == before
