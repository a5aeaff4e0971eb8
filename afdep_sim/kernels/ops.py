"""The vocabulary: every operation the protocol text may use, as signatures with their meaning.

A machine gives the text a module object with these names (`ops.row_load(...)`). Here they are documentation that the
tests hold every machine to: same names, same parameters. Conventions:

* Every value is an integer (int64 on the GPU), except *lane values* (one integer per lane, opaque to the text) and
  *stages* (a warp's staged row, opaque too). An address is an integer; adding bytes to it is allowed.
* An *agent* is what runs the text once: a warp, or the four notify warps of a dispatch block acting as one.
* A wait names the phase it is charged to and opens it. On a GPU it gives up after a time limit and names rank, word,
  value and expectation; in the model a wait that nothing can end is a deadlock, reported as a table.
* Order and scope stand in a name where they matter: relaxed, release, acq_rel. A peer word has system scope.
* No operation waits on one word and writes another, and none contains a loop of the protocol.
"""

# ---- who -------------------------------------------------------------------------------------------------------------


def device(function):
    """Mark an inner function that the text calls: compiled as a device function on a GPU."""


def block_id():
    """This agent's block, 0 to blocks() - 1."""


def warp_id():
    """This agent's warp in its block; the notify group answers with its first."""


def blocks():
    """Blocks of the grid."""


def warps():
    """Warps of a block."""


# ---- marks and launch dependencies -----------------------------------------------------------------------------------


def phase(ctx, p):
    """Open phase p (an integer of `phases`), which ends this agent's phase before it. Costs nothing in the model."""


def launch_dependents():
    """This block lets the programmatic dependent start; orders nothing (PTX griddepcontrol.launch_dependents)."""


def wait_dependencies(ctx):
    """Wait for the primary's completion, which orders all it did before what follows (PTX griddepcontrol.wait)."""


# ---- synchronisation -------------------------------------------------------------------------------------------------


def group_sync():
    """The notify group's warps meet (PTX bar.sync, named)."""


def block_sync(ctx, p):
    """All warps of the block meet."""


def grid_sync(ctx, word, p):
    """All blocks of the grid meet, over one monotonic word at GPU scope; needs co-resident blocks."""


# ---- words -----------------------------------------------------------------------------------------------------------


def load_relaxed(address):
    """-> the word (int64) at an address of this rank."""


def store_relaxed(address, value):
    """Store a word of this rank, GPU scope."""


def clear_words(address, count):
    """Set `count` words of this rank to 0."""


def fetch_add_acq_rel(address, value):
    """Add to a word of this rank -> the value before; acquire and release at GPU scope."""


def add_release_each(ctx, first, count, offset, value):
    """Add `value` to the word at `offset` of each rank in [first, first + count): release at system scope.

    Covers what this agent did before, and what others did before a synchronisation with it.
    """


def wait_each_ge(ctx, address, count, value, p):
    """Wait until each of `count` words of this rank is at least `value`: acquire at system scope."""


def wait_eq(ctx, address, value, p):
    """Wait until the word equals `value`: acquire at system scope."""


def peer(ctx, rank):
    """-> the address of `rank`'s window in this NVLink domain."""


def load_i32(address):
    """-> a 32-bit integer of this rank's memory."""


def store_i32(address, value):
    """Store a 32-bit integer to this rank's memory."""


def store_host_counts(host, ranks, first, experts, alignment):
    """The notify group stores its counts for the host as -v-1: rows per rank, then aligned rows per expert (int64)."""


# ---- counts: the notify group ----------------------------------------------------------------------------------------


def count_routes(routes, topk, tokens, receivers, experts):
    """Count this block's share of int64 routes[tokens, topk] into the group's shared counters.

    Counters: rows per receiver (a token counts once for each rank that owns any of its experts), then rows per
    expert, receiver by receiver. A token i belongs to block i mod blocks(). -1 is no route.
    """


def check_routes(ctx, routes, topk, tokens, experts):
    """Stop unless every route of this block's share of int64 routes[tokens, topk] is -1 or a real expert, none twice.

    The stop names rank, token, lane and value (record section 8).
    """


def counts_add(address, count):
    """Add each shared counter, with 1 << 32 for this block, to a word: relaxed, GPU scope (upstream section 3.1)."""


def wait_counts_reduced(ctx, address, count, p):
    """Wait until every block has added to each of `count` words; the low halves become the shared counters."""


def counts_clear(address, count):
    """Set `count` words to 0, each by the thread that read it in the wait before."""


def publish_counts(ctx, receivers, experts, rank_offset, expert_offset):
    """Store each receiver's own counters as -v-1 into its words: relaxed, system scope; the value is its own flag."""


def wait_counts(ctx, address, count, at, p):
    """Wait until each of `count` words is not 0; decoded, they become shared counters `at` and following.

    Brings the values and nothing else: no acquire.
    """


def prefix_counts(psum_rank, psum_expert, ranks, first, experts, alignment):
    """Shared counters of the sources [first, ranks) -> prefix sums.

    psum_rank[ranks]: inclusive rows per rank. psum_expert[experts + 1]: exclusive, over counts rounded up to
    `alignment`, the total last.
    """


# ---- lane values -----------------------------------------------------------------------------------------------------


def load_lanes(address, count):
    """-> int32[count] as lane values."""


def load_ids(address, count):
    """-> int64[count] as lane values, at their full width."""


def check_lanes(ctx, expert, token, experts):
    """Stop unless the lanes of `token` hold -1 or a real expert each, none twice; as `check_routes`."""


def store_lanes(address, lanes):
    """Store lane values as int32."""


def lanes_scatter(base, index, lanes):
    """Each lane with index >= 0 stores its 32-bit value to base + 4 * index."""


def lanes_owner(expert, experts):
    """-> per lane expert // experts, kept on the highest lane of each owner, -1 elsewhere (the master lane)."""


def lanes_divide(lanes, divisor):
    """-> per lane value // divisor where value >= 0, else -1."""


def lanes_master(lanes):
    """-> per lane with a value >= 0 the highest lane with that value, else -1."""


def lanes_index(lanes):
    """-> per lane its own number where value >= 0, else -1."""


def lanes_gather(base, index, stride):
    """-> per lane the 32 bits at base + index * stride + 4 * lane where index >= 0, else 0."""


def lanes_in_range(lanes, low, count):
    """-> per lane value - low where low <= value < low + count, else -1."""


def lanes_offset(lanes, offset):
    """-> per lane value + offset where value >= 0, else -1."""


def lanes_highest(lanes):
    """-> the highest lane with a value >= 0, -1 if none."""


def lanes_count(lanes):
    """-> how many lanes have a value >= 0."""


def lanes_max(lanes):
    """-> the largest lane value."""


def lanes_fetch_add(address, index):
    """Each lane with index >= 0 adds 1 to word `index` -> the value before, -1 elsewhere: relaxed, GPU scope."""


def find_row(psum_rank, ranks, bucket, row):
    """-> source rank * bucket + slot of received row `row`, from inclusive sums per rank."""


# ---- rows ------------------------------------------------------------------------------------------------------------


def stage(index, row_bytes):
    """-> the staged row number `index` of this block's shared memory, this warp's own."""


def row_load(stage, source, size):
    """Start a bulk load of `size` bytes of this rank's memory into the stage."""


def row_load_packs(stage, offset, source, count):
    """Add `count` 4-byte scale packs at `source` to the bulk load in flight, to `offset` of the stage."""


def row_wait(stage, parity):
    """Wait for the bulk load in flight -> the parity of the next one."""


def stage_lanes(stage, offset, lanes):
    """Store lane values as int32 into the stage: ordinary stores."""


def stage_i32(stage, offset, value):
    """Store one int32 into the stage: an ordinary store."""


def stage_fence():
    """Ordinary stores to the stage before, bulk reads of it after (PTX fence.proxy.async)."""


def row_store(stage, size, destination):
    """Start a bulk store of `size` bytes of the stage to an address, a peer's too."""


def row_store_peers(ctx, stage, size, ranks, offset, slots):
    """Each lane with a rank >= 0 starts a bulk store of the stage to that rank's offset + slot * size."""


def packs_scatter(stage, offset, count, base, slots, pack_stride):
    """Each lane with a slot >= 0 stores the stage's scale packs: pack p to base + 4 * slot + p * pack_stride."""


def packs_store(stage, offset, count, destination, pack_stride):
    """Store the stage's scale packs: pack p to destination + p * pack_stride."""


def row_scatter(stage, size, base, slots):
    """Each lane with a slot >= 0 starts a bulk store of the stage to base + slot * size of this rank."""


def store_lanes_peer(address, lanes):
    """Store lane values as 32 bits each to an address of a peer: ordinary stores, covered by a later release."""


def clear_row(address, size):
    """Set `size` bytes of this rank's memory to 0: ordinary stores."""


def stores_wait():
    """Wait until this warp's bulk stores are complete: readable at their destination, and the stage free again."""


def row_reduce(stage, size, base, slots, stride, prefix):
    """Sum the BF16 rows at base + slot * stride over lanes with slot >= 0, in lane order, into the stage.

    FP32 from the first row on, rounded once; one row is copied bit for bit, none gives zeros. The first `prefix`
    slots load without a branch (upstream section 5.1).
    """


def row_reduce_bias(stage, size, base, slots, stride, prefix, bias0, bias1):
    """As `row_reduce`, in FP32 from the BF16 row at bias0 on, then the one at bias1 (0: none), then the lanes' rows."""
