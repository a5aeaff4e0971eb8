"""Dispatch copy epilogue, expanded layout: received rows -> one slot per local expert (upstream section 4)."""

from afdep_sim.kernels import phases as ph


def make_copy_epilogue(ops, c):
    """-> kernel. Row i of all received rows goes to warp (warp x blocks + block); its lanes' local experts draw slots.

    Metadata row i: source id | source rank x k + master lane | expanded slot per lane, or -1. psum_expert turns from
    each expert's start into its start plus its real count.
    """
    topk = c.topk
    hidden = c.hidden_bytes
    row_bytes = c.dispatch_row_bytes
    inbox = c.inbox
    weights_at = hidden + 4 * topk
    source_at = hidden + 8 * topk
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
            local = ops.lanes_in_range(ops.load_lanes(row + hidden, topk), rank * experts, experts)
            slot = ops.lanes_fetch_add(psum_expert, local)
            parity = ops.row_wait(stage, parity)
            ops.row_scatter(stage, hidden, received_x, slot)
            ops.lanes_scatter(received_weights, slot, ops.load_lanes(row + weights_at, topk))
            ops.store_i32(metadata + metadata_bytes * i, ops.load_i32(row + source_at))
            ops.store_i32(metadata + metadata_bytes * i + 4, (at // bucket) * topk + ops.lanes_highest(local))
            ops.store_lanes(metadata + metadata_bytes * i + 8, slot)
        ops.stores_wait()

    return kernel
