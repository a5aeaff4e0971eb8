"""Pictures of small runs: what is drawn where, and what the validator refuses."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from stories import ONE_EACH, Story, exchanges

from afdep_sim.kernels import phases as ph
from afdep_sim.perfetto import perfetto, validate_perfetto, write_perfetto
from afdep_sim.run import Events, Join, Mark
from afdep_sim.trace import spans


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
