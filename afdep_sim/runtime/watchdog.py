"""What a GPU's error record says, as one exception."""

from __future__ import annotations

from collections.abc import Sequence

from afdep_sim.kernels import phases as ph
from afdep_sim.kernels.cuda.context import NOTHING, ROUTE, TIMEOUT
from afdep_sim.window import WORD, WORD_OFFSETS, WORDS, WORKSPACE_BYTES


class GpuError(RuntimeError):
    """Something a kernel reported. Every wait ended at once, so the outputs mean nothing."""


class WaitTimeout(GpuError):
    """A wait lasted longer than the watchdog allows."""


class RouteError(GpuError):
    """A source's own check found a route that names no expert, or one twice."""


def word_name(offset: int) -> str:
    """'counts[3]' for a byte offset into the workspace, 'byte N of the arena' for one behind it."""
    if not 0 <= offset < WORKSPACE_BYTES:
        return f"byte {offset} of the arena"
    word = max((w for w in WORDS if WORD_OFFSETS[w.name] <= offset), key=lambda w: WORD_OFFSETS[w.name])
    return f"{word.name}[{(offset - WORD_OFFSETS[word.name]) // WORD}]"


def explain(
    record: Sequence[int], contexts: Sequence[int], windows: Sequence[int], arena_bytes: int, limit_ns: int
) -> GpuError | None:
    """The exception that a record (int64 words, see `kernels.cuda.context`) stands for; None where nothing happened.

    contexts and windows: each rank's context block and window as addresses; arena_bytes bounds a window.
    """
    kind, what, where, seen, wanted, block, thread, context = (int(word) for word in record)
    if kind == NOTHING:
        return None
    rank = contexts.index(context) if context in contexts else "?"
    who = f"rank {rank} block {block} warp {thread // 32}"
    if kind == ROUTE:
        return RouteError(f"{who}: token {what} lane {where} names expert {seen} of {wanted}, or one named before")
    if kind != TIMEOUT:
        return GpuError(f"{who}: error record {list(record)} of no known kind")
    phase = ph.NAMES[what] if 0 <= what < len(ph.NAMES) else f"phase {what}"
    place = f"address {where:#x}"
    for owner, window in enumerate(windows):
        if 0 <= where - window < arena_bytes:
            place = f"{word_name(where - window)} of rank {owner}"
    asked = str(wanted)
    if what == ph.DISPATCH_COUNT_WAIT:
        asked = "anything but 0"
    elif what == ph.DISPATCH_COUNT_REDUCE:
        asked = f"{wanted} blocks in its upper half ({seen >> 32} seen)"
    return WaitTimeout(f"{who}: over {limit_ns / 1e6:g} ms in {phase!r} for {place}: saw {seen}, wanted {asked}")
