"""`afdep layout LAYOUT`: where everything lies in a rank's window, and how many megabytes are registered."""

from __future__ import annotations

import argparse

from afdep_sim.cli.options import add_shape, table, workload_of
from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.window import WORD_OFFSETS, WORDS, WORKSPACE_BYTES, Region, Window, rank_layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layout", help="ranks of each role: 2A2F, 3A:1F, 2F:2A")
    add_shape(parser)
    parser.add_argument("--arm", default="afdep", metavar="ARM", help="a preset with +NAME=VALUE switches")
    parser.add_argument("--words", action="store_true", help="also list the workspace words and their life cycle")


def main(options: argparse.Namespace) -> int:
    topology = Topology.parse(options.layout)
    protocol = Protocol.parse(options.arm)
    resolved = protocol.resolve(topology)
    # The regions of a full call: bucket = capacity.
    workload = workload_of(options, tokens=0, bucket=options.bucket or options.capacity)
    workload.real_experts(topology)
    window = Window.build(topology, workload, resolved)
    union = Window.build(topology, workload, Protocol.fastafd_m2n().resolve(topology))
    print(
        f"{topology.name} {protocol.arm}: hidden {workload.hidden}, {workload.dtype}, top-{workload.topk}, bucket "
        f"{workload.bucket}, capacity {workload.capacity}; offsets from the window's base"
    )
    print(
        f"combine replies go to the region of the "
        f"{'replying rank' if rank_layout(topology, workload, resolved) else 'master top-k lane'}\n"
    )
    rows: list[tuple[str, ...]] = [("region", "offset", "regions", "rows", "row bytes", "bytes")]
    rows.append(("workspace words", "0", "", "", "", f"{WORKSPACE_BYTES:,}"))
    rows += [_row(region) for region in (window.dispatch_inbox, window.combine_inbox)]
    print(table(rows, left=(0,)))
    shared = window.dispatch_inbox.overlap(window.combine_inbox)
    print(f"\nthe inboxes share {len(shared):,} bytes at offset {shared.start:,}")
    print(
        f"registered: {window.registered_mb:.1f} MB ({window.registered_bytes:,} bytes), "
        f"{100 * window.registered_bytes / union.registered_bytes:.1f}% of union's {union.registered_mb:.1f} MB\n"
    )
    rows = [("private tensor", "offset", "rows", "row bytes", "bytes")]
    rows += [
        (name, f"{t.offset:,}", f"{t.rows:,}", f"{t.row_bytes:,}", f"{t.bytes:,}")
        for name, t in window.tensors.items()
        if t.bytes
    ]
    print(table(rows, left=(0,)))
    if options.words:
        print()
        rows = [("word", "offset", "count", "kind", "set by", "waited for by", "cleared by")]
        rows += [
            (w.name, f"{WORD_OFFSETS[w.name]:,}", str(w.count), w.kind, w.set_by, w.waited_by, w.cleared_by)
            for w in WORDS
        ]
        print(table(rows, left=(0, 3, 4, 5, 6)))
    return 0


def _row(region: Region) -> tuple[str, ...]:
    return (
        region.name,
        f"{region.offset:,}",
        str(region.regions),
        f"{region.rows:,}",
        f"{region.row_bytes:,}",
        f"{region.bytes:,}",
    )
