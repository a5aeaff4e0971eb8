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

    def kernel(ctx, window, experts, bucket, tokens, routes, combined_x):
        block = ops.block_id()
        warp = ops.warp_id()
        blocks = ops.blocks()
        ops.phase(ctx, ph.REDUCE_START)
        # As in the copy epilogue: early launch hides the launch only; completion of combine says the replies are in.
        ops.wait_dependencies(ctx)
        ops.phase(ctx, ph.REDUCE_ROWS)
        stage = ops.stage(warp, hidden)
        for token in range(warp * blocks + block, tokens, ops.warps() * blocks):
            owner = ops.lanes_owner(ops.load_lanes(routes + 4 * topk * token, topk), experts)
            ops.stores_wait()
            ops.row_reduce(stage, hidden, window + inbox + token * row_bytes, owner, bucket * row_bytes, prefix)
            ops.stage_fence()
            ops.row_store(stage, hidden, combined_x + hidden * token)
        ops.stores_wait()

    return kernel
