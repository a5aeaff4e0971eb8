"""What every machine returns: outputs, events and words of one run (the face shared by the model and the GPU side).

`machine.run(plan, inputs) -> Run`. The events are raw, in the order they happened on the machine; `trace.py` makes
spans, phase costs and pictures of them. All times are nanoseconds since the run's start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class LaunchEvent(NamedTuple):
    """One kernel launch of one rank's stream, from its first block's first instruction to its last block's exit."""

    rank: int
    exchange: int
    kernel: str
    grid: int
    warps: int
    start_ns: float
    end_ns: float


class AgentEvent(NamedTuple):
    """One agent: a warp (or a group acting as one) that ran the text. `launch` indexes `Events.launches`."""

    launch: int
    block: int
    warp: int
    label: str
    """Warp class: what the plan calls this warp ('notify', 'payload', 'rows' or 'collect')."""
    start_ns: float
    end_ns: float


class Mark(NamedTuple):
    """Agent `agent` entered `phase` (an integer of `kernels.phases`) at `time_ns`, until its next mark or its end."""

    agent: int
    phase: int
    time_ns: float


class Join(NamedTuple):
    """Agent `agent` had to wait until `time_ns` for something that `source` did at `source_ns`.

    kind: 'signal' (a word another agent wrote), 'block' or 'grid' (the last to arrive at a synchronisation),
    'primary' (the programmatic primary's last agent), 'stream' (the previous launch's last agent; this is the
    agent's start). `source` is an index into `Events.agents`, -1 where nothing came before.
    """

    agent: int
    time_ns: float
    kind: str
    source: int
    source_ns: float


@dataclass
class Events:
    """Everything that happened, as flat lists. `ends_ns[rank][n]` is the end of exchange n on that rank's stream."""

    launches: list[LaunchEvent] = field(default_factory=list)
    agents: list[AgentEvent] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    ends_ns: list[list[float]] = field(default_factory=list)
    counters: list[dict[str, int]] = field(default_factory=list)
    """Per rank: protocol events by name (barriers, count_words, signals, rows, bytes_out, bytes_in, kernels)."""


@dataclass
class Received:
    """What an FFN rank held between its copy epilogue and its combine (upstream section 4).

    psum_rank: int64 [R] inclusive rows per source; psum_expert: int64 [El + 1], start (plus real count, if expanded)
    per local expert, then the total of aligned sizes; metadata: int32 [n, 2 + k]. x: uint16 [rows, H] BF16, or uint8
    [rows, H] E4M3 with int32 [rows, packs] scales. Expanded: rows are slots up to psum_expert's total, and weights are
    float32 [rows]. Otherwise: rows are the n received rows, weights float32 [n, k], topk int32 [n, k] local experts
    (-1 elsewhere). host_counts: int64 [R + El] as the host sees them, where the workload asks for them.
    """

    psum_rank: np.ndarray
    psum_expert: np.ndarray
    metadata: np.ndarray
    x: np.ndarray
    weights: np.ndarray
    scales: np.ndarray | None = None
    topk: np.ndarray | None = None
    host_counts: np.ndarray | None = None


@dataclass
class Run:
    """Outputs, events and final words of one run.

    combined[n][rank]: uint16 [T, H] BF16 bit patterns of exchange n on each Attention rank (empty without data);
    combined_weights[n][rank]: float32 [T, k], where weights travel back; received[n][rank]: what each FFN rank
    received, where it was asked for; words[rank]: int64, the workspace at the end.
    """

    combined: list[dict[int, np.ndarray]]
    received: list[dict[int, Received]]
    events: Events
    words: list[np.ndarray]
    combined_weights: list[dict[int, np.ndarray]] = field(default_factory=list)
    engine_events: int = 0
    """Events of the model's engine: what the run cost, not what happened in it."""
