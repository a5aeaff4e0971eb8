"""Spans, the critical path, phase costs, pictures and digests of small runs whose answers were worked out by hand."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from afdep_sim.kernels import phases as ph
from afdep_sim.perfetto import perfetto, validate_perfetto, write_perfetto
from afdep_sim.run import AgentEvent, Events, Join, LaunchEvent, Mark, Run
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

ONE_EACH = Topology(1, 1)
PERIOD_NS = 1000.0
FFN, ATTENTION = 0, 1


class Story:
    """Writes events down as one would tell them; every time is shifted by `shift_ns`."""

    def __init__(self, ranks: int = 2) -> None:
        self.events = Events(ends_ns=[[] for _ in range(ranks)])
        self.shift_ns = 0.0
        self.exchange = 0

    def launch(self, rank: int, kernel: str, start_ns: float, end_ns: float, warps: int = 8) -> None:
        at = self.shift_ns
        event = LaunchEvent(rank, self.exchange, kernel, 1, warps, at + start_ns, at + end_ns)
        self.events.launches.append(event)

    def agent(self, warp: int, label: str, start_ns: float, end_ns: float, *marks: tuple[int, float]) -> int:
        """An agent of block 0 of the latest launch; its index."""
        at, agent = self.shift_ns, len(self.events.agents)
        launch = len(self.events.launches) - 1
        self.events.agents.append(AgentEvent(launch, 0, warp, label, at + start_ns, at + end_ns))
        self.events.marks += [Mark(agent, phase, at + time_ns) for phase, time_ns in marks]
        return agent

    def join(self, agent: int, time_ns: float, kind: str, source: int, source_ns: float) -> None:
        at = self.shift_ns
        self.events.joins.append(Join(agent, at + time_ns, kind, source, at + source_ns))


def exchanges(count: int = 2) -> Events:
    """`count` equal exchanges of 1A1F, one every PERIOD_NS: signals across ranks, a block join, programmatic edges."""
    story = Story()
    last = {FFN: -1, ATTENTION: -1}
    for n in range(count):
        story.exchange, story.shift_ns = n, n * PERIOD_NS
        story.launch(ATTENTION, "dispatch", 0, 300)
        notify = story.agent(
            0,
            "notify",
            0,
            300,
            (ph.DISPATCH_START, 10),
            (ph.DISPATCH_COUNT, 20),
            (ph.DISPATCH_EXIT, 100),
            (ph.DISPATCH_END, 290),
        )
        payload = story.agent(
            4, "payload", 0, 280, (ph.DISPATCH_START, 10), (ph.DISPATCH_PAYLOAD, 30), (ph.DISPATCH_EXIT, 270)
        )
        for agent in (notify, payload):
            story.join(agent, 0, "stream", last[ATTENTION], -50)
        story.join(notify, 280, "block", payload, 280)

        story.launch(FFN, "dispatch", 5, 400)
        receive = story.agent(
            0, "notify", 5, 400, (ph.DISPATCH_START, 15), (ph.DISPATCH_ARRIVAL, 50), (ph.DISPATCH_END, 360)
        )
        story.join(receive, 5, "stream", last[FFN], -300)
        story.join(receive, 350, "signal", notify, 285)
        story.launch(FFN, "copy_epilogue", 362, 520)
        rows = story.agent(0, "rows", 362, 520, (ph.COPY_START, 365), (ph.COPY_ROWS, 402))
        story.join(rows, 362, "stream", last[FFN], -300)
        story.join(rows, 402, "primary", receive, 400)
        story.launch(FFN, "combine", 530, 700)
        combine = story.agent(
            0, "rows", 530, 700, (ph.COMBINE_START, 535), (ph.COMBINE_ROWS, 540), (ph.COMBINE_EXIT, 650)
        )
        story.join(combine, 530, "stream", rows, 520)

        story.launch(ATTENTION, "combine", 310, 800)
        collect = story.agent(
            0, "collect", 310, 800, (ph.COMBINE_START, 315), (ph.COMBINE_ARRIVAL, 320), (ph.COMBINE_END, 770)
        )
        story.join(collect, 310, "stream", notify, 300)
        story.join(collect, 760, "signal", combine, 690)
        story.launch(ATTENTION, "reduce_epilogue", 780, 950)
        reduce = story.agent(0, "rows", 780, 950, (ph.REDUCE_START, 782), (ph.REDUCE_ROWS, 801))
        story.join(reduce, 780, "stream", notify, 300)
        story.join(reduce, 801, "primary", collect, 800)
        last = {FFN: combine, ATTENTION: reduce}
        story.events.ends_ns[FFN].append(story.shift_ns + 705)
        story.events.ends_ns[ATTENTION].append(story.shift_ns + 960)
    return story.events


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


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def track_names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in of_kind(trace, "M") if e["name"] == "thread_name"}


def tracks_of(trace: dict[str, Any], name: str) -> dict[str, list[tuple[float, float]]]:
    """(ts, end) in microseconds of the slices called `name`, by track name."""
    names = track_names(trace)
    found: dict[str, list[tuple[float, float]]] = {}
    for event in of_kind(trace, "X"):
        if event["name"] == name:
            where = names[event["pid"], event["tid"]]
            found.setdefault(where, []).append((event["ts"], round(event["ts"] + event["dur"], 3)))
    return found


def test_picture_has_a_slice_for_every_span_and_launch() -> None:
    events = exchanges(3)
    trace = perfetto(events, ONE_EACH)
    assert validate_perfetto(trace) == len(spans(events)) + len(events.launches)
    assert trace["displayTimeUnit"] == "ns"
    payload = next(event for event in of_kind(trace, "X") if event["name"] == "dispatch payload")
    assert payload == {
        "ph": "X",
        "name": "dispatch payload",
        "cat": "dispatch",
        "pid": 2,
        "tid": payload["tid"],
        "ts": 0.03,
        "dur": 0.24,
        "args": {"exchange": 0, "kernel": "dispatch", "warps": 1},
    }
    assert track_names(trace)[2, payload["tid"]] == "block 0 payload"
    kernel = next(event for event in of_kind(trace, "X") if event["name"] == "reduce_epilogue")
    assert kernel["args"] == {"exchange": 0, "grid": 1, "warps": 8}
    processes = {e["pid"]: e["args"]["name"] for e in of_kind(trace, "M") if e["name"] == "process_name"}
    assert processes == {1: "rank 0 (ffn)", 2: "rank 1 (attention)"}


def test_tracks_are_sorted_kernels_first_then_blocks_and_warps() -> None:
    trace = perfetto(exchanges(), ONE_EACH)
    order = {e["tid"]: e["args"]["sort_index"] for e in of_kind(trace, "M") if e["name"] == "thread_sort_index"}
    names = sorted(track_names(trace).items(), key=lambda item: order[item[0][1]])
    assert [name for (pid, _), name in names if pid == 2] == [
        "kernels",
        "kernels, lane 2",
        "block 0 collect",
        "block 0 notify",
        "block 0 rows",
        "block 0 payload",
    ]


def test_a_kernel_that_overlaps_its_programmatic_primary_gets_its_own_lane() -> None:
    trace = perfetto(exchanges(1), ONE_EACH)
    assert tracks_of(trace, "copy_epilogue") == {"kernels, lane 2": [(0.362, 0.52)]}
    assert tracks_of(trace, "combine") == {"kernels": [(0.31, 0.8), (0.53, 0.7)]}
    assert tracks_of(trace, "reduce_epilogue") == {"kernels, lane 2": [(0.78, 0.95)]}


def overlapping() -> Events:
    """One block whose copy epilogue runs its class 'rows' beside the dispatch's class of the same name."""
    story = Story()
    story.launch(0, "dispatch", 0, 100)
    story.agent(0, "rows", 0, 100, (ph.DISPATCH_START, 0), (ph.DISPATCH_PAYLOAD, 10), (ph.DISPATCH_END, 100))
    story.launch(0, "copy_epilogue", 20, 150)
    story.agent(0, "rows", 20, 150, (ph.COPY_START, 20), (ph.COPY_ROWS, 90))
    return story.events


def test_spans_that_overlap_go_to_lanes_and_those_that_nest_stay() -> None:
    trace = perfetto(overlapping(), ONE_EACH)
    assert tracks_of(trace, "dispatch payload") == {"block 0 rows": [(0.01, 0.1)]}
    assert tracks_of(trace, "copy start") == {"block 0 rows": [(0.02, 0.09)]}
    assert tracks_of(trace, "copy rows") == {"block 0 rows, lane 2": [(0.09, 0.15)]}
    assert tracks_of(trace, "dispatch end") == {"block 0 rows": [(0.1, 0.1)]}
    assert validate_perfetto(trace) == 7


def test_kernels_that_run_beside_each_other_never_share_a_lane() -> None:
    story = Story()
    story.launch(0, "dispatch", 0, 100)
    story.launch(0, "copy_epilogue", 20, 80)
    trace = perfetto(story.events, ONE_EACH)
    assert tracks_of(trace, "dispatch") == {"kernels": [(0, 0.1)]}
    assert tracks_of(trace, "copy_epilogue") == {"kernels, lane 2": [(0.02, 0.08)]}


def test_of_two_spans_with_one_start_the_shorter_lies_inside_the_longer() -> None:
    events = overlapping()
    events.marks[:] = [Mark(1, ph.COPY_START, 20), Mark(0, ph.DISPATCH_PAYLOAD, 20), Mark(1, ph.COPY_ROWS, 60)]
    trace = perfetto(events, ONE_EACH)
    assert tracks_of(trace, "copy start") == {"block 0 rows": [(0.02, 0.06)]}
    assert tracks_of(trace, "dispatch payload") == {"block 0 rows": [(0.02, 0.1)]}


def test_arrows_lead_from_the_signal_to_the_wait_it_ended() -> None:
    events = exchanges(1)
    trace = perfetto(events, ONE_EACH)
    names = track_names(trace)
    arrows = [(e["ph"], e["id"], names[e["pid"], e["tid"]], e["pid"], e["ts"]) for e in of_kind(trace, "s")]
    arrows += [(e["ph"], e["id"], names[e["pid"], e["tid"]], e["pid"], e["ts"]) for e in of_kind(trace, "f")]
    signals = [i for i, join in enumerate(events.joins) if join.kind == "signal"]
    assert arrows == [
        ("s", signals[0], "block 0 notify", 2, 0.285),
        ("s", signals[1], "block 0 rows", 1, 0.69),
        ("f", signals[0], "block 0 notify", 1, 0.35),
        ("f", signals[1], "block 0 collect", 2, 0.76),
    ]
    assert all(event["bp"] == "e" for event in of_kind(trace, "f"))


def bound(trace: dict[str, Any], flow_id: int) -> list[tuple[str, str]]:
    """What a reader binds the ends of an arrow to: (kind of end, the slice it opened last on the end's track)."""
    validate_perfetto(trace)
    topmost: dict[tuple[int, int], str] = {}
    found = []
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            topmost[event["pid"], event["tid"]] = event["name"]
        elif event.get("id") == flow_id:
            found.append((event["ph"], topmost[event["pid"], event["tid"]]))
    return found


@pytest.mark.parametrize(("source_ns", "time_ns"), [(270, 360), (280, 350), (275, 275), (270, 270), (10, 15), (4, 360)])
def test_an_arrow_at_the_edge_of_a_phase_is_read_with_the_right_slice(source_ns: float, time_ns: float) -> None:
    events = exchanges(1)
    at = next(i for i, join in enumerate(events.joins) if join.kind == "signal")
    payload, receive = 1, 2
    events.joins[at] = Join(receive, time_ns, "signal", payload, source_ns)
    sends = "dispatch exit" if source_ns >= 270 else "dispatch start" if source_ns >= 10 else "dispatch"
    waits = "dispatch arrival" if time_ns > 50 else "dispatch start"
    assert bound(perfetto(events, ONE_EACH), at) == [("s", sends), ("f", waits)]


def test_an_arrow_does_not_start_in_a_slice_that_begins_beside_it() -> None:
    events = overlapping()
    events.joins.append(Join(1, 90, "signal", 0, 20))
    assert bound(perfetto(events, ONE_EACH), 0) == [("s", "dispatch payload"), ("f", "copy start")]


def test_an_arrow_outside_its_launch_is_refused() -> None:
    events = exchanges(1)
    events.joins.append(Join(2, 350, "signal", 0, 301))
    with pytest.raises(ValueError, match="at 301.* agent 0 .* does not run"):
        perfetto(events, ONE_EACH)


def random_events(seed: int) -> Events:
    """Launches, agents and marks at times with fractions of a nanosecond, many of them equal or close."""
    rng = random.Random(seed)
    story = Story()
    story.shift_ns = rng.choice([0, 960, rng.random() * 1e7])
    for _ in range(6):
        start_ns = rng.random() * 40
        story.launch(rng.randrange(2), "combine", start_ns, start_ns + 60)
        for warp in range(4):
            times = sorted(start_ns + rng.choice([rng.random(), rng.random() * 60, 7.5]) for _ in range(6))
            marks = [(rng.randrange(2, len(ph.NAMES)), time_ns) for time_ns in times]
            story.agent(warp, "rows", start_ns, max(times) + rng.random(), *marks)
    return story.events


@pytest.mark.parametrize("seed", range(40))
def test_any_events_give_a_picture_that_no_reader_cuts(seed: int) -> None:
    events = random_events(seed)
    trace = perfetto(events, ONE_EACH)
    assert validate_perfetto(json.dumps(trace)) == len(spans(events)) + len(events.launches)
    # What a reader makes of a time (whole nanoseconds, the rest cut off) is the rounded time.
    read = sorted(int(event["ts"] * 1000) for event in of_kind(trace, "X"))
    meant = sorted(round(s.start_ns) for s in spans(events)) + [round(s.start_ns) for s in events.launches]
    assert read == sorted(meant)


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Any) -> None:
    path = tmp_path / "run.json"
    events = exchanges()
    write_perfetto(path, events, ONE_EACH)
    before = path.read_bytes()
    assert validate_perfetto(before.decode()) == len(spans(events)) + len(events.launches)
    for bad in (math.nan, math.inf):
        broken = copy.deepcopy(events)
        broken.agents[0] = broken.agents[0]._replace(end_ns=bad)
        with pytest.raises(ValueError, match="not finite"):
            write_perfetto(path, broken, ONE_EACH)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.json"]


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


def slice_event(ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": "work", "cat": "k", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {}}


def flow(kind: str, ts: float, tid: int = 1, flow_id: int = 7) -> dict[str, Any]:
    binding = {"bp": "e"} if kind == "f" else {}
    return {"ph": kind, "name": "signal", "cat": "signal", "id": flow_id, "pid": 1, "tid": tid, "ts": ts, **binding}


def sound(*extra: dict[str, Any]) -> dict[str, Any]:
    """A trace without a fault, and then some."""
    named: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 0"}}]
    for tid in (1, 2):
        named.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": f"track {tid}"}})
    body = [slice_event(0, 10), slice_event(2, 3), slice_event(2, 0), slice_event(10, 5), slice_event(5, 10, tid=2)]
    return {"traceEvents": [*named, *body, flow("s", 2.5), flow("f", 6, tid=2), *extra], "displayTimeUnit": "ns"}


def test_a_sound_trace_is_accepted_as_object_and_as_text() -> None:
    assert validate_perfetto(sound()) == 5
    assert validate_perfetto(json.dumps(sound())) == 5


FAULTS: list[tuple[str, Callable[[], Any]]] = [
    ("partially overlap", lambda: sound(slice_event(14, 2))),
    ("partially overlap", lambda: sound(slice_event(4, 2))),
    ("partially overlap", lambda: sound(slice_event(14.999, 0.002))),
    ("not strict JSON", lambda: sound(slice_event(math.nan, 1))),
    ("not strict JSON", lambda: sound(slice_event(20, math.inf))),
    ("NaN", lambda: json.dumps(sound(slice_event(math.nan, 1)))),
    ("Infinity", lambda: json.dumps(sound(slice_event(20, -math.inf)))),
    ("1e999", lambda: json.dumps(sound()).replace('"dur": 5', '"dur": 1e999')),
    ("'ts' stands twice", lambda: json.dumps(sound()).replace('"dur": 5', '"dur": 5, "ts": 10')),
    ("not strict JSON", lambda: json.dumps(sound())[:-2]),
    ("list 'traceEvents'", lambda: {"displayTimeUnit": "ns"}),
    ("list 'traceEvents'", lambda: "[]"),
    ("event 10 is no object whose 'ph'", lambda: sound({"ph": "Q"})),
    ("no proper 'dur'", lambda: sound({k: v for k, v in slice_event(20, 1).items() if k != "dur"})),
    ("no proper 'ts'", lambda: sound({**slice_event(20, 1), "ts": "20"})),
    ("no proper 'tid'", lambda: sound({**slice_event(20, 1), "tid": True})),
    ("no proper 'tid'", lambda: sound({"ph": "M", "name": "thread_name", "pid": 1, "args": {"name": "x"}})),
    ("negative duration", lambda: sound(slice_event(20, -1))),
    ("1 starts and 0 ends", lambda: sound(flow("s", 3, flow_id=8))),
    ("0 starts and 1 ends", lambda: sound(flow("f", 3, flow_id=8))),
    ("1 starts and 2 ends", lambda: sound(flow("f", 6))),
    ("2 starts and 1 ends", lambda: sound(flow("s", 6))),
    ("before its start", lambda: sound(flow("s", 9, flow_id=8), flow("f", 8, flow_id=8))),
    ("in no slice of track", lambda: sound(flow("s", 4, tid=2, flow_id=8), flow("f", 8, flow_id=8))),
    ("in no slice of track", lambda: sound(flow("s", 4, flow_id=8), flow("f", 15.5, flow_id=8))),
    ("does not bind", lambda: sound(flow("s", 4, flow_id=8), {**flow("f", 5, flow_id=8), "bp": "b"})),
    (r"track \(1, 3\) has no name", lambda: sound(slice_event(0, 1, tid=3))),
    (r"process \(2, None\) has no name", lambda: sound({**slice_event(0, 1), "pid": 2})),
    (r"track \(1, 2\) has no name", lambda: json.dumps(sound()).replace("track 2", "")),
]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_a_faulty_trace_is_refused(fault: int) -> None:
    sentence, make = FAULTS[fault]
    with pytest.raises(ValueError, match=sentence):
        validate_perfetto(make())


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
