"""Direct combine in one NVLink domain: reduced rows, FFN -> Attention (upstream section 5, record sections 1 and 3)."""

from afdep_sim.kernels import phases as ph
from afdep_sim.kernels.barrier import make_barrier, make_entry


def make_replies(ops, c):
    """-> replies(...): received rows in contiguous blocks; each is reduced over its local slots and sent back.

    The reply lands at its token's row of the region that belongs to the replying rank (rank layout) or to the master
    lane of that rank's experts (top-k layout): one writer either way. Without the expanded layout the experts have
    reduced already, and the top-k weights may travel along. Warps are rotated by rank so
    that ranks do not all start on the same source.
    """
    topk = c.topk
    hidden = c.hidden_bytes
    row_bytes = c.combine_row_bytes
    prefix = c.reduce_prefix
    inbox = c.inbox
    expanded = c.expanded
    rank_layout = c.rank_layout
    combine_weights = c.combine_weights
    metadata_bytes = 4 * (2 + topk)

    @ops.device
    def replies(ctx, rank, bucket, block, warp, rows, metadata, expert_y, weights):
        blocks = ops.blocks()
        warps = ops.warps()
        stage = ops.stage(warp, row_bytes)
        per_warp = (rows + blocks * warps - 1) // (blocks * warps)
        first = (((warp + rank) % warps) * blocks + block) * per_warp
        parity = 0
        for i in range(first, min(first + per_warp, rows)):
            token = ops.load_i32(metadata + metadata_bytes * i) % bucket
            origin = ops.load_i32(metadata + metadata_bytes * i + 4)
            region = rank if rank_layout else origin % topk
            reply = ops.peer(ctx, origin // topk) + inbox + (region * bucket + token) * row_bytes
            ops.stores_wait()
            if expanded:
                slot = ops.load_lanes(metadata + metadata_bytes * i + 8, topk)
                if ops.lanes_count(slot) == 1:
                    ops.row_load(stage, expert_y + hidden * ops.lanes_max(slot), hidden)
                    parity = ops.row_wait(stage, parity)
                else:
                    ops.row_reduce(stage, hidden, expert_y, slot, hidden, prefix)
                    ops.stage_fence()
            else:
                ops.row_load(stage, expert_y + hidden * i, hidden)
                parity = ops.row_wait(stage, parity)
            ops.row_store(stage, hidden, reply)
            if combine_weights:
                ops.store_lanes_peer(reply + hidden + 4 * topk, ops.load_lanes(weights + 4 * topk * i, topk))
        # Completion at the peer, not only source reads: the arrival that follows speaks for these rows.
        ops.stores_wait()

    return replies


def make_combine(ops, c):
    """-> kernel: combine of one rank. Role-aware: FFN ranks send, Attention ranks wait. M2N: every rank does both.

    Why the role-aware kernel needs no entry barrier (record section 1). A reply of exchange N+1 overwrites an
    Attention inbox that the reduce epilogue of exchange N read. That epilogue completed before its rank's dispatch
    of N+1 started (stream order, dispatch has no programmatic edge), which released its dispatch arrivals after
    that, and this FFN rank's dispatch acquired them from every source before its combine could start. The inboxes
    of dispatch and combine share bytes, but a rank has only one of the two in use: its role's.
    """
    sends = c.sends
    receives = c.receives
    entry_barrier = c.entry_barrier
    exit_all_ranks = c.exit_all_ranks
    exit_grid = c.exit_grid
    grid_word = c.words["grid_arrivals"]
    rounds = c.words["combine_round"]
    arrivals = c.words["combine_arrivals"]
    barrier = make_barrier(ops, c)
    entry = make_entry(ops, c)
    replies = make_replies(ops, c)

    def kernel(ctx, window, rank, ranks, ffn_ranks, bucket, psum_rank, metadata, expert_y, weights):
        block = ops.block_id()
        warp = ops.warp_id()
        ops.phase(ctx, ph.COMBINE_START)
        if entry_barrier:
            entry(ctx, window, ranks, block, warp, ph.COMBINE_ENTRY)
        if sends:
            ops.phase(ctx, ph.COMBINE_ROWS)
            rows = ops.load_relaxed(psum_rank + 8 * (ranks - 1))
            replies(ctx, rank, bucket, block, warp, rows, metadata, expert_y, weights)
        if exit_all_ranks:
            ops.grid_sync(ctx, window + grid_word, ph.COMBINE_EXIT)
            if block == 0 and warp == 0:
                barrier(ctx, window, ranks, ph.COMBINE_EXIT)
        elif sends:
            if exit_grid:
                ops.grid_sync(ctx, window + grid_word, ph.COMBINE_EXIT)
                if block == 0 and warp == 0:
                    ops.add_release_each(ctx, ffn_ranks, ranks - ffn_ranks, arrivals + 8 * rank, 1)
            else:
                # As in dispatch: every block releases its own rows, the receiver counts blocks.
                ops.block_sync(ctx, ph.COMBINE_EXIT)
                if warp == 0:
                    ops.add_release_each(ctx, ffn_ranks, ranks - ffn_ranks, arrivals + 8 * rank, 1)
        elif receives:
            if block == 0 and warp == 0:
                target = ops.load_relaxed(window + rounds) + 1
                ops.store_relaxed(window + rounds, target)
                blocks_of_a_sender = 1 if exit_grid else ops.blocks()
                ops.wait_each_ge(ctx, window + arrivals, ffn_ranks, target * blocks_of_a_sender, ph.COMBINE_ARRIVAL)
        ops.phase(ctx, ph.COMBINE_END)
        ops.launch_dependents()

    return kernel
