"""Lane values on a GPU: one int64 per lane, -1 on lanes from the count on. Only 32 bits of them ever leave a lane."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import int64

from afdep_sim.kernels.cuda import context as cx
from afdep_sim.kernels.cuda import intrinsics as ptx
from afdep_sim.kernels.cuda.words import device, lane, record_error

ROUTE = cx.ROUTE


@device
def load_lanes(address, count):
    value = int64(-1)
    if lane() < count:
        value = ptx.load_i32(address + 4 * lane())
    return value


@device
def load_ids(address, count):
    value = int64(-1)
    if lane() < count:
        value = ptx.load(address + 8 * lane())
    return value


@device
def wrong_lanes(expert, experts):
    """-> lanes, as bits, that name no expert or one that a lower lane has."""
    wrong = expert < -1 or expert >= experts
    same = ptx.match(expert)
    if expert >= 0 and same & ((1 << lane()) - 1) != 0:
        wrong = True
    return ptx.ballot(int64(wrong))


@device
def record_route(ctx, wrong, expert, token, experts):
    if lane() == ptx.lowest_bit(wrong):
        record_error(ctx, ROUTE, token, lane(), expert, experts)


@device
def check_lanes(ctx, expert, token, experts):
    wrong = wrong_lanes(expert, experts)
    if wrong != 0:
        record_route(ctx, wrong, expert, token, experts)
        # The warp ends here and indexes nothing by what it read; barriers count warps that have ended as arrived.
        ptx.thread_exit()


@device
def lanes_scatter(base, index, lanes):
    if index >= 0:
        ptx.store_i32(base + 4 * index, lanes)


@device
def lanes_divide(lanes, divisor):
    return ptx.divide_u32(lanes, divisor) if lanes >= 0 else int64(-1)


@device
def lanes_master(lanes):
    highest = ptx.highest_bit(ptx.match(lanes))
    return highest if lanes >= 0 else int64(-1)


@device
def lanes_owner(expert, experts):
    rank = lanes_divide(expert, experts)
    return rank if lanes_master(rank) == lane() else int64(-1)


@device
def lanes_index(lanes):
    return lane() if lanes >= 0 else int64(-1)


@device
def lanes_gather(base, index, stride):
    value = int64(0)
    if index >= 0:
        value = ptx.load_i32(base + index * stride + 4 * lane())
    return value


@device
def lanes_in_range(lanes, low, count):
    value = lanes - low
    return value if value >= 0 and value < count else int64(-1)


@device
def lanes_offset(lanes, offset):
    return lanes + offset if lanes >= 0 else int64(-1)


@device
def lanes_highest(lanes):
    return ptx.highest_bit(ptx.ballot(int64(lanes >= 0)))


@device
def lanes_count(lanes):
    return ptx.population(ptx.ballot(int64(lanes >= 0)))


@device
def lanes_max(lanes):
    return ptx.maximum(lanes)


@device
def lanes_fetch_add(address, index):
    before = int64(-1)
    if index >= 0:
        before = ptx.fetch_add_relaxed_gpu(address + 8 * index, 1)
    return before


@device
def find_row(psum_rank, ranks, bucket, row):
    found = int64(-1)
    start = int64(0)
    for first in range(0, ranks, 32):
        end = int64(0)
        if first + lane() < ranks:
            end = ptx.load(psum_rank + 8 * (first + lane()))
        beyond = ptx.ballot(int64(row < end))
        if found < 0:
            if beyond != 0:
                at = ptx.lowest_bit(beyond)
                if at > 0:
                    start = ptx.shuffle(end, at - 1)
                found = (first + at) * bucket + row - start
            else:
                start = ptx.shuffle(end, 31)
    return found


@cache
def make_sized(topk: int) -> dict[str, Any]:
    """The operations on exactly `topk` lanes."""

    @device
    def store_lanes(address, lanes):
        if lane() < topk:
            ptx.store_i32(address + 4 * lane(), lanes)

    @device
    def store_lanes_peer(address, lanes):
        if lane() < topk:
            ptx.store_i32_relaxed_sys(address + 4 * lane(), lanes)

    @device
    def stage_lanes(stage, offset, lanes):
        if lane() < topk:
            ptx.store_shared(stage + offset + 4 * lane(), lanes)

    return {"store_lanes": store_lanes, "store_lanes_peer": store_lanes_peer, "stage_lanes": stage_lanes}
