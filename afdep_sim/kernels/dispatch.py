"""Direct dispatch in one NVLink domain: counts and rows, Attention -> FFN (upstream section 3, record sections 1 to 3).

Every block has one notify group (four warps acting as one agent) and payload warps with one staged row each.
"""

from afdep_sim.kernels import phases as ph
from afdep_sim.kernels.barrier import make_barrier, make_entry


def make_notify(ops, c):
    """-> notify(...): the count exchange of upstream section 3.1; directional as in record section 2.

    Sources reduce their routes over all blocks and publish rows per rank and per expert; receivers wait for the
    words, clear them and turn them into prefix sums. A count word is its own flag (never 0), so it needs neither
    release nor acquire; the rows it speaks of are covered by the arrivals.
    """
    topk = c.topk
    alignment = c.expert_alignment
    sends_counts = c.sends_counts
    receives_counts = c.receives_counts
    union_counts = c.union_counts
    check_routes = c.check_routes
    host_counts = c.host_counts
    reduction = c.words["count_reduction"]
    counts = c.words["counts"]

    @ops.device
    def notify(ctx, window, rank, ranks, ffn_ranks, experts, block, tokens, real, routes, psum_rank, psum_expert, host):
        if check_routes:
            ops.check_routes(ctx, routes, topk, tokens, real)
        if sends_counts:
            receivers = ranks if union_counts else ffn_ranks
            words = receivers * (1 + experts)
            ops.phase(ctx, ph.DISPATCH_COUNT)
            ops.count_routes(routes, topk, tokens, receivers, experts)
            ops.counts_add(window + reduction, words)
            if block == 0:
                ops.wait_counts_reduced(ctx, window + reduction, words, ph.DISPATCH_COUNT_REDUCE)
                ops.counts_clear(window + reduction, words)
                ops.group_sync()
                ops.publish_counts(ctx, receivers, experts, counts + 8 * rank, counts + 8 * (ranks + experts * rank))
                # The group's shared counters are overwritten by the counts received below.
                ops.group_sync()
        if receives_counts:
            if block == 0:
                first = 0 if union_counts else ffn_ranks
                by_rank = window + counts + 8 * first
                by_expert = window + counts + 8 * (ranks + experts * first)
                sources = ranks - first
                ops.wait_counts(ctx, by_rank, sources, 0, ph.DISPATCH_COUNT_WAIT)
                ops.wait_counts(ctx, by_expert, sources * experts, sources, ph.DISPATCH_COUNT_WAIT)
                # Cleared before this rank's combine arrival, which every source awaits before it publishes again.
                ops.counts_clear(by_rank, sources)
                ops.counts_clear(by_expert, sources * experts)
                ops.group_sync()
                ops.phase(ctx, ph.DISPATCH_PREFIX)
                ops.prefix_counts(psum_rank, psum_expert, ranks, first, experts, alignment)
                if host_counts:
                    ops.store_host_counts(host, ranks, first, experts, alignment)

    return notify


def make_payload(ops, c):
    """-> payload(...): upstream section 3.2, one token in flight per warp.

    Row layout: values | scale packs | i32 expert[k] | f32 weight[k] | i32 source rank x bucket + token | i32 list
    position[k] (which nobody reads here).
    """
    topk = c.topk
    hidden = c.hidden_bytes
    data = c.data_bytes
    packs = c.packs
    row_bytes = c.dispatch_row_bytes
    notify_warps = c.notify_warps
    slot_words = c.words["slots"]
    inbox = c.inbox
    check_routes = c.check_routes
    zero_view = c.zero_view
    reply_bytes = c.combine_row_bytes
    experts_at = c.metadata_offset
    weights_at = experts_at + 4 * topk
    source_at = experts_at + 8 * topk

    @ops.device
    def payload(
        ctx, window, rank, experts, bucket, region, block, warp, tokens, real, x, scales, routes, weights, slot_of_lane
    ):
        blocks = ops.blocks()
        lanes = ops.warps() - notify_warps
        stage = ops.stage(warp - notify_warps, row_bytes)
        parity = 0
        ops.phase(ctx, ph.DISPATCH_PAYLOAD)
        for token in range((warp - notify_warps) * blocks + block, tokens, lanes * blocks):
            # One stage per warp: its earlier stores must be over before the bulk load overwrites what they read.
            ops.stores_wait()
            ops.row_load(stage, x + data * token, data)
            if packs > 0:
                ops.row_load_packs(stage, data, scales + 4 * packs * token, packs)
            expert = ops.load_ids(routes + 8 * topk * token, topk)
            if check_routes:
                ops.check_lanes(ctx, expert, token, real)
            ops.stage_lanes(stage, experts_at, expert)
            ops.stage_lanes(stage, weights_at, ops.load_lanes(weights + 4 * topk * token, topk))
            ops.stage_i32(stage, source_at, rank * bucket + token)
            # Ordinary stores to the stage, then the bulk engine reads it: other proxy, so it needs the fence.
            ops.stage_fence()
            owner = ops.lanes_owner(expert, experts)
            slot = ops.lanes_fetch_add(window + slot_words, owner)
            ops.store_lanes(slot_of_lane + 4 * topk * token, ops.lanes_offset(slot, rank * bucket))
            parity = ops.row_wait(stage, parity)
            ops.row_store_peers(ctx, stage, row_bytes, owner, inbox + region * bucket * row_bytes, slot)
            if zero_view:
                # No FFN rank replies to a token without a route, and the view shows its row of the inbox.
                if ops.lanes_count(owner) == 0:
                    ops.clear_row(window + inbox + reply_bytes * token, hidden)
        # Completion, not only source reads: the arrival that follows speaks for these rows at the receiver.
        ops.stores_wait()

    return payload


def make_dispatch(ops, c):
    """-> kernel: dispatch of one rank.

    Role-aware: Attention ranks send (`sends`), FFN ranks receive (`receives`). M2N: every rank does both and the
    entry and exit barriers hold all ranks together.

    Why the role-aware kernel needs no entry barrier (record section 1). Exchange N+1's rows overwrite an FFN inbox
    that the copy epilogue of exchange N read. That epilogue completed before its rank's combine of N started
    (stream order, combine has no programmatic edge), the FFN released its combine arrivals after that, and this
    source's collect of N acquired one from every FFN rank before this kernel could start.
    """
    sends = c.sends
    receives = c.receives
    entry_barrier = c.entry_barrier
    exit_all_ranks = c.exit_all_ranks
    exit_grid = c.exit_grid
    notify_warps = c.notify_warps
    grid_word = c.words["grid_arrivals"]
    slot_words = c.words["slots"]
    done = c.words["dispatch_blocks_done"]
    rounds = c.words["dispatch_round"]
    arrivals = c.words["dispatch_arrivals"]
    barrier = make_barrier(ops, c)
    entry = make_entry(ops, c)
    notify = make_notify(ops, c)
    payload = make_payload(ops, c)

    def kernel(
        ctx,
        window,
        rank,
        ranks,
        ffn_ranks,
        experts,
        bucket,
        first_region,
        tokens,
        real,
        x,
        scales,
        routes,
        weights,
        slot_of_lane,
        psum_rank,
        psum_expert,
        host,
    ):
        block = ops.block_id()
        warp = ops.warp_id()
        ops.phase(ctx, ph.DISPATCH_START)
        if entry_barrier:
            entry(ctx, window, ranks, block, warp, ph.DISPATCH_ENTRY)
        if warp < notify_warps:
            notify(
                ctx, window, rank, ranks, ffn_ranks, experts, block, tokens, real, routes, psum_rank, psum_expert, host
            )
        elif sends:
            payload(
                ctx,
                window,
                rank,
                experts,
                bucket,
                rank - first_region,
                block,
                warp,
                tokens,
                real,
                x,
                scales,
                routes,
                weights,
                slot_of_lane,
            )
        if exit_all_ranks:
            ops.grid_sync(ctx, window + grid_word, ph.DISPATCH_EXIT)
            if block == 0 and warp == 0:
                barrier(ctx, window, ranks, ph.DISPATCH_EXIT)
                ops.clear_words(window + slot_words, ranks)
        elif sends:
            if exit_grid:
                ops.grid_sync(ctx, window + grid_word, ph.DISPATCH_EXIT)
                if block == 0 and warp == 0:
                    ops.add_release_each(ctx, 0, ffn_ranks, arrivals + 8 * rank, 1)
                    ops.clear_words(window + slot_words, ffn_ranks)
            else:
                # No grid synchronisation (record section 3): each block releases its own rows, and the receiver
                # counts blocks. The block synchronisation puts every warp's completed stores before the release.
                ops.block_sync(ctx, ph.DISPATCH_EXIT)
                if warp == 0:
                    ops.add_release_each(ctx, 0, ffn_ranks, arrivals + 8 * rank, 1)
                    # Only the last block to finish may reset the slots: the others' warps still draw from them.
                    if ops.fetch_add_acq_rel(window + done, 1) == ops.blocks() - 1:
                        ops.clear_words(window + done, 1)
                        ops.clear_words(window + slot_words, ffn_ranks)
        elif receives:
            if block == 0 and warp == 0:
                target = ops.load_relaxed(window + rounds) + 1
                ops.store_relaxed(window + rounds, target)
                blocks_of_a_source = 1 if exit_grid else ops.blocks()
                ops.wait_each_ge(
                    ctx,
                    window + arrivals + 8 * ffn_ranks,
                    ranks - ffn_ranks,
                    target * blocks_of_a_source,
                    ph.DISPATCH_ARRIVAL,
                )
        ops.phase(ctx, ph.DISPATCH_END)
        ops.launch_dependents()

    return kernel
