"""Who, marks, synchronisation, words and waits on a GPU.

The notify group's four warps run the text side by side under their own warp numbers; what an agent does once is
guarded by `warp == 0` in the text or done by the group's 128 threads together.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int64

from afdep_sim.kernels import phases as ph
from afdep_sim.kernels.cuda import context as cx
from afdep_sim.kernels.cuda import intrinsics as ptx

POLLS_PER_LOOK = 255
"""A wait looks at the clock and the error record once in this many polls plus one: a mask."""
PHASES = len(ph.NAMES)
ERROR, LIMIT_NS, TRACE, PEERS = cx.ERROR, cx.LIMIT_NS, cx.TRACE, cx.PEERS
TIMEOUT, TRACE_WARPS = cx.TIMEOUT, cx.TRACE_WARPS


def device(function: Any) -> Any:
    return cuda.jit(device=True)(function)


# ---- who -------------------------------------------------------------------------------------------------------------


@device
def lane():
    return int64(cuda.threadIdx.x) & 31


@device
def group_thread():
    """Of the notify group: 0 to 127."""
    return int64(cuda.threadIdx.x)


@device
def block_id():
    return int64(cuda.blockIdx.x)


@device
def warp_id():
    return int64(cuda.threadIdx.x) >> 5


@device
def blocks():
    return int64(cuda.gridDim.x)


@device
def warps():
    return int64(cuda.blockDim.x) >> 5


# ---- launch dependencies ---------------------------------------------------------------------------------------------


@device
def launch_dependents():
    ptx.dependents_launch()


@device
def wait_dependencies(ctx):
    # The primary's rows were written by bulk stores and peers; the bulk engine of this warp reads them next.
    ptx.dependencies_wait()
    ptx.proxy_fence()


# ---- words -----------------------------------------------------------------------------------------------------------


@device
def load_relaxed(address):
    value = int64(0)
    if lane() == 0:
        value = ptx.load_relaxed_gpu(address)
    return ptx.broadcast(value)


@device
def store_relaxed(address, value):
    # Every lane's accesses before, then the store: a warp synchronisation orders memory among its lanes.
    cuda.syncwarp()
    if lane() == 0:
        ptx.store_relaxed_gpu(address, value)


@device
def clear_words(address, count):
    for i in range(lane(), count, 32):
        ptx.store_relaxed_gpu(address + 8 * i, 0)


@device
def fetch_add_acq_rel(address, value):
    cuda.syncwarp()
    before = int64(0)
    if lane() == 0:
        before = ptx.fetch_add_acq_rel_gpu(address, value)
    before = ptx.broadcast(before)
    # Lane 0 acquired; the others' accesses come after it only because of this.
    cuda.syncwarp()
    return before


@device
def peer(ctx, rank):
    return ptx.load(ctx + PEERS + 8 * rank)


@device
def add_release_each(ctx, first, count, offset, value):
    # A release covers its own thread's past; the synchronisation adds the past of the warp's other lanes.
    cuda.syncwarp()
    for i in range(lane(), count, 32):
        ptx.add_release_sys(peer(ctx, first + i) + offset, value)
    cuda.syncwarp()


@device
def load_i32(address):
    return ptx.load_i32(address)


@device
def store_i32(address, value):
    if lane() == 0:
        ptx.store_i32(address, value)


# ---- the watchdog ----------------------------------------------------------------------------------------------------


@device
def record_error(ctx, kind, what, where, seen, wanted):
    """Fill the error record, unless another thread was first."""
    record = ptx.load(ctx + ERROR)
    if ptx.compare_swap_relaxed_sys(record, 0, kind) == 0:
        ptx.store_relaxed_sys(record + 8, what)
        ptx.store_relaxed_sys(record + 16, where)
        ptx.store_relaxed_sys(record + 24, seen)
        ptx.store_relaxed_sys(record + 32, wanted)
        ptx.store_relaxed_sys(record + 40, int64(cuda.blockIdx.x))
        ptx.store_relaxed_sys(record + 48, int64(cuda.threadIdx.x))
        ptx.store_relaxed_sys(record + 56, ctx)


@device
def give_up(ctx, since, p, address, seen, wanted):
    """Whether a wait must end without what it waits for: its time is over, or something else went wrong before."""
    if ptx.load_volatile(ptx.load(ctx + ERROR)) != 0:
        return True
    if ptx.global_timer() - since > ptx.load(ctx + LIMIT_NS):
        record_error(ctx, TIMEOUT, p, address, seen, wanted)
        return True
    return False


def _poll(load: Any, holds: Any) -> Any:
    """-> poll(ctx, address, wanted, p): one thread loads until holds(value, wanted) or the watchdog bites."""

    @device
    def poll(ctx, address, wanted, p):
        seen = load(address)
        if not holds(seen, wanted):
            since = ptx.global_timer()
            polls = int64(0)
            while not holds(seen, wanted):
                polls += 1
                if polls & POLLS_PER_LOOK == 0:
                    if give_up(ctx, since, p, address, seen, wanted):
                        break
                seen = load(address)
        return seen

    return poll


@device
def _at_least(seen, wanted):
    return seen >= wanted


@device
def _equal(seen, wanted):
    return seen == wanted


@device
def _not_zero(seen, wanted):
    return seen != 0


@device
def _high_half_equal(seen, wanted):
    return (seen >> 32) == wanted


poll_ge_sys = _poll(ptx.load_acquire_sys, _at_least)
poll_eq_sys = _poll(ptx.load_acquire_sys, _equal)
poll_ge_gpu = _poll(ptx.load_acquire_gpu, _at_least)
poll_set = _poll(ptx.load_volatile, _not_zero)
"""For words that are their own flag: volatile is a relaxed load that the compiler repeats."""
poll_high = _poll(ptx.load_volatile, _high_half_equal)


# ---- marks, and the waits that open a phase --------------------------------------------------------------------------


@cache
def make_marked(trace: bool) -> dict[str, Any]:
    """The operations that open a phase. Without trace a mark is no code at all."""
    if trace:

        @device
        def phase(ctx, p):
            if lane() == 0:
                warp = int64(cuda.blockIdx.x) * TRACE_WARPS + (int64(cuda.threadIdx.x) >> 5)
                # The smallest time stays: a phase that is opened again goes on. No answer is awaited.
                ptx.min_relaxed_gpu(ptx.load(ctx + TRACE) + 8 * (warp * PHASES + p), ptx.global_timer())

    else:

        @device
        def phase(ctx, p):
            pass

    @device
    def block_sync(ctx, p):
        phase(ctx, p)
        cuda.syncthreads()

    @device
    def grid_sync(ctx, word, p):
        phase(ctx, p)
        # Causality is transitive: a block's warps -(barrier)-> its first thread -(acq_rel, gpu)-> every other block.
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            grid = int64(cuda.gridDim.x)
            before = ptx.fetch_add_acq_rel_gpu(word, 1)
            poll_ge_gpu(ctx, word, (before // grid + 1) * grid, p)
        cuda.syncthreads()

    @device
    def wait_each_ge(ctx, address, count, value, p):
        phase(ctx, p)
        for i in range(lane(), count, 32):
            poll_ge_sys(ctx, address + 8 * i, value, p)
        cuda.syncwarp()

    @device
    def wait_eq(ctx, address, value, p):
        phase(ctx, p)
        if lane() == 0:
            poll_eq_sys(ctx, address, value, p)
        cuda.syncwarp()

    return {
        "phase": phase,
        "block_sync": block_sync,
        "grid_sync": grid_sync,
        "wait_each_ge": wait_each_ge,
        "wait_eq": wait_eq,
    }
