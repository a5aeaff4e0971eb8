"""The context block of a rank and the error record it points to: what a launch hands the text as `ctx`.

Plain numbers, so that the host side may read them without Numba.
"""

ERROR = 0
"""Byte offset of the word that holds the error record's address."""
LIMIT_NS = 8
"""How long a wait may last; %globaltimer counts in nanoseconds, in steps of up to a microsecond."""
TRACE = 16
"""Address of the trace buffer; not read unless the kernels are built with trace."""
PEERS = 24
"""One word per rank from here on: the address of its window in this process."""

RECORD = ("kind", "what", "where", "seen", "wanted", "block", "thread", "context")
"""Words of the error record, int64, all 0 until something goes wrong; the first thread to claim `kind` fills it.

kind TIMEOUT: phase, word address, value seen, value wanted. kind ROUTE: token, lane, expert, experts there are.
`context` is the address of the context block, which tells the rank. Once `kind` is set every wait returns.
"""
NOTHING, TIMEOUT, ROUTE = 0, 1, 2

TRACE_WARPS = 32
"""Trace buffer: int64 [blocks, TRACE_WARPS, phases] of the first time (ns) each warp opened each phase.

The host fills it with TRACE_NEVER; phase 0, which no text opens, is the warp's end.
"""
TRACE_NEVER = (1 << 63) - 1


def context_words(error: int, limit_ns: int, trace: int, windows: list[int]) -> list[int]:
    """The context block of one rank as int64 values."""
    return [error, limit_ns, trace, *windows]
