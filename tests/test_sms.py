"""Blocks on SMs: what fits beside what, in which order, and how a dependent gets the SMs its primary leaves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from helpers import H100, assert_equal_events, broken, describe, make_plan, run_checked, run_timed
from hypothesis import given, settings
from hypothesis import strategies as st

from afdep_sim.model.sms import RESERVED_SHARED_BYTES, Need, Occupancy
from afdep_sim.plan import HOPPER, Device, build_plan
from afdep_sim.run import AgentEvent, Events, LaunchEvent

SMALL = Device(
    sms=4, shared_per_sm_bytes=100_000, shared_per_block_bytes=99_000, threads_per_sm=2048, registers_per_sm=65_536,
    blocks_per_sm=8,
)  # fmt: skip
WHOLE = Need(shared_bytes=99_000, threads=640, registers=640 * 96)


def need(shared_bytes: int = 1024, threads: int = 32, registers: int = 32) -> Need:
    return Need(shared_bytes, threads, registers)


# ---- placing ---------------------------------------------------------------------------------------------------------


def test_exclusive_blocks_take_one_empty_sm_each_lowest_first() -> None:
    occupancy = Occupancy(SMALL)
    assert occupancy.place(WHOLE, 3) == [0, 1, 2]
    assert occupancy.place(WHOLE, 3) == [3]
    assert occupancy.place(WHOLE, 1) == []
    assert occupancy.place(need(), 1) == []
    occupancy.release([2], WHOLE)
    occupancy.release([0], WHOLE)
    assert occupancy.place(WHOLE, 3) == [0, 2]


@pytest.mark.parametrize(
    ("one", "together"),
    [
        (need(shared_bytes=50_000), 2),
        (need(shared_bytes=50_001), 1),
        (need(shared_bytes=33_333), 3),
        (need(threads=1024), 2),
        (need(threads=1025), 1),
        (need(registers=16_384), 4),
        (need(registers=16_385), 3),
        (need(), SMALL.blocks_per_sm),
        (need(shared_bytes=0, threads=512, registers=32_768), 2),
    ],
    ids=str,
)
def test_an_sm_holds_as_many_as_shared_memory_threads_registers_and_slots_allow(one: Need, together: int) -> None:
    occupancy = Occupancy(SMALL)
    assert Counter(occupancy.place(one, 100)) == dict.fromkeys(range(4), together)
    assert occupancy.place(one, 1) == []


def test_different_blocks_share_an_sm_while_their_sums_fit() -> None:
    occupancy = Occupancy(SMALL)
    large, small = need(shared_bytes=70_000, threads=1024), need(shared_bytes=30_000, threads=512)
    assert occupancy.place(large, 4) == [0, 1, 2, 3]
    assert occupancy.place(small, 9) == [0, 1, 2, 3]
    occupancy.release([1], large)
    assert occupancy.place(small, 9) == [1, 1]
    occupancy.release([1, 1, 1], small)
    assert occupancy.place(large, 9) == [1]


def test_an_exclusive_block_needs_an_empty_sm_and_keeps_others_out() -> None:
    occupancy = Occupancy(SMALL)
    assert occupancy.place(need(), 1) == [0]
    assert occupancy.place(WHOLE, 9) == [1, 2, 3]
    assert occupancy.place(need(), 3) == [0, 0, 0]
    occupancy.release([0] * 4, need())
    assert occupancy.place(WHOLE, 9) == [0]


def test_a_block_is_exclusive_where_no_other_could_have_its_reserved_shared_memory() -> None:
    nearly = need(shared_bytes=SMALL.shared_per_sm_bytes - RESERVED_SHARED_BYTES)
    occupancy = Occupancy(SMALL)
    occupancy.place(nearly, 4)
    assert occupancy.place(need(shared_bytes=RESERVED_SHARED_BYTES), 1) == [0]
    occupancy = Occupancy(SMALL)
    occupancy.place(nearly._replace(shared_bytes=nearly.shared_bytes + 1), 4)
    assert occupancy.place(need(shared_bytes=0), 1) == []


def test_blocks_go_breadth_first_empty_sms_before_shared_ones() -> None:
    occupancy = Occupancy(SMALL)
    half = need(shared_bytes=40_000)
    assert occupancy.place(half, 2) == [0, 1]
    assert occupancy.place(half, 4) == [2, 3, 2, 3]
    assert occupancy.place(half, 4) == [0, 1]
    occupancy = Occupancy(SMALL)
    assert occupancy.place(half, 6) == [0, 1, 2, 3, 0, 1]


def test_all_or_none_takes_nothing_where_not_all_fit() -> None:
    occupancy = Occupancy(SMALL)
    assert occupancy.place(WHOLE, 5, all_or_none=True) == []
    assert occupancy.place(WHOLE, 4, all_or_none=True) == [0, 1, 2, 3]
    occupancy.release([3], WHOLE)
    half = need(shared_bytes=50_000)
    assert occupancy.place(half, 3, all_or_none=True) == []
    assert occupancy.place(half, 2, all_or_none=True) == [3, 3]
    assert occupancy.place(half, 0, all_or_none=True) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.booleans(), st.booleans()), max_size=30))
@settings(max_examples=150, deadline=None)
def test_no_sequence_overfills_an_sm_and_releasing_everything_empties_it(
    steps: list[tuple[int, int, bool, bool]],
) -> None:
    kinds = (WHOLE, need(shared_bytes=60_000), need(threads=700), need(shared_bytes=30_000, registers=20_000))
    occupancy = Occupancy(SMALL)
    held: list[tuple[int, Need]] = []
    for kind, blocks, all_or_none, release in steps:
        if release and held:
            sm, what = held.pop(blocks % len(held))
            occupancy.release([sm], what)
            continue
        placed = occupancy.place(kinds[kind], blocks, all_or_none)
        assert len(placed) in ((0, blocks) if all_or_none else range(blocks + 1)), steps
        held += [(sm, kinds[kind]) for sm in placed]
        for sm in range(SMALL.sms):
            here = [what for at, what in held if at == sm]
            assert sum(w.shared_bytes for w in here) <= SMALL.shared_per_sm_bytes, steps
            assert sum(w.threads for w in here) <= SMALL.threads_per_sm, steps
            assert sum(w.registers for w in here) <= SMALL.registers_per_sm, steps
            assert len(here) <= SMALL.blocks_per_sm, steps
    for sm, what in held:
        occupancy.release([sm], what)
    assert occupancy.place(WHOLE, SMALL.sms + 1) == list(range(SMALL.sms)), steps


def test_an_epilogue_of_every_sm_beside_a_primary_of_24() -> None:
    plan = make_plan("2A2F", "afdep", 8)
    dispatch, epilogue = plan.exchanges[0].streams[0][:2]
    assert (dispatch.kernel, dispatch.grid, epilogue.kernel, epilogue.grid) == ("dispatch", 24, "copy_epilogue", 132)
    occupancy, primary, dependent = Occupancy(HOPPER), Need.of(dispatch), Need.of(epilogue)
    assert occupancy.place(primary, 24, all_or_none=True) == list(range(24))
    assert occupancy.place(dependent, 132) == list(range(24, 132))
    assert occupancy.place(dependent, 24) == []
    occupancy.release(list(range(24)), primary)
    assert occupancy.place(dependent, 24) == list(range(24))


# ---- in a run --------------------------------------------------------------------------------------------------------


def launch_of(events: Events, rank: int, kernel: str) -> tuple[LaunchEvent, dict[int, list[AgentEvent]]]:
    """The first launch of a kernel on a rank, and its agents by block."""
    at = next(i for i, e in enumerate(events.launches) if (e.rank, e.kernel) == (rank, kernel))
    blocks: dict[int, list[AgentEvent]] = {}
    for agent in events.agents:
        if agent.launch == at:
            blocks.setdefault(agent.block, []).append(agent)
    return events.launches[at], blocks


def starts(blocks: dict[int, list[AgentEvent]]) -> dict[int, float]:
    """Block -> when it became resident and ran its first instruction; all its agents start then."""
    for agents in blocks.values():
        assert len({a.start_ns for a in agents}) == 1
    return {block: agents[0].start_ns for block, agents in blocks.items()}


TRIGGER_AT_ENTRY = (
    "        ops.phase(ctx, ph.DISPATCH_START)\n",
    "        ops.phase(ctx, ph.DISPATCH_START)\n        ops.launch_dependents()\n",
)


@pytest.mark.parametrize("collapse", [True, False])
def test_a_dependent_gets_108_sms_and_the_last_24_as_its_primary_leaves(collapse: bool) -> None:
    # A trigger at entry, so that the primary is still there when its dependent comes.
    plan = make_plan("2A2F", "fastafd_m2n", 150)
    profile, factories = H100.scaled(launch_skew_ns=0), broken("dispatch", TRIGGER_AT_ENTRY)
    events = run_checked(plan, profile=profile, factories=factories, collapse=collapse).events
    primary, primary_blocks = launch_of(events, 0, "dispatch")
    dependent, blocks = launch_of(events, 0, "copy_epilogue")
    where = f"{describe(plan)}: primary {primary}, dependent {dependent}"
    assert sorted(blocks) == list(range(132)), where
    found = starts(blocks)
    assert {found[block] for block in range(108)} == {dependent.start_ns}, where
    resident = primary.start_ns + profile.programmatic_launch_ns + profile.block_start_ns
    assert dependent.start_ns == pytest.approx(resident), where
    assert dependent.start_ns < min(a.end_ns for agents in primary_blocks.values() for a in agents), where
    left = sorted(max(a.end_ns for a in agents) for agents in primary_blocks.values())
    assert len(left) == 24, where
    assert [found[block] for block in range(108, 132)] == pytest.approx(
        [end + profile.block_start_ns for end in left]
    ), where
    # Residency is not execution: nothing is read before the primary's completion.
    woken = primary.end_ns + profile.programmatic_wake_ns
    assert all(a.end_ns > woken for agents in blocks.values() for a in agents), where


@pytest.mark.parametrize("arm", ["afdep", "fastafd_m2n"])
def test_the_shipped_text_leaves_one_block_of_the_primary_beside_its_dependent(arm: str) -> None:
    # Blocks 1 to 23 leave as they trigger; only block 0 still waits for the peers.
    events = run_timed(make_plan("2A2F", arm, 150))
    primary, _ = launch_of(events, 1, "dispatch")
    dependent, blocks = launch_of(events, 1, "copy_epilogue")
    found = starts(blocks)
    assert {found[block] for block in range(131)} == {dependent.start_ns}
    assert dependent.start_ns < primary.end_ns
    assert found[131] == pytest.approx(primary.end_ns + H100.block_start_ns)


def test_a_cooperative_grid_waits_for_every_sm_it_needs() -> None:
    # 132 transport SMs: dispatch of the next exchange cannot start before the epilogue has left every one of them.
    events = run_timed(make_plan("2A2F", "afdep", 150, exchanges=2, sms=132))
    for rank in range(4):
        mine = [e for e in events.launches if e.rank == rank]
        for before, after in zip(mine, mine[1:], strict=False):
            if after.kernel in ("dispatch", "combine"):
                gap_ns = after.start_ns - before.end_ns
                assert gap_ns == pytest.approx(H100.graph_edge_ns + H100.block_start_ns), f"{before}, {after}"


def test_a_small_device_runs_the_same_protocol_more_slowly() -> None:
    whole = make_plan("2A2F", "afdep", 100, exchanges=2)
    device = replace(HOPPER, sms=25)
    small = build_plan(whole.topology, whole.workload, whole.protocol, 2, device=device)
    slow, fast = run_checked(small), run_checked(whole)
    for rank in range(4):
        assert slow.events.ends_ns[rank][-1] > fast.events.ends_ns[rank][-1], f"rank {rank} on {device}"
    again = run_checked(small, collapse=False)
    assert_equal_events(slow.events, again.events, f"collapsed and full runs of {describe(small)} on {device}")
