"""The all-rank NVLink barrier of upstream section 10.1, run by one warp of block 0."""


def make_barrier(ops, c):
    """-> barrier(ctx, window, ranks, p): returns once every rank has called it as often as this one has.

    Two words alternate and each is raised, then lowered, so no word is ever reset and a fast peer's next call
    cannot disturb the one in progress. Every rank must make the same sequence of calls.
    """
    calls_word = c.words["barrier_calls"]
    signals = c.words["barrier_signals"]

    @ops.device
    def barrier(ctx, window, ranks, p):
        calls = ops.load_relaxed(window + calls_word)
        step = 1 - (calls & 2)
        word = signals + 8 * (calls & 1)
        ops.store_relaxed(window + calls_word, calls + 1)
        ops.add_release_each(ctx, 0, ranks, word, step)
        ops.wait_eq(ctx, window + word, ranks * ((1 + step) >> 1), p)

    return barrier


def make_entry(ops, c):
    """-> entry(ctx, window, ranks, block, warp, p): nobody writes to a peer before every peer has entered this call.

    Upstream opens dispatch and combine with it (upstream sections 3.0 and 5): a peer that entered has, by its stream
    order, finished reading its inboxes. Record section 1 drops both; see the argument beside each kernel.
    """
    barrier = make_barrier(ops, c)
    grid_word = c.words["grid_arrivals"]

    @ops.device
    def entry(ctx, window, ranks, block, warp, p):
        if block == 0 and warp == 0:
            barrier(ctx, window, ranks, p)
        ops.grid_sync(ctx, window + grid_word, p)

    return entry


