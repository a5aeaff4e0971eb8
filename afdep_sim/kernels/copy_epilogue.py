"""Dispatch copy epilogue: received rows -> one slot per local expert, or one row each (upstream section 4)."""

from afdep_sim.kernels import phases as ph


def make_copy_epilogue(ops, c):
    """-> kernel. Row i of all received rows goes to warp (warp x blocks + block).

    Expanded: the lanes' local experts draw slots, and psum_expert turns from each expert's start into its start plus
    its real count. Otherwise the row becomes row i, with its lanes' local experts and weights beside it. Metadata row
    i: source id | source rank x k + master lane | expanded slot per lane, or -1.
    """
    topk = c.topk
    data = c.data_bytes
    packs = c.packs
    row_bytes = c.dispatch_row_bytes
    inbox = c.inbox
    expanded = c.expanded
    experts_at = c.metadata_offset
    weights_at = experts_at + 4 * topk
    source_at = experts_at + 8 * topk
    metadata_bytes = 4 * (2 + topk)

    def kernel(
        ctx,
        window,
        rank,
        ranks,
        experts,
        bucket,
        first_region,
        psum_rank,
        psum_expert,
        metadata,
        received_x,
        received_scales,
        pack_stride,
        received_topk,
        received_weights,
    ):
        block = ops.block_id()
        warp = ops.warp_id()
        blocks = ops.blocks()
        ops.phase(ctx, ph.COPY_START)
        # Launched early by its primary's trigger; only the primary's completion says that the rows have arrived.
        ops.wait_dependencies(ctx)
        ops.phase(ctx, ph.COPY_ROWS)
        rows = ops.load_relaxed(psum_rank + 8 * (ranks - 1))
        stage = ops.stage(warp, row_bytes)
        parity = 0
        for i in range(warp * blocks + block, rows, ops.warps() * blocks):
            at = ops.find_row(psum_rank, ranks, bucket, i)
            row = window + inbox + (at - first_region * bucket) * row_bytes
            ops.stores_wait()
            ops.row_load(stage, row, row_bytes)
            local = ops.lanes_in_range(ops.load_lanes(row + experts_at, topk), rank * experts, experts)
            weights = ops.load_lanes(row + weights_at, topk)
            if expanded:
                slot = ops.lanes_fetch_add(psum_expert, local)
                parity = ops.row_wait(stage, parity)
                ops.row_scatter(stage, data, received_x, slot)
                if packs > 0:
                    ops.packs_scatter(stage, data, packs, received_scales, slot, pack_stride)
                ops.lanes_scatter(received_weights, slot, weights)
                ops.store_lanes(metadata + metadata_bytes * i + 8, slot)
            else:
                parity = ops.row_wait(stage, parity)
                ops.row_store(stage, data, received_x + data * i)
                if packs > 0:
                    ops.packs_store(stage, data, packs, received_scales + 4 * i, pack_stride)
                ops.store_lanes(received_topk + 4 * topk * i, local)
                ops.store_lanes(received_weights + 4 * topk * i, weights)
            ops.store_i32(metadata + metadata_bytes * i, ops.load_i32(row + source_at))
            ops.store_i32(metadata + metadata_bytes * i + 4, (at // bucket) * topk + ops.lanes_highest(local))
        ops.stores_wait()

    return kernel
