"""Raw events of one run -> spans, the critical path, phase costs and a digest; the same for every machine.

Times are nanoseconds since the run's start unless a name says otherwise. `perfetto.py` draws what this module finds.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from afdep_sim.kernels.phases import GAP, NAMES
from afdep_sim.run import AgentEvent, Events, Join, LaunchEvent, Mark, Run
from afdep_sim.topology import Topology

BETWEEN_KERNELS = frozenset({"stream", "primary"})
"""Kinds of join that no phase of the waiting agent pays for: the time lies between two kernels."""


class Span(NamedTuple):
    """A phase of one warp class of one block: from its first agent's entry to its last agent's exit.

    `launch` indexes `Events.launches`, `phase` is an integer of `kernels.phases`.
    """

    rank: int
    block: int
    warp_class: str
    launch: int
    phase: int
    start_ns: float
    end_ns: float


class Segment(NamedTuple):
    """A stretch of a critical path: what `agent` of `launch` on `rank` spent in `phase`. Joins count for the waiter."""

    rank: int
    launch: int
    agent: int
    phase: int
    start_ns: float
    end_ns: float


class Timeline:
    """The marks and joins of every agent, each agent's in order of time (ties in the order of the events)."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.marks_ns: list[list[float]] = [[] for _ in events.agents]
        self.phases: list[list[int]] = [[] for _ in events.agents]
        self.joins: list[list[Join]] = [[] for _ in events.agents]
        for mark in sorted(events.marks, key=lambda m: m.time_ns):
            self.marks_ns[mark.agent].append(mark.time_ns)
            self.phases[mark.agent].append(mark.phase)
        for join in sorted(events.joins, key=lambda j: j.time_ns):
            self.joins[join.agent].append(join)

    def entries(self, agent: int) -> Iterator[tuple[int, float, float]]:
        """(phase, start_ns, end_ns) of every phase that `agent` entered, in order of time."""
        times = self.marks_ns[agent]
        return zip(self.phases[agent], times, [*times[1:], self.events.agents[agent].end_ns], strict=True)

    def phase_at(self, agent: int, time_ns: float) -> int:
        """The phase `agent` was in from `time_ns` on; GAP before its first mark."""
        i = bisect_right(self.marks_ns[agent], time_ns) - 1
        return self.phases[agent][i] if i >= 0 else GAP

    def phase_until(self, agent: int, time_ns: float) -> int:
        """The phase `agent` was in up to `time_ns`: a mark at that very time opened what came after the wait.

        An agent whose first mark is at `time_ns` is in that phase; GAP where it has no mark so far.
        """
        i = bisect_left(self.marks_ns[agent], time_ns) - 1
        return self.phases[agent][i] if i >= 0 else self.phase_at(agent, time_ns)

    def back(self, agent: int, low_ns: float, high_ns: float) -> Iterator[tuple[int, float, float]]:
        """(phase, start_ns, end_ns) that cover [low_ns, high_ns] of `agent`, latest first; GAP outside its phases."""
        end_ns = self.events.agents[agent].end_ns
        if high_ns > max(end_ns, low_ns):
            yield GAP, max(end_ns, low_ns), high_ns
            high_ns = max(end_ns, low_ns)
        times, phases = self.marks_ns[agent], self.phases[agent]
        i = bisect_left(times, high_ns) - 1
        while high_ns > low_ns:
            start_ns = max(low_ns, times[i]) if i >= 0 else low_ns
            if start_ns < high_ns:
                yield phases[i] if i >= 0 else GAP, start_ns, high_ns
            high_ns, i = start_ns, i - 1

    def describe(self, agent: int) -> str:
        """Who `agent` is, for a message."""
        a = self.events.agents[agent]
        launch = self.events.launches[a.launch]
        return (
            f"agent {agent} (rank {launch.rank}, exchange {launch.exchange}, {launch.kernel}, "
            f"block {a.block}, warp {a.warp}, {a.label})"
        )


def spans(events: Events) -> list[Span]:
    """One span per (launch, block, warp class, phase): first entry to last exit over the agents of the class.

    In order of launch, block, warp class, start and phase. A phase lasts until its agent's next mark or end; one that
    is entered twice is one span. Time before an agent's first mark is in no span.
    """
    timeline = Timeline(events)
    extents: dict[tuple[int, int, str, int], tuple[float, float]] = {}
    for i, agent in enumerate(events.agents):
        for phase, start_ns, end_ns in timeline.entries(i):
            key = (agent.launch, agent.block, agent.label, phase)
            first_ns, last_ns = extents.get(key, (start_ns, end_ns))
            extents[key] = (min(first_ns, start_ns), max(last_ns, end_ns))
    found = (
        Span(events.launches[launch].rank, block, label, launch, phase, start_ns, end_ns)
        for (launch, block, label, phase), (start_ns, end_ns) in extents.items()
    )
    return sorted(found, key=lambda s: (s.launch, s.block, s.warp_class, s.start_ns, s.phase))


def agents_per_class(events: Events) -> Counter[tuple[int, int, str]]:
    """How many agents each (launch, block, warp class) has."""
    return Counter((agent.launch, agent.block, agent.label) for agent in events.agents)


def critical_path(events: Events, rank: int, first_exchange: int, last_exchange: int) -> list[Segment]:
    """What the time from the end of `first_exchange` to the end of `last_exchange` on `rank`'s stream went to.

    The walk goes back from the agent of `last_exchange`'s last launch on `rank` that ended last: inside an agent its
    marks say which phase pays; at its latest join, the time since the source acted goes to the phase that waited (to
    GAP for 'stream' and 'primary') and the walk goes on in the source, on whatever rank and exchange that is. A
    launch's time after its last agent, an agent's before its first mark, and everything before a source of -1 go to
    GAP. Every join is followed at most once, so joins at one instant cannot trap the walk.

    The segments are contiguous, in order of time, none is empty, and they cover exactly that time.

    Raises `ValueError` for a rank or exchange that is not in the events, and `RuntimeError` naming the agent where the
    walk cannot go back: an agent that nothing started, or a join that ends before its source acted.
    """
    begin_ns = _end_ns(events, rank, first_exchange)
    end_ns = _end_ns(events, rank, last_exchange)
    segments: list[Segment] = []
    for agent, phase, start_ns, stop_ns in _walk(events, _last_agent(events, rank, last_exchange), begin_ns, end_ns):
        start_ns = max(start_ns, begin_ns)
        if start_ns < stop_ns:
            launch = events.agents[agent].launch
            segments.append(Segment(events.launches[launch].rank, launch, agent, phase, start_ns, stop_ns))
    return segments[::-1]


def _end_ns(events: Events, rank: int, exchange: int) -> float:
    if not 0 <= rank < len(events.ends_ns):
        raise ValueError(f"rank {rank} is not one of the {len(events.ends_ns)} ranks of the events")
    if not 0 <= exchange < len(events.ends_ns[rank]):
        raise ValueError(f"exchange {exchange} is not one of the {len(events.ends_ns[rank])} that rank {rank} ended")
    return events.ends_ns[rank][exchange]


def _last_agent(events: Events, rank: int, exchange: int) -> int:
    """The agent that ended last in the last launch of `exchange` on `rank` that has agents."""
    mine = {i for i, launch in enumerate(events.launches) if launch.rank == rank and launch.exchange == exchange}
    last = max(
        (i for i, agent in enumerate(events.agents) if agent.launch in mine),
        key=lambda i: (events.agents[i].launch, events.agents[i].end_ns),
        default=None,
    )
    if last is None:
        raise ValueError(f"exchange {exchange} of rank {rank} has no agents")
    return last


def _walk(events: Events, agent: int, begin_ns: float, now_ns: float) -> Iterator[tuple[int, int, float, float]]:
    """(agent, phase, start_ns, end_ns) from `now_ns` back to `begin_ns` or beyond; contiguous, latest first."""
    timeline = Timeline(events)
    left: dict[int, int] = {}
    while now_ns > begin_ns:
        joins = timeline.joins[agent]
        at = bisect_right(joins, now_ns, hi=left.get(agent, len(joins)), key=lambda join: join.time_ns) - 1
        if at < 0 and events.agents[agent].start_ns > begin_ns:
            raise RuntimeError(
                f"the critical path ends at {timeline.describe(agent)}: no join says what it followed at or before "
                f"{now_ns} ns"
            )
        join_ns = max(begin_ns, joins[at].time_ns) if at >= 0 else begin_ns
        for phase, start_ns, end_ns in timeline.back(agent, join_ns, now_ns):
            yield agent, phase, start_ns, end_ns
        if join_ns <= begin_ns:
            return
        join, left[agent] = joins[at], at
        if join.source == -1:
            yield agent, GAP, begin_ns, join_ns
            return
        if join.source_ns > join_ns:
            raise RuntimeError(
                f"the critical path does not go back at {timeline.describe(agent)}: its {join.kind!r} join at "
                f"{join_ns} ns follows what agent {join.source} did only at {join.source_ns} ns"
            )
        phase = GAP if join.kind in BETWEEN_KERNELS else timeline.phase_until(agent, join_ns)
        yield agent, phase, join.source_ns, join_ns
        agent, now_ns = join.source, join.source_ns


def round_trip_us(events: Events, topology: Topology) -> tuple[float, int]:
    """(microseconds, rank): the round trip of the slowest Attention rank, the lowest such rank on a tie.

    With exchanges 0..K a rank's round trip is (end of exchange K - end of exchange 0) / K on its own stream. Raises
    `ValueError` with fewer than two exchanges.
    """
    return max(((_mean_us(events, rank), rank) for rank in topology.attention), key=lambda found: (found[0], -found[1]))


def _mean_us(events: Events, rank: int) -> float:
    last = len(events.ends_ns[rank]) - 1 if 0 <= rank < len(events.ends_ns) else 0
    if last < 1:
        raise ValueError(f"a round trip needs at least 2 exchanges, rank {rank} ended {last + 1}")
    return (events.ends_ns[rank][last] - events.ends_ns[rank][0]) / last / 1e3


def phase_costs_us(events: Events, rank: int) -> dict[str, float]:
    """Mean microseconds per exchange on `rank`'s critical path, by phase name: every phase, in enumeration order.

    The path runs from the end of exchange 0 to the end of the last one, so the costs sum to the rank's round trip.
    Raises what `round_trip_us` and `critical_path` raise.
    """
    _mean_us(events, rank)
    last = len(events.ends_ns[rank]) - 1
    lengths_ns: dict[int, list[float]] = {phase: [] for phase in range(len(NAMES))}
    for segment in critical_path(events, rank, 0, last):
        lengths_ns[segment.phase].append(segment.end_ns - segment.start_ns)
    return {NAMES[phase]: math.fsum(lengths) / last / 1e3 for phase, lengths in lengths_ns.items()}


def phase_table(costs_by_column: Mapping[str, Mapping[str, float]]) -> str:
    """Phase costs in microseconds as aligned text: a row per phase, a column per key, the column's total last.

    Rows come in enumeration order, unknown names behind them; one that is 0 in every column is left out.
    """
    names = dict.fromkeys([*NAMES, *(name for costs in costs_by_column.values() for name in costs)])
    rows = [["phase (us)", *costs_by_column]]
    for name in names:
        values = [costs.get(name, 0.0) for costs in costs_by_column.values()]
        if any(values):
            rows.append([name, *(f"{value:.2f}" for value in values)])
    rows.append(["total", *(f"{math.fsum(costs.values()):.2f}" for costs in costs_by_column.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def digest(run: Run) -> str:
    """SHA-256 (hex) over everything in the run's events, its combined outputs and its final words.

    Equal for equal runs, in any process, whatever order their counters and outputs were filled in. What FFN ranks
    received is kept only where it was asked for, so it does not count.
    """
    whole = hashlib.sha256()
    for line in _lines(run.events):
        whole.update(line.encode() + b"\n")
    for n, outputs in enumerate(run.combined):
        whole.update(f"exchange {n} {len(outputs)}\n".encode())
        for rank in sorted(outputs):
            whole.update(f"combined {n} {rank} ".encode() + _array(outputs[rank]))
    for rank, words in enumerate(run.words):
        whole.update(f"words {rank} ".encode() + _array(words))
    return whole.hexdigest()


def _lines(events: Events) -> Iterator[str]:
    yield from _rows("launch", LaunchEvent._fields, events.launches)
    yield from _rows("agent", AgentEvent._fields, events.agents)
    yield from _rows("mark", Mark._fields, events.marks)
    yield from _rows("join", Join._fields, events.joins)
    for ends_ns in events.ends_ns:
        yield "ends " + " ".join(_text("end_ns", end_ns) for end_ns in ends_ns)
    for counters in events.counters:
        yield "counters " + " ".join(f"{name!r} {int(counters[name])}" for name in sorted(counters))


def _rows(kind: str, fields: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Iterator[str]:
    for row in rows:
        yield f"{kind} " + " ".join(map(_text, fields, row))


def _text(field: str, value: Any) -> str:
    if field.endswith("_ns"):
        return (float(value) + 0.0).hex()
    return repr(value) if isinstance(value, str) else str(int(value))


def _array(array: NDArray[Any]) -> bytes:
    return f"{array.dtype.str} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes() + b"\n"


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that `path` holds its old content or all of the new one, never a part of it.

    The content goes to a temporary file in the same directory, which then replaces `path`. Raises `OSError`.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
