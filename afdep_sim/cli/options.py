"""What several verbs share: the options that make a workload, and aligned tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from afdep_sim.routing import example
from afdep_sim.workload import DTYPES, ROUTINGS, Workload


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The shape of a row and of the experts."""
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size (default 2048)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="what dispatch carries (default bf16)")
    parser.add_argument("--topk", type=int, default=8, help="experts per token (default 8)")
    parser.add_argument("--experts", type=int, default=0, help="real experts (default 128, or 32 per FFN rank)")
    parser.add_argument("--bucket", type=int, default=0, help="token bound (default: tokens, next power of two, >= 8)")
    parser.add_argument("--capacity", type=int, default=2048, help="token bound of the buffers (default 2048)")


def add_traffic(parser: argparse.ArgumentParser) -> None:
    """Which routes, and what else an exchange carries."""
    parser.add_argument(
        "--routing",
        default="random",
        metavar="ROUTING",
        help=f"{', '.join(ROUTINGS)}, 'example' (a gate's routes that ship with the package) or a file.npz",
    )
    parser.add_argument("--dropped", type=float, default=0.0, help="share of random routes that are masked (default 0)")
    parser.add_argument("--alignment", type=int, default=1, help="rows an expert's block is aligned to (default 1)")
    parser.add_argument("--not-expanded", action="store_true", help="one received row per token, not one per expert")
    parser.add_argument("--bias", type=int, default=0, help="bias tensors added to the combined rows, 0 to 2")
    parser.add_argument("--combine-weights", action="store_true", help="top-k weights travel back (not expanded only)")
    parser.add_argument("--host-counts", action="store_true", help="dispatch writes its counts for the host")
    parser.add_argument("--seed", type=int, default=0, help="first seed of routes and launch skew")


def workload_of(options: argparse.Namespace, tokens: int, bucket: int | None = None) -> Workload:
    """The workload that the options name, at a token count. Raises `Refusal`."""
    shape = {
        "hidden": options.hidden,
        "dtype": options.dtype,
        "topk": options.topk,
        "experts": options.experts,
        "bucket": options.bucket if bucket is None else bucket,
        "capacity": options.capacity,
    }
    if not hasattr(options, "routing"):
        return Workload(tokens=tokens, **shape)
    return Workload(
        tokens=tokens,
        **shape,
        routing=example() if options.routing == "example" else options.routing,
        dropped_share=options.dropped,
        expert_alignment=options.alignment,
        expanded=not options.not_expanded,
        bias=options.bias,
        combine_weights=options.combine_weights,
        host_counts=options.host_counts,
        seed=options.seed,
    )


def table(lines: Sequence[tuple[str, ...]], left: Sequence[int]) -> str:
    """Aligned columns, as wide as their widest entry: those in `left` to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            v.ljust(w) if i in left else v.rjust(w) for i, (v, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
