"""Combine reduce epilogue: one row per FFN rank that holds the token -> the combined row (upstream section 6)."""

from afdep_sim.kernels import phases as ph


def make_reduce_epilogue(ops, c):
    """-> kernel. Token t goes to warp (warp x blocks + block); its owners, one lane each, name the inbox regions.

    The route list alone says which rows are read, so stale rows of earlier exchanges are never touched; a token
    without a valid route gets a row of zeros.
    """
    topk = c.topk
    hidden = c.hidden_bytes
    row_bytes = c.combine_row_bytes
    prefix = c.reduce_prefix
    inbox = c.inbox
    rank_layout = c.rank_layout
    combine_weights = c.combine_weights
    bias = c.bias
    weights_at = hidden + 4 * topk

    def kernel(ctx, window, experts, bucket, tokens, routes, combined_x, combined_weights, bias0, bias1):
        block = ops.block_id()
        warp = ops.warp_id()
        blocks = ops.blocks()
        ops.phase(ctx, ph.REDUCE_START)
        # As in the copy epilogue: early launch hides the launch only; completion of combine says the replies are in.
        ops.wait_dependencies(ctx)
        ops.phase(ctx, ph.REDUCE_ROWS)
        stage = ops.stage(warp, hidden)
        for token in range(warp * blocks + block, tokens, ops.warps() * blocks):
            expert = ops.load_ids(routes + 8 * topk * token, topk)
            owner = ops.lanes_owner(expert, experts)
            region = owner if rank_layout else ops.lanes_index(owner)
            row = window + inbox + token * row_bytes
            ops.stores_wait()
            if bias > 0:
                second = bias1 + hidden * token if bias > 1 else 0
                ops.row_reduce_bias(
                    stage, hidden, row, region, bucket * row_bytes, prefix, bias0 + hidden * token, second
                )
            else:
                ops.row_reduce(stage, hidden, row, region, bucket * row_bytes, prefix)
            ops.stage_fence()
            ops.row_store(stage, hidden, combined_x + hidden * token)
            if combine_weights:
                rank_of_lane = ops.lanes_divide(expert, experts)
                region_of_lane = rank_of_lane if rank_layout else ops.lanes_master(rank_of_lane)
                found = ops.lanes_gather(row + weights_at, region_of_lane, bucket * row_bytes)
                ops.store_lanes(combined_weights + 4 * topk * token, found)
        ops.stores_wait()

    return kernel
