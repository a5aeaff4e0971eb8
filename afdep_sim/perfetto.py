"""Spans of one run as a picture for Perfetto (ui.perfetto.dev) or chrome://tracing: Chrome's JSON object format.

A process per rank, a track per (block, warp class) and one for kernel launches. Perfetto reads a time as a whole
number of nanoseconds, cuts off the rest, and drops a slice that partially overlaps another on its track. Hence times
are rounded to nanoseconds here, and what would overlap goes to another lane: a further track of the same name.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from afdep_sim.kernels.phases import NAMES
from afdep_sim.run import Events
from afdep_sim.topology import Topology
from afdep_sim.trace import Timeline, agents_per_class, spans, write_whole

Event = dict[str, Any]
Key = tuple[int, ...] | tuple[int, int, str, int]
"""(launch,) for a kernel's residency, (launch, block, warp class, phase) for a span."""


class _Slice(NamedTuple):
    start_ns: int
    end_ns: int
    key: Key
    name: str
    category: str
    args: dict[str, int | str]


class _Track(NamedTuple):
    """What shares a name. `order` sorts the tracks of a rank; `nests`: a slice may lie inside another."""

    order: tuple[int, int, str]
    title: str
    nests: bool
    slices: list[_Slice]


class _Place(NamedTuple):
    """Where a slice was put."""

    pid: int
    tid: int
    start_ns: int
    end_ns: int


def perfetto(events: Events, topology: Topology) -> dict[str, Any]:
    """The events as a Chrome JSON object: {"traceEvents": [...], "displayTimeUnit": "ns"}, times in microseconds.

    One complete event per span (args: exchange, kernel, warps traced) and per launch (args: exchange, grid, warps per
    block), an arrow from each signal to the wait that it ended, and names for every process and track. The process id
    is the rank + 1, since Perfetto takes process 0 for the idle process. Slices of one track nest or are disjoint.
    Raises `ValueError` for a time that is not finite, and for a signal that was sent or awaited outside its launch.
    """
    named: list[Event] = []
    drawn: list[tuple[int, int, int, Event]] = []
    places: dict[Key, _Place] = {}
    tid = 0
    for rank, tracks in enumerate(_tracks(events, topology.ranks)):
        pid = rank + 1
        named += _names(pid, 0, "process", f"rank {rank} ({topology.role(rank).value})", rank)
        for track in sorted(tracks, key=lambda t: t.order):
            for lane, slices in enumerate(_lanes(track.slices, track.nests), 1):
                tid += 1
                title = track.title if lane == 1 else f"{track.title}, lane {lane}"
                named += _names(pid, tid, "thread", title, tid)
                for s in slices:
                    places[s.key] = _Place(pid, tid, s.start_ns, s.end_ns)
                    drawn.append((s.start_ns, 1, s.start_ns - s.end_ns, _complete(s, pid, tid)))
    for start, end in _flows(events, places):
        drawn += [start, end]
    drawn.sort(key=lambda event: event[:3])
    return {"traceEvents": named + [event for *_, event in drawn], "displayTimeUnit": "ns"}


def write_perfetto(path: str | os.PathLike[str], events: Events, topology: Topology) -> None:
    """Write `perfetto(events, topology)` as strict JSON; the file is written whole or not at all."""
    text = json.dumps(perfetto(events, topology), allow_nan=False, separators=(",", ":"))
    write_whole(path, text.encode() + b"\n")


def _ns(time_ns: float) -> int:
    if not math.isfinite(time_ns):
        raise ValueError(f"time {time_ns} ns is not finite")
    return round(time_ns)


def _us(time_ns: int) -> float:
    """Microseconds that Perfetto, which cuts off what `value * 1000` has behind the point, reads as `time_ns`."""
    value = time_ns / 1000
    return value if int(value * 1000) == time_ns else math.nextafter(value, math.copysign(math.inf, time_ns))


def _tracks(events: Events, ranks: int) -> list[list[_Track]]:
    """Each rank's tracks: its launches, then its blocks' warp classes in order of block and lowest warp."""
    tracks: list[dict[tuple[int, str], _Track]] = [
        {(-1, ""): _Track((-1, 0, ""), "kernels", False, [])} for _ in range(ranks)
    ]
    for i, launch in enumerate(events.launches):
        args: dict[str, int | str] = {"exchange": launch.exchange, "grid": launch.grid, "warps": launch.warps}
        residency = _Slice(_ns(launch.start_ns), _ns(launch.end_ns), (i,), launch.kernel, "kernel", args)
        tracks[launch.rank][-1, ""].slices.append(residency)
    lowest: dict[tuple[int, int, str], int] = {}
    for agent in events.agents:
        where = (events.launches[agent.launch].rank, agent.block, agent.label)
        lowest[where] = min(agent.warp, lowest.get(where, agent.warp))
    agents = agents_per_class(events)
    for span in spans(events):
        launch, block, label = events.launches[span.launch], span.block, span.warp_class
        order = (block, lowest[span.rank, block, label], label)
        track = tracks[span.rank].setdefault((block, label), _Track(order, f"block {block} {label}", True, []))
        args = {
            "exchange": launch.exchange,
            "kernel": launch.kernel,
            "warps": agents[span.launch, block, label],
        }
        key = (span.launch, block, label, span.phase)
        track.slices.append(_Slice(_ns(span.start_ns), _ns(span.end_ns), key, NAMES[span.phase], launch.kernel, args))
    return [list(of_rank.values()) for of_rank in tracks]


def _lanes(slices: Sequence[_Slice], nests: bool) -> list[list[_Slice]]:
    """The slices in as few lanes as first come, first placed needs; in each they are disjoint or (`nests`) nest."""
    lanes: list[list[_Slice]] = []
    open_until: list[list[int]] = []
    for s in sorted(slices, key=lambda s: (s.start_ns, -s.end_ns)):
        for stack in open_until:
            while stack and stack[-1] <= s.start_ns:
                stack.pop()
        free = (i for i, stack in enumerate(open_until) if not stack or (nests and s.end_ns <= stack[-1]))
        lane = next(free, len(lanes))
        if lane == len(lanes):
            lanes.append([])
            open_until.append([])
        lanes[lane].append(s)
        open_until[lane].append(s.end_ns)
    return lanes


def _names(pid: int, tid: int, what: str, name: str, order: int) -> list[Event]:
    thread = {"tid": tid} if what == "thread" else {}
    return [
        {"ph": "M", "name": f"{what}_name", "pid": pid, **thread, "args": {"name": name}},
        {"ph": "M", "name": f"{what}_sort_index", "pid": pid, **thread, "args": {"sort_index": order}},
    ]


def _complete(s: _Slice, pid: int, tid: int) -> Event:
    return {
        "ph": "X",
        "name": s.name,
        "cat": s.category,
        "pid": pid,
        "tid": tid,
        "ts": _us(s.start_ns),
        "dur": _us(s.end_ns - s.start_ns),
        "args": s.args,
    }


def _flows(events: Events, places: Mapping[Key, _Place]) -> Iterator[tuple[tuple[int, int, int, Event], ...]]:
    """The two ends of every signal's arrow, with what sorts them among the slices.

    Perfetto binds an end to the slice that was opened last on the track. So an end comes before the slices that start
    at its time, unless it belongs to one of them.
    """
    timeline = Timeline(events)
    for i, join in enumerate(events.joins):
        if join.kind != "signal" or join.source == -1:
            continue
        sends = timeline.phase_at(join.source, join.source_ns)
        waits = timeline.phase_until(join.agent, join.time_ns)
        at = _find(timeline, places, join.source, sends, join.source_ns)
        to = _find(timeline, places, join.agent, waits, join.time_ns)
        sent_ns, seen_ns = _ns(join.source_ns), _ns(join.time_ns)
        first = 0 if at.start_ns < sent_ns else 2
        second = 0 if to.start_ns < seen_ns and not (first and sent_ns == seen_ns) else 2
        common = {"name": "signal", "cat": "signal", "id": i}
        yield (
            (sent_ns, first, 0, {"ph": "s", **common, "pid": at.pid, "tid": at.tid, "ts": _us(sent_ns)}),
            (seen_ns, second, 1, {"ph": "f", "bp": "e", **common, "pid": to.pid, "tid": to.tid, "ts": _us(seen_ns)}),
        )


def _find(timeline: Timeline, places: Mapping[Key, _Place], agent: int, phase: int, time_ns: float) -> _Place:
    """The slice of one end of a signal: the agent's phase at that time, or its launch where it is in none."""
    a, at_ns = timeline.events.agents[agent], _ns(time_ns)
    for key in ((a.launch, a.block, a.label, phase), (a.launch,)):
        place = places.get(key)
        if place and place.start_ns <= at_ns <= place.end_ns:
            return place
    raise ValueError(f"a signal has an end at {time_ns} ns, when the launch of {timeline.describe(agent)} does not run")


def validate_perfetto(obj_or_text: Mapping[str, Any] | str) -> int:
    """Check a trace as strictly as its strictest reader; the number of its slices.

    Raises `ValueError` with one sentence for text that is not strict JSON (NaN, Infinity, a key twice), an event
    without a required field or with a negative duration, slices of one track that partially overlap as Perfetto reads
    their times, an arrow without exactly one start and one later end, each in a slice of its track, and a process or
    track without a name.
    """
    trace = _strict(obj_or_text)
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError("the trace is not an object with a list 'traceEvents'")
    for i, event in enumerate(events):
        _check_fields(f"event {i}", event)
    by_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_kind[event["ph"]].append(event)
    _check_names(by_kind["M"], by_kind["X"] + by_kind["s"] + by_kind["f"])
    _check_flows(by_kind["s"], by_kind["f"], _check_nesting(by_kind["X"]))
    return len(by_kind["X"])


def _strict(obj_or_text: Mapping[str, Any] | str) -> Any:
    text = obj_or_text
    if not isinstance(text, str):
        try:
            text = json.dumps(text, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the trace is not strict JSON: {error}") from error
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"the trace is not strict JSON: {error}") from error


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"the trace is not strict JSON: {literal} is no finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the trace is not strict JSON: key {key!r} stands twice in one object")
        found[key] = value
    return found


_REQUIRED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float)},
    "M": {"name": str, "pid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": (int, str), "pid": int, "tid": int, "ts": (int, float)},
    "f": {"name": str, "cat": str, "id": (int, str), "pid": int, "tid": int, "ts": (int, float), "bp": str},
}


def _check_fields(which: str, event: Any) -> None:
    kind = event.get("ph") if isinstance(event, dict) else None
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise ValueError(f"{which} is no object whose 'ph' is one of {', '.join(_REQUIRED)}")
    required = _REQUIRED[kind]
    if kind == "M" and str(event.get("name")).startswith("thread_"):
        required = {**required, "tid": int}
    for field, types in required.items():
        if not isinstance(event.get(field), types) or isinstance(event[field], bool):
            raise ValueError(f"{which} (ph {kind!r}) has no proper {field!r}: {event.get(field)!r}")
    if kind == "X" and event["dur"] < 0:
        raise ValueError(f"{which} ({event['name']!r}) has the negative duration {event['dur']} us")
    if kind == "f" and event["bp"] != "e":
        raise ValueError(f"{which} (ph 'f') has 'bp' {event['bp']!r}, which does not bind it to the slice around it")


def _check_names(metadata: Sequence[Event], events: Sequence[Event]) -> None:
    named = {
        (event["pid"], event.get("tid") if event["name"] == "thread_name" else None)
        for event in metadata
        if event["name"] in ("process_name", "thread_name") and event["args"].get("name")
    }
    for event in events:
        for key in ((event["pid"], None), (event["pid"], event["tid"])):
            if key not in named:
                raise ValueError(f"{'process' if key[1] is None else 'track'} {key} has no name")


def _read_ns(value_us: float) -> int:
    """A time as Perfetto reads it: whole nanoseconds, the rest cut off."""
    return int(value_us * 1000)


def _check_nesting(slices: Sequence[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The outermost (start_ns, end_ns) of every track, in order."""
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in slices:
        start_ns = _read_ns(event["ts"])
        tracks[event["pid"], event["tid"]].append((start_ns, start_ns + _read_ns(event["dur"]), event["name"]))
    outermost: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for track, found in tracks.items():
        roots = outermost[track] = []
        stack: list[tuple[int, int, str]] = []
        for start_ns, end_ns, name in sorted(found, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1][1] <= start_ns:
                stack.pop()
            if stack and end_ns > stack[-1][1]:
                raise ValueError(
                    f"{name!r} at [{start_ns}, {end_ns}] ns and {stack[-1][2]!r} at "
                    f"[{stack[-1][0]}, {stack[-1][1]}] ns partially overlap on track {track}"
                )
            if not stack:
                roots.append((start_ns, end_ns))
            stack.append((start_ns, end_ns, name))
    return outermost


def _check_flows(
    starts: Sequence[Event], ends: Sequence[Event], outermost: Mapping[tuple[int, int], list[tuple[int, int]]]
) -> None:
    arrows: dict[tuple[str, str, int | str], tuple[list[Event], list[Event]]] = defaultdict(lambda: ([], []))
    for side, events in enumerate((starts, ends)):
        for event in events:
            arrows[event["cat"], event["name"], event["id"]][side].append(event)
            track, at_ns = (event["pid"], event["tid"]), _read_ns(event["ts"])
            roots = outermost.get(track, [])
            i = bisect_right(roots, at_ns, key=lambda root: root[0]) - 1
            if i < 0 or at_ns > roots[i][1]:
                which = f"flow {event['id']!r} ({event['ph']!r})"
                raise ValueError(f"{which} at {at_ns} ns is in no slice of track {track}")
    for (_, _, name), (begun, ended) in arrows.items():
        if len(begun) != 1 or len(ended) != 1:
            raise ValueError(f"flow {name!r} has {len(begun)} starts and {len(ended)} ends, not one of each")
        if ended[0]["ts"] < begun[0]["ts"]:
            raise ValueError(f"flow {name!r} ends at {ended[0]['ts']} us, before its start at {begun[0]['ts']} us")
