"""Counts on a GPU: the notify group's 128 threads as one agent, its int32 counters at the start of shared memory.

Thread t of the group handles words t, t + 128, ... in every operation, so a word is read and cleared by one thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import int64

from afdep_sim.kernels.cuda import intrinsics as ptx
from afdep_sim.kernels.cuda.lanes import lanes_divide, lanes_master, load_ids, record_route, wrong_lanes
from afdep_sim.kernels.cuda.words import (
    block_id,
    blocks,
    device,
    group_thread,
    lane,
    make_marked,
    peer,
    poll_high,
    poll_set,
    warp_id,
)

ARRIVED = 1 << 32
"""High half of a reduction word: how many blocks have added to it (upstream section 3.1)."""
LOW_HALF = 0x7FFFFFFF


@device
def group_sync():
    ptx.group_barrier()


@device
def check_routes(ctx, routes, topk, tokens, experts):
    failed = int64(0)
    for token in range(warp_id() * blocks() + block_id(), tokens, 4 * blocks()):
        expert = load_ids(routes + 8 * topk * token, topk)
        wrong = wrong_lanes(expert, experts)
        if wrong != 0:
            record_route(ctx, wrong, expert, token, experts)
            failed = int64(1)
    # The whole group ends, as one agent would: a warp alone would leave the others at their next named barrier.
    if ptx.group_any(failed) != 0:
        ptx.thread_exit()


@device
def count_routes(routes, topk, tokens, receivers, experts):
    counters = ptx.shared_base()
    for i in range(group_thread(), receivers * (1 + experts), 128):
        ptx.store_shared(counters + 4 * i, 0)
    ptx.group_barrier()
    for token in range(warp_id() * blocks() + block_id(), tokens, 4 * blocks()):
        expert = load_ids(routes + 8 * topk * token, topk)
        rank = lanes_divide(expert, experts)
        master = lanes_master(rank)
        if expert >= 0:
            ptx.add_shared(counters + 4 * (receivers + expert), 1)
            if master == lane():
                ptx.add_shared(counters + 4 * rank, 1)
    ptx.group_barrier()


@device
def counts_add(address, count):
    counters = ptx.shared_base()
    for i in range(group_thread(), count, 128):
        ptx.add_relaxed_gpu(address + 8 * i, ptx.load_shared(counters + 4 * i) + ARRIVED)


@device
def counts_clear(address, count):
    # System scope: peers write some of these words in the next exchange.
    for i in range(group_thread(), count, 128):
        ptx.store_relaxed_sys(address + 8 * i, 0)


@device
def publish_counts(ctx, receivers, experts, rank_offset, expert_offset):
    counters = ptx.shared_base()
    for i in range(group_thread(), receivers * (1 + experts), 128):
        word = -ptx.load_shared(counters + 4 * i) - 1
        if i < receivers:
            ptx.store_relaxed_sys(peer(ctx, i) + rank_offset, word)
        else:
            rank = ptx.divide_u32(i - receivers, experts)
            expert = i - receivers - rank * experts
            ptx.store_relaxed_sys(peer(ctx, rank) + expert_offset + 8 * expert, word)


@device
def inclusive_scan(value):
    """-> per lane the sum of the values up to its own."""
    for step in (1, 2, 4, 8, 16):
        below = ptx.shuffle_up(value, step)
        if lane() >= step:
            value += below
    return value


@device
def aligned_rows(expert, sources, experts, alignment):
    """-> rows of a local expert over all sources, rounded up to the alignment."""
    counters = ptx.shared_base()
    rows = int64(0)
    for source in range(sources):
        rows += ptx.load_shared(counters + 4 * (sources + source * experts + expert))
    return ptx.divide_u32(rows + alignment - 1, alignment) * alignment


@device
def prefix_counts(psum_rank, psum_expert, ranks, first, experts, alignment):
    counters = ptx.shared_base()
    carry = int64(0)
    if warp_id() == 0:
        for start in range(0, ranks, 32):
            rank = start + lane()
            rows = int64(0)
            if rank >= first and rank < ranks:
                rows = ptx.load_shared(counters + 4 * (rank - first))
            total = inclusive_scan(rows) + carry
            if rank < ranks:
                ptx.store_relaxed_gpu(psum_rank + 8 * rank, total)
            carry = ptx.shuffle(total, 31)
    elif warp_id() == 1:
        for start in range(0, experts, 32):
            expert = start + lane()
            rows = int64(0)
            if expert < experts:
                rows = aligned_rows(expert, ranks - first, experts, alignment)
            total = inclusive_scan(rows) + carry
            if expert < experts:
                ptx.store_relaxed_gpu(psum_expert + 8 * expert, total - rows)
            carry = ptx.shuffle(total, 31)
        if lane() == 0:
            ptx.store_relaxed_gpu(psum_expert + 8 * experts, carry)


@device
def store_host_counts(host, ranks, first, experts, alignment):
    counters = ptx.shared_base()
    for i in range(group_thread(), ranks + experts, 128):
        rows = int64(0)
        if i >= ranks:
            rows = aligned_rows(i - ranks, ranks - first, experts, alignment)
        elif i >= first:
            rows = ptx.load_shared(counters + 4 * (i - first))
        # The host polls these words, so their scope is the system.
        ptx.store_relaxed_sys(host + 8 * i, -rows - 1)


@cache
def make_count_waits(trace: bool) -> dict[str, Any]:
    phase = make_marked(trace)["phase"]

    @device
    def wait_counts_reduced(ctx, address, count, p):
        phase(ctx, p)
        counters = ptx.shared_base()
        for i in range(group_thread(), count, 128):
            word = poll_high(ctx, address + 8 * i, blocks(), p)
            ptx.store_shared(counters + 4 * i, word & LOW_HALF)

    @device
    def wait_counts(ctx, address, count, at, p):
        phase(ctx, p)
        counters = ptx.shared_base()
        for i in range(group_thread(), count, 128):
            word = poll_set(ctx, address + 8 * i, p, p)
            # A wait that was given up has seen 0, which is no count: no rows then, so that nothing is indexed by it.
            ptx.store_shared(counters + 4 * (at + i), max(-word - 1, int64(0)))

    return {"wait_counts_reduced": wait_counts_reduced, "wait_counts": wait_counts}
