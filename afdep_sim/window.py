"""Offsets and sizes in bytes: rows, regions, workspace words, private tensors, and the life cycle of every word.

One arena per rank: [ workspace words | registered regions | private tensors ]. The first two are symmetric (peers
write them); the third is the rank's own memory. Offsets of the workspace never depend on the configuration, so
they are constants of the text (upstream section 2.2 does the same); they are this project's own, 8 bytes a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from afdep_sim.protocol import Resolved
from afdep_sim.topology import MAX_RANKS, Topology
from afdep_sim.workload import MAX_EXPERTS, Workload

WORD = 8
LINE = 128
"""Words that different writers contend for lie on lines of their own."""


def align(value: int, step: int) -> int:
    return (value + step - 1) // step * step


# ---- rows (upstream section 2.3) ------------------------------------------------------------------------------------


def dispatch_metadata_offset(data_bytes: int, packs: int) -> int:
    """Where a dispatch row's metadata starts: behind its values and its scale packs, each aligned to 32 bytes."""
    return align(data_bytes, 32) + align(4 * packs, 32)


def dispatch_row_bytes(data_bytes: int, topk: int, packs: int = 0) -> int:
    """dR: hidden | scale packs | i32 expert[k], f32 weight[k], i32 source id, each of the three aligned to 32 bytes.

    The metadata holds a list position per lane too (12k + 4 bytes), which only upstream's hybrid reads.
    """
    return dispatch_metadata_offset(data_bytes, packs) + align(12 * topk + 4, 32)


def combine_row_bytes(hidden_bytes: int, topk: int) -> int:
    """cR: hidden, then 8k bytes of metadata (k unused ints, k weights)."""
    return align(hidden_bytes, 32) + align(8 * topk, 32)


# ---- workspace words ------------------------------------------------------------------------------------------------

CLEARED = "cleared"
"""Set once per exchange and zero again before its next write."""
MONOTONIC = "monotonic"
"""Only grows (or alternates by sense) and is compared with a round; never cleared."""


@dataclass(frozen=True)
class Word:
    """One group of workspace words and its life cycle (upstream section 10.5; record sections 2 and 3)."""

    name: str
    count: int
    kind: str
    set_by: str
    waited_by: str
    cleared_by: str
    remote: bool
    """Peers write it, so every access needs system scope."""


WORDS = (
    Word("barrier_calls", 1, MONOTONIC, "block 0, own rank", "nobody", "never", remote=False),
    Word("barrier_signals", 2, MONOTONIC, "block 0 of any rank, +1 or -1", "block 0", "never: senses alternate", True),
    Word("grid_arrivals", 1, MONOTONIC, "every block at a grid synchronisation", "every block", "never", remote=False),
    Word("dispatch_round", 1, MONOTONIC, "block 0 of a receiver, own rank", "nobody", "never", remote=False),
    Word("combine_round", 1, MONOTONIC, "block 0 of a receiver, own rank", "nobody", "never", remote=False),
    Word("dispatch_blocks_done", 1, CLEARED, "every sending block", "nobody", "the last block to add", remote=False),
    Word("dispatch_arrivals", MAX_RANKS, MONOTONIC, "each source's blocks, +1", "block 0 of a receiver", "never", True),
    Word("combine_arrivals", MAX_RANKS, MONOTONIC, "each FFN's blocks, +1", "block 0 of a receiver", "never", True),
    Word(
        "slots",
        MAX_RANKS,
        CLEARED,
        "payload warps of the own rank, one word per destination",
        "nobody",
        "the last sending block (per-block exit), else block 0 after the exit",
        remote=False,
    ),
    Word(
        "count_reduction",
        MAX_RANKS + MAX_EXPERTS,
        CLEARED,
        "every block's notify group",
        "block 0's notify group",
        "block 0's notify group, after reading",
        remote=False,
    ),
    Word(
        "counts",
        MAX_RANKS + MAX_EXPERTS,
        CLEARED,
        "each source's notify group: rows, then rows per expert, as -v-1",
        "block 0's notify group of a receiver",
        "the same group, after reading",
        remote=True,
    ),
)


def _word_offsets() -> tuple[dict[str, int], int]:
    offsets, at = {}, 0
    for word in WORDS:
        offsets[word.name] = at
        at = align(at + WORD * word.count, LINE)
    return offsets, align(at, 4096)


WORD_OFFSETS, WORKSPACE_BYTES = _word_offsets()
"""Byte offset of each word group from the window base, and the size of them all."""


def rank_layout(topology: Topology, workload: Workload, protocol: Resolved) -> bool:
    """Whether a reply goes to the region of the replying rank, else to that of the master lane (upstream section 5)."""
    return topology.ranks <= workload.topk and not protocol.topk_layout


# ---- regions and tensors --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """`regions` x `rows` x `row_bytes` at `offset` of the arena; addresses are dense (upstream section 2.3)."""

    name: str
    offset: int
    regions: int
    rows: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return self.regions * self.rows * self.row_bytes

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    def overlap(self, other: Region) -> range:
        """The arena bytes both regions hold (empty where they are apart)."""
        return range(max(self.offset, other.offset), min(self.end, other.end))


@dataclass(frozen=True)
class Window:
    """Where everything of one rank lies, for one (topology, workload, protocol). All numbers are bytes.

    dispatch_inbox and combine_inbox start at the same base and overlap, as upstream's do (section 2.4). Region
    strides follow the call's bucket; registered_bytes follows the capacity.
    """

    dispatch_inbox: Region
    combine_inbox: Region
    registered_bytes: int
    tensors: dict[str, Region]
    arena_bytes: int
    received_rows: int
    """Rows of the received tensors: what the call's bucket can bring at most (upstream section 12, graph mode)."""

    @classmethod
    def build(cls, topology: Topology, workload: Workload, protocol: Resolved) -> Window:
        bucket, capacity, topk = workload.bucket, workload.capacity, workload.topk
        hidden = workload.hidden_bytes
        dispatch_row = dispatch_row_bytes(workload.dispatch_bytes, topk, workload.packs)
        combine_row = combine_row_bytes(hidden, topk)
        senders = topology.ranks if protocol.union_buffers else topology.attention_ranks
        repliers = topology.ranks if protocol.union_buffers else topology.ffn_ranks
        if not rank_layout(topology, workload, protocol):
            repliers = topk
        dispatch = Region("dispatch_inbox", WORKSPACE_BYTES, senders, bucket, dispatch_row)
        combine = Region("combine_inbox", WORKSPACE_BYTES, repliers, bucket, combine_row)
        # Upstream sizes FP8 rows for one FP32 scale per 32 values, whatever the call brings (upstream section 11).
        sizing_row = dispatch_row_bytes(workload.dispatch_bytes, topk, -(-workload.hidden // 32) * bool(workload.packs))
        registered = max(senders * capacity * sizing_row, repliers * capacity * combine_row)

        experts = workload.experts_per_rank(topology)
        received = topology.ranks * bucket
        expanded = align(
            received * min(topk, experts) + (workload.expert_alignment - 1) * experts, workload.expert_alignment
        )
        slots = expanded if workload.expanded else received
        weights_per_slot = 1 if workload.expanded else topk
        tensors: dict[str, Region] = {}
        at = align(WORKSPACE_BYTES + max(dispatch.bytes, combine.bytes), 4096)
        for name, rows, row_bytes in (
            ("x", bucket, workload.dispatch_bytes),
            ("scales", bucket, 4 * workload.packs),
            ("topk", bucket, 8 * topk),
            ("weights", bucket, 4 * topk),
            ("slot_of_lane", bucket, 4 * topk),
            ("psum_rank", 1, WORD * topology.ranks),
            ("psum_expert", 1, WORD * (experts + 1)),
            ("metadata", received, 4 * (2 + topk)),
            ("received_topk", 0 if workload.expanded else received, 4 * topk),
            ("received_weights", slots, 4 * weights_per_slot),
            ("received_scales", align(slots, 4), 4 * workload.packs),
            ("received_x", slots, workload.dispatch_bytes),
            ("expert_y", slots, hidden),
            ("combined_x", bucket, hidden),
            ("combined_weights", bucket if workload.combine_weights else 0, 4 * topk),
            ("bias0", bucket if workload.bias > 0 else 0, hidden),
            ("bias1", bucket if workload.bias > 1 else 0, hidden),
            ("host_counts", 1 if workload.host_counts else 0, WORD * (topology.ranks + experts)),
        ):
            tensors[name] = Region(name, at, 1, rows, row_bytes)
            at = align(at + rows * row_bytes, 256)
        return cls(dispatch, combine, registered, tensors, align(at, 4096), slots)

    @property
    def registered_mb(self) -> float:
        """Registered transport memory in 10^6 bytes, words apart (record section 4)."""
        return self.registered_bytes / 1e6
