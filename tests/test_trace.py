"""Spans, the critical path, phase costs and digests of small runs whose answers were worked out by hand."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stories import ATTENTION, FFN, ONE_EACH, PERIOD_NS, Story, exchanges

from afdep_sim.kernels import phases as ph
from afdep_sim.run import Events, Join, Mark, Run
from afdep_sim.topology import Topology
from afdep_sim.trace import (
    Span,
    critical_path,
    digest,
    phase_costs_us,
    phase_table,
    round_trip_us,
    spans,
    write_whole,
)

WALK = [
    (ATTENTION, "payload", ph.GAP, -40, 10),
    (ATTENTION, "payload", ph.DISPATCH_START, 10, 30),
    (ATTENTION, "payload", ph.DISPATCH_PAYLOAD, 30, 270),
    (ATTENTION, "payload", ph.DISPATCH_EXIT, 270, 280),
    (ATTENTION, "notify", ph.DISPATCH_EXIT, 280, 285),
    (FFN, "notify", ph.DISPATCH_ARRIVAL, 285, 360),
    (FFN, "notify", ph.DISPATCH_END, 360, 400),
    (FFN, "rows", ph.GAP, 400, 402),
    (FFN, "rows", ph.COPY_ROWS, 402, 520),
    (FFN, "rows", ph.GAP, 520, 535),
    (FFN, "rows", ph.COMBINE_START, 535, 540),
    (FFN, "rows", ph.COMBINE_ROWS, 540, 650),
    (FFN, "rows", ph.COMBINE_EXIT, 650, 690),
    (ATTENTION, "collect", ph.COMBINE_ARRIVAL, 690, 770),
    (ATTENTION, "collect", ph.COMBINE_END, 770, 800),
    (ATTENTION, "rows", ph.GAP, 800, 801),
    (ATTENTION, "rows", ph.REDUCE_ROWS, 801, 950),
    (ATTENTION, "rows", ph.GAP, 950, 960),
]
"""The critical path of one exchange of `exchanges` on the Attention rank: (rank, label, phase, start, end)."""


def merged(events: Events, rank: int, first: int, last: int) -> list[tuple[int, str, int, float, float]]:
    """The critical path with neighbours of one rank, label and phase joined."""
    found: list[tuple[int, str, int, float, float]] = []
    for s in critical_path(events, rank, first, last):
        label = events.agents[s.agent].label
        assert events.agents[s.agent].launch == s.launch
        assert events.launches[s.launch].rank == s.rank
        if found and found[-1][:3] == (s.rank, label, s.phase):
            assert found[-1][4] == s.start_ns
            found[-1] = (*found[-1][:4], s.end_ns)
        else:
            found.append((s.rank, label, s.phase, s.start_ns, s.end_ns))
    return found


def test_spans_reach_from_the_first_entry_to_the_last_exit_of_a_class() -> None:
    story = Story()
    story.launch(1, "dispatch", 0, 100)
    story.agent(4, "payload", 0, 90, (ph.DISPATCH_START, 3), (ph.DISPATCH_PAYLOAD, 10), (ph.DISPATCH_EXIT, 80))
    story.agent(5, "payload", 0, 100, (ph.DISPATCH_START, 2), (ph.DISPATCH_PAYLOAD, 12), (ph.DISPATCH_EXIT, 60))
    story.agent(0, "notify", 0, 70, (ph.DISPATCH_COUNT, 5), (ph.DISPATCH_PREFIX, 20), (ph.DISPATCH_COUNT, 40))
    assert spans(story.events) == [
        Span(1, 0, "notify", 0, ph.DISPATCH_COUNT, 5, 70),
        Span(1, 0, "notify", 0, ph.DISPATCH_PREFIX, 20, 40),
        Span(1, 0, "payload", 0, ph.DISPATCH_START, 2, 12),
        Span(1, 0, "payload", 0, ph.DISPATCH_PAYLOAD, 10, 80),
        Span(1, 0, "payload", 0, ph.DISPATCH_EXIT, 60, 100),
    ]


def test_the_order_of_marks_and_joins_in_the_lists_does_not_matter() -> None:
    events = exchanges()
    mixed = copy.deepcopy(events)
    mixed.marks.reverse()
    mixed.joins.reverse()
    assert spans(mixed) == spans(events)
    assert critical_path(mixed, ATTENTION, 0, 1) == critical_path(events, ATTENTION, 0, 1)


def test_critical_path_is_the_one_worked_out_by_hand() -> None:
    expected = [(rank, label, phase, PERIOD_NS + a, PERIOD_NS + b) for rank, label, phase, a, b in WALK]
    assert merged(exchanges(), ATTENTION, 0, 1) == expected
    assert merged(exchanges(3), ATTENTION, 0, 1) == expected


def test_critical_path_starts_at_the_agent_that_ended_last() -> None:
    start = Join(0, 20, "stream", -1, 0), Join(1, 20, "stream", -1, 0)
    events = one_launch(*start)
    assert critical_path(events, 0, 0, 1)[-1].agent == 0
    events.agents[1] = events.agents[1]._replace(end_ns=95)
    assert critical_path(events, 0, 0, 1)[-1].agent == 1


def test_critical_path_covers_its_time_without_a_hole() -> None:
    events = exchanges(4)
    for rank in (FFN, ATTENTION):
        path = critical_path(events, rank, 1, 3)
        assert path[0].start_ns == events.ends_ns[rank][1]
        assert path[-1].end_ns == events.ends_ns[rank][3]
        assert all(before.end_ns == after.start_ns for before, after in zip(path, path[1:], strict=False))
        assert all(segment.start_ns < segment.end_ns for segment in path)
    assert critical_path(events, FFN, 2, 2) == []


def test_a_path_hops_over_ranks_and_exchanges_and_back() -> None:
    events = exchanges(3)
    assert {(s.rank, events.launches[s.launch].exchange) for s in critical_path(events, FFN, 0, 2)} == {
        (FFN, 1),
        (FFN, 2),
        (ATTENTION, 0),
        (ATTENTION, 1),
        (ATTENTION, 2),
    }


def one_launch(*joins: Join) -> Events:
    """Exchange 1 of one rank between 5 and 100 ns: two agents from 20 on, with the given joins."""
    story = Story(1)
    story.exchange = 1
    story.launch(0, "combine", 20, 90)
    story.agent(0, "rows", 20, 90, (ph.COMBINE_START, 30), (ph.COMBINE_ROWS, 50))
    story.agent(1, "rows", 20, 80, (ph.COMBINE_START, 25), (ph.COMBINE_EXIT, 60))
    story.events.joins += joins
    story.events.ends_ns = [[5.0, 100.0]]
    return story.events


def phases_of(events: Events) -> list[tuple[int, int, float, float]]:
    return [(s.agent, s.phase, s.start_ns, s.end_ns) for s in critical_path(events, 0, 0, 1)]


def test_time_before_everything_is_a_gap() -> None:
    assert phases_of(one_launch(Join(0, 20, "stream", -1, 17))) == [
        (0, ph.GAP, 5, 20),
        (0, ph.GAP, 20, 30),
        (0, ph.COMBINE_START, 30, 50),
        (0, ph.COMBINE_ROWS, 50, 90),
        (0, ph.GAP, 90, 100),
    ]


def test_a_wait_that_a_mark_follows_at_once_belongs_to_the_phase_before() -> None:
    events = one_launch(Join(0, 50, "grid", 1, 45), Join(1, 20, "stream", -1, 0))
    assert (0, ph.COMBINE_START, 45, 50) in phases_of(events)


def test_time_between_kernels_is_a_gap_even_if_the_agent_opens_a_phase_at_once() -> None:
    for kind, phase in (("stream", ph.GAP), ("primary", ph.GAP), ("block", ph.COMBINE_EXIT)):
        events = one_launch(Join(0, 30, kind, 1, 24), Join(1, 20, "stream", -1, 0))
        events.marks[:] = [Mark(0, ph.COMBINE_EXIT, 30), Mark(1, ph.COMBINE_START, 20)]
        assert [s.phase for s in critical_path(events, 0, 0, 1) if s.end_ns == 30] == [phase]


def test_a_source_that_acted_behind_its_end_is_charged_to_the_gap() -> None:
    events = one_launch(Join(0, 88, "signal", 1, 84), Join(1, 20, "stream", -1, 0))
    assert phases_of(events)[-5:] == [
        (1, ph.COMBINE_EXIT, 60, 80),
        (1, ph.GAP, 80, 84),
        (0, ph.COMBINE_ROWS, 84, 88),
        (0, ph.COMBINE_ROWS, 88, 90),
        (0, ph.GAP, 90, 100),
    ]


def test_joins_at_one_instant_do_not_trap_the_walk() -> None:
    start = Join(0, 20, "stream", -1, 0), Join(1, 20, "stream", -1, 0)
    events = one_launch(*start, Join(0, 70, "block", 1, 70), Join(1, 70, "grid", 0, 70))
    assert sum(end_ns - start_ns for _, _, start_ns, end_ns in phases_of(events)) == 95


def test_a_walk_that_cannot_go_back_names_its_agent() -> None:
    with pytest.raises(RuntimeError, match=r"agent 1 \(rank 0, exchange 1, combine, block 0, warp 1, rows\)"):
        critical_path(one_launch(Join(0, 70, "block", 1, 65)), 0, 0, 1)
    with pytest.raises(RuntimeError, match="does not go back at agent 0 "):
        critical_path(one_launch(Join(0, 70, "signal", 1, 75), Join(1, 20, "stream", -1, 0)), 0, 0, 1)


def test_a_rank_or_exchange_that_is_not_there_is_refused() -> None:
    events = exchanges()
    with pytest.raises(ValueError, match="rank 2 is not one of the 2 ranks"):
        critical_path(events, 2, 0, 1)
    with pytest.raises(ValueError, match="exchange -1 is not one of the 2"):
        critical_path(events, 0, -1, 1)
    with pytest.raises(ValueError, match="exchange 2 is not one of the 2"):
        critical_path(events, 0, 0, 2)


def test_round_trip_is_the_slowest_attention_ranks_mean() -> None:
    events = Events(ends_ns=[[0.0, 9e9, 9e9], [100.0, 1_000.0, 4_100.0], [300.0, 0.0, 4_300.0], [0.0, 1.0, 2.0]])
    assert round_trip_us(events, Topology(3, 1)) == (2.0, 1)
    events.ends_ns[2][2] += 500
    assert round_trip_us(events, Topology(3, 1)) == (2.25, 2)


def test_a_round_trip_needs_two_exchanges() -> None:
    with pytest.raises(ValueError, match="needs at least 2 exchanges, rank 1 ended 1"):
        round_trip_us(exchanges(1), ONE_EACH)
    with pytest.raises(ValueError, match="needs at least 2 exchanges"):
        phase_costs_us(exchanges(1), ATTENTION)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_phase_costs_are_the_walk_by_phase_and_sum_to_the_round_trip(count: int) -> None:
    costs = phase_costs_us(exchanges(count), ATTENTION)
    expected = dict.fromkeys(ph.NAMES, 0.0)
    for _, _, phase, start_ns, end_ns in WALK:
        expected[ph.NAMES[phase]] += (end_ns - start_ns) / 1e3
    assert list(costs) == list(ph.NAMES)
    assert costs == pytest.approx(expected, abs=1e-12)
    assert costs["gap"] == pytest.approx(0.078)
    value_us, rank = round_trip_us(exchanges(count), ONE_EACH)
    assert rank == ATTENTION
    assert math.fsum(costs.values()) == pytest.approx(value_us, abs=1e-6)


def test_phase_table_is_aligned_and_leaves_out_empty_rows() -> None:
    table = phase_table(
        {
            "afdep": {"combine rows": 10.25, "gap": 1.5, "copy rows": 0.0},
            "m2n": {"gap": 112.0, "later phase": 0.004, "copy rows": 0.0},
        }
    )
    assert table.splitlines() == [
        "phase (us)    afdep     m2n",
        "---------------------------",
        "gap            1.50  112.00",
        "combine rows  10.25    0.00",
        "later phase    0.00    0.00",
        "---------------------------",
        "total         11.75  112.00",
    ]


def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, b"old")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def a_run() -> Run:
    events = exchanges()
    events.counters = [{"rows": 3, "signals": 4}, {"signals": 2, "rows": 1}]
    combined = [{1: np.arange(6, dtype=np.uint16).reshape(2, 3)}, {1: np.zeros((2, 3), np.uint16)}]
    return Run(combined, [{}, {}], events, [np.array([1, 2], np.int64), np.array([3, 4], np.int64)])


def move_mark(run: Run) -> None:
    mark = run.events.marks[3]
    run.events.marks[3] = mark._replace(time_ns=math.nextafter(mark.time_ns, math.inf))


def change_join(run: Run) -> None:
    run.events.joins[2] = run.events.joins[2]._replace(kind="grid")


def change_launch(run: Run) -> None:
    run.events.launches[0] = run.events.launches[0]._replace(grid=2)


def change_agent(run: Run) -> None:
    run.events.agents[0] = run.events.agents[0]._replace(label="payload")


def change_end(run: Run) -> None:
    run.events.ends_ns[0][0] += 1e-9


def change_counter(run: Run) -> None:
    run.events.counters[1]["rows"] = 2


def change_output(run: Run) -> None:
    run.combined[0][1][1, 2] += 1


def change_shape(run: Run) -> None:
    run.combined[0][1] = run.combined[0][1].reshape(3, 2)


def change_word(run: Run) -> None:
    run.words[1][0] = 5


def move_word(run: Run) -> None:
    run.words[:] = [np.array([1, 2, 3], np.int64), np.array([4], np.int64)]


def add_exchange(run: Run) -> None:
    run.combined.append({})


CHANGES = [
    move_mark,
    change_join,
    change_launch,
    change_agent,
    change_end,
    change_counter,
    change_output,
    change_shape,
    change_word,
    move_word,
    add_exchange,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_digest_changes_with_everything_it_covers(change: Callable[[Run], None]) -> None:
    run = a_run()
    change(run)
    assert digest(run) != digest(a_run())


def test_equal_runs_have_equal_digests() -> None:
    run = a_run()
    run.events.counters[0] = {"signals": 4, "rows": 3}
    run.events.marks = [mark._replace(time_ns=np.float64(mark.time_ns)) for mark in run.events.marks]
    run.combined[0] = {1: np.asfortranarray(run.combined[0][1])}
    assert digest(run) == digest(a_run())


def test_a_digest_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from afdep_sim.run import Events, Run; from afdep_sim.trace import digest;"
        "counters = dict.fromkeys({'rows', 'signals', 'kernels', 'bytes_in'}, 1);"
        "print(digest(Run([], [], Events(counters=[counters]), [])))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1
