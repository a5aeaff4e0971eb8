"""Rows on a GPU: one staged row per warp, bulk loads behind an mbarrier, bulk stores in bulk groups.

A stage is the shared address of its row; its mbarrier lies `MBARRIER_BYTES` before it, so that no operation has to know
how long a row is. Bulk groups belong to the thread that committed them (PTX
"cp.async.bulk.wait_group"), so every lane waits for its own and a warp synchronisation joins them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int64

from afdep_sim.kernels.cuda import intrinsics as ptx
from afdep_sim.kernels.cuda.words import device, lane, peer
from afdep_sim.plan import MBARRIER_BYTES


@cache
def make_loads(packs: bool) -> dict[str, Any]:
    """row_load; packs: rows carry scale packs, which are read from the stage by ordinary loads."""

    @device
    def row_load(stage, source, size):
        if lane() == 0:
            if packs:
                # Lanes may have read packs of the row before; the bulk write comes after those reads.
                ptx.proxy_fence()
            ptx.mbarrier_arrive_expect(stage - MBARRIER_BYTES, size)
            ptx.bulk_load(stage, source, size, stage - MBARRIER_BYTES)

    return {"row_load": row_load}


@device
def row_wait(stage, parity):
    # Local memory only, so it needs no watchdog. Every lane acquires what the bulk engine wrote.
    while ptx.mbarrier_test(stage - MBARRIER_BYTES, parity) == 0:
        pass
    return parity ^ 1


@device
def stage(index, row_bytes):
    end = ptx.shared_base() + ptx.dynamic_shared_bytes()
    row = end - (index + 1) * (row_bytes + MBARRIER_BYTES) + MBARRIER_BYTES
    if lane() == 0:
        ptx.mbarrier_init(row - MBARRIER_BYTES, 1)
        # The bulk engine completes transactions on it: initialised before that, for the async proxy too.
        ptx.mbarrier_init_fence()
        ptx.proxy_fence()
    cuda.syncwarp()
    return row


@device
def row_load_packs(stage, offset, source, count):
    # 4-byte copies: packs need not be a multiple of the 16 bytes of a bulk copy. Ordinary stores to the stage, which
    # the text's fence covers together with the metadata.
    for p in range(lane(), count, 32):
        ptx.store_shared(stage + offset + 4 * p, ptx.load_i32(source + 4 * p))


@device
def stage_i32(stage, offset, value):
    if lane() == 0:
        ptx.store_shared(stage + offset, value)


@device
def stage_fence():
    # Each lane's stores before its fence; the synchronisation, so that any lane may start the bulk store.
    ptx.proxy_fence()
    cuda.syncwarp()


@device
def row_store(stage, size, destination):
    if lane() == 0:
        ptx.bulk_store(destination, stage, size)
        ptx.bulk_commit()


@device
def row_store_peers(ctx, stage, size, ranks, offset, slots):
    if ranks >= 0:
        ptx.bulk_store(peer(ctx, ranks) + offset + slots * size, stage, size)
        ptx.bulk_commit()


@device
def row_scatter(stage, size, base, slots):
    if slots >= 0:
        ptx.bulk_store(base + slots * size, stage, size)
        ptx.bulk_commit()


@device
def packs_scatter(stage, offset, count, base, slots, pack_stride):
    if slots >= 0:
        for p in range(count):
            ptx.store_i32(base + 4 * slots + p * pack_stride, ptx.load_shared(stage + offset + 4 * p))


@device
def packs_store(stage, offset, count, destination, pack_stride):
    for p in range(lane(), count, 32):
        ptx.store_i32(destination + p * pack_stride, ptx.load_shared(stage + offset + 4 * p))


@device
def clear_row(address, size):
    for at in range(16 * lane(), size, 512):
        ptx.store_zeros_16(address + at)


@device
def stores_wait():
    # Not `.read`: complete means readable at the destination, which the release that follows speaks for.
    ptx.bulk_wait_all()
    cuda.syncwarp()


@device
def row_address(base, slots, stride, left):
    """-> the address of the row that the lowest lane in `left` names; lane 0's where none is left.

    Slots and strides are below 2^32, their product need not be.
    """
    return ptx.multiply_add(ptx.shuffle(slots, ptx.lowest_bit(left)), stride, base)


@device
def rows_named(slots):
    """-> lanes, as bits, that name a row."""
    return ptx.ballot(int64(slots >= 0))
