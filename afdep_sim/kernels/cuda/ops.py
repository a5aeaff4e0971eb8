"""The vocabulary of `kernels.ops` for a GPU: one module object per set of compile-time constants."""

from __future__ import annotations

from types import ModuleType

from afdep_sim.kernels.cuda import counts, lanes, reduction, rows, words
from afdep_sim.plan import Constants

WORDS = (
    "device block_id warp_id blocks warps launch_dependents wait_dependencies load_relaxed store_relaxed clear_words "
    "fetch_add_acq_rel add_release_each peer load_i32 store_i32"
)
COUNTS = "group_sync check_routes count_routes counts_add counts_clear publish_counts prefix_counts store_host_counts"
LANES = (
    "load_lanes load_ids check_lanes lanes_scatter lanes_owner lanes_divide lanes_master lanes_index lanes_gather "
    "lanes_in_range lanes_offset lanes_highest lanes_count lanes_max lanes_fetch_add find_row"
)
ROWS = (
    "stage row_wait row_load_packs stage_i32 stage_fence row_store row_store_peers packs_scatter packs_store "
    "row_scatter clear_row stores_wait"
)
"""Operations that are the same for all constants, by the module that has them."""


def make_ops(constants: Constants, *, trace: bool = False, registers: int = 64) -> ModuleType:
    """The operations as device functions. A module object: Numba reads attributes of no other container.

    trace: `phase` writes a time; otherwise it is no code. registers: what a thread may use, which decides how much of
    a reduction is in flight.
    """
    ops = ModuleType("ops")
    for module, names in ((words, WORDS), (counts, COUNTS), (lanes, LANES), (rows, ROWS)):
        for name in names.split():
            setattr(ops, name, getattr(module, name))
    for part in (
        words.make_marked(trace),
        counts.make_count_waits(trace),
        lanes.make_sized(constants.topk),
        rows.make_loads(constants.packs > 0),
        reduction.make_reduction(constants.hidden_bytes, constants.reduce_prefix, registers),
    ):
        for name, operation in part.items():
            setattr(ops, name, operation)
    return ops
