"""What one exchange carries: tokens, rows, routes, experts, and the bucket that bounds them (design section 6).

Every random draw is a function of (seed, exchange, source), so a run can be repeated and its exchanges differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from afdep_sim.errors import Refusal, switch, whole, word
from afdep_sim.formats import bf16_values, quantise, scale_packs
from afdep_sim.routing import read_routes
from afdep_sim.topology import Topology

MAX_TOPK = 32
MAX_EXPERTS = 2048
MAX_ALIGNMENT = 1024
"""Rows an expert's block may be aligned to: well over what grouped matrix products ask for."""
MAX_EXPERTS_PER_RANK = 256
DTYPES = ("bf16", "fp8")
ROUTINGS = ("random", "skew")
HIDDEN_STEP = 256
"""Upstream section 1: a combine row must be a multiple of 32 lanes x 16 B, so hidden is a multiple of 256."""


def _random_bf16(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """uint16 [shape]: finite BF16 bit patterns of both signs, magnitudes in [2^-6, 4), every mantissa bit random."""
    bits = generator.integers(0, 1 << 16, shape, dtype=np.uint16)
    exponent = ((bits >> np.uint16(7)) & np.uint16(7)) + np.uint16(121)
    return (bits & np.uint16(0x807F)) | (exponent << np.uint16(7))


@dataclass(frozen=True)
class Source:
    """What one Attention rank brings to one exchange.

    topk: int64 [T, k] expert ids, -1 = no route; weights: float32 [T, k]. x: None in a timing-only run, else uint16
    [T, hidden] BF16 bit patterns, or uint8 [T, hidden] E4M3 with int32 [T, packs] scales (`formats.quantise`).
    bias: uint16 [n, T, hidden] BF16, the tensors added to the combined rows.
    """

    x: np.ndarray | None
    topk: np.ndarray
    weights: np.ndarray
    scales: np.ndarray | None = None
    bias: np.ndarray | None = None

    def check(self, workload: Workload, tokens: int, rank: int, data: bool) -> None:
        """Refuse arrays whose shape or dtype is not what `workload` makes of `tokens`; routes are not looked into."""
        kinds: dict[str, tuple[np.ndarray | None, tuple[int, ...], type]] = {
            "topk": (self.topk, (tokens, workload.topk), np.int64),
            "weights": (self.weights, (tokens, workload.topk), np.float32),
        }
        if data:
            kinds["x"] = (self.x, (tokens, workload.hidden), np.uint8 if workload.packs else np.uint16)
            if workload.packs:
                kinds["scales"] = (self.scales, (tokens, workload.packs), np.int32)
            if workload.bias:
                kinds["bias"] = (self.bias, (workload.bias, tokens, workload.hidden), np.uint16)
        for name, (array, shape, dtype) in kinds.items():
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
                found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else repr(array)
                raise Refusal(f"{name} of rank {rank} is {found}, not {np.dtype(dtype)} {shape}")


@dataclass(frozen=True)
class Workload:
    """Tokens, hidden size, dtype, routing and experts of an exchange.

    tokens: T of every Attention rank, or one T per Attention rank (in rank order). experts: real experts over all
    FFN ranks; 0 takes 128, or 32 per FFN rank where 128 is not divisible. dtype: what dispatch carries, bf16 or fp8
    (E4M3, one power-of-two scale per 128); combine carries BF16. bucket: the token bound M that region strides
    follow; 0 takes the largest T rounded up to a power of two, at least 8. capacity: the bound the buffers are sized
    for. routing: random, skew, or the path of an .npz file (see `routing.RouteFile`). expanded: received rows lie per
    expert, else once per received token. bias: how many bias tensors the reduce epilogue adds, 0 to 2.
    combine_weights: top-k weights travel back with the replies (not in the expanded layout, as upstream v2.0).
    host_counts: dispatch also writes its counts for the host. dropped_share: the share of routes that a random or
    skewed draw masks (-1), token by token and lane by lane. Raises `Refusal` with value and bound.
    """

    tokens: int | tuple[int, ...]
    hidden: int = 2048
    topk: int = 8
    experts: int = 0
    dtype: str = "bf16"
    bucket: int = 0
    capacity: int = 2048
    routing: str = "random"
    expert_alignment: int = 1
    expanded: bool = True
    bias: int = 0
    combine_weights: bool = False
    host_counts: bool = False
    dropped_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "topk", "experts", "bucket", "capacity", "expert_alignment", "bias", "seed"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("expanded", "combine_weights", "host_counts"):
            switch(name, getattr(self, name))
        for name in ("dtype", "routing"):
            word(name, getattr(self, name))
        given = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,)
        counts = tuple(whole("tokens", count) for count in given)
        object.__setattr__(self, "tokens", counts if isinstance(self.tokens, tuple) else counts[0])
        if not isinstance(self.dropped_share, int | float):
            raise Refusal(f"dropped share {self.dropped_share!r} is not a number")
        if not counts:
            raise Refusal("tokens () names no Attention rank")
        if min(counts) < 0:
            raise Refusal(f"tokens {self.tokens} is below 0")
        if self.bucket == 0:
            object.__setattr__(self, "bucket", max(8, 1 << (max(counts) - 1).bit_length()) if max(counts) else 8)
        if self.bucket < 1:
            raise Refusal(f"bucket {self.bucket} is below 1")
        if max(counts) > self.bucket:
            raise Refusal(f"tokens {max(counts)} is over the bucket of {self.bucket}")
        if self.bucket > self.capacity:
            raise Refusal(f"bucket {self.bucket} is over the capacity of {self.capacity}")
        if self.hidden < HIDDEN_STEP or self.hidden % HIDDEN_STEP:
            raise Refusal(f"hidden {self.hidden} is not a positive multiple of {HIDDEN_STEP}")
        if not 1 <= self.topk <= MAX_TOPK:
            raise Refusal(f"top-k {self.topk} is outside 1 to {MAX_TOPK}")
        if self.dtype not in DTYPES:
            raise Refusal(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.routing not in ROUTINGS and not self.routing.endswith(".npz"):
            raise Refusal(f"routing {self.routing!r} is not one of {', '.join(ROUTINGS)} or the path of an .npz file")
        if self.experts < 0:
            raise Refusal(f"experts {self.experts} is below 1")
        if not 1 <= self.expert_alignment <= MAX_ALIGNMENT:
            raise Refusal(f"expert alignment {self.expert_alignment} is outside 1 to {MAX_ALIGNMENT}")
        if not 0 <= self.bias <= 2:
            raise Refusal(f"bias tensors {self.bias} is outside 0 to 2")
        if self.combine_weights and self.expanded:
            raise Refusal("weights travel back only in the non-expanded layout (upstream v2.0)")
        if not 0 <= self.dropped_share <= 1:
            raise Refusal(f"dropped share {self.dropped_share} is outside 0 to 1")
        if self.dropped_share and self.routing not in ROUTINGS:
            raise Refusal(f"dropped share {self.dropped_share} applies to drawn routes, not to those of a file")
        if self.seed < 0:
            raise Refusal(f"seed {self.seed} is below 0")

    def tokens_of(self, topology: Topology, rank: int) -> int:
        """T of `rank`; FFN ranks source none. Refuses a tuple that does not name every Attention rank."""
        if isinstance(self.tokens, tuple) and len(self.tokens) != topology.attention_ranks:
            raise Refusal(
                f"{len(self.tokens)} token counts for {topology.attention_ranks} Attention ranks of {topology.name}"
            )
        if rank not in topology.attention:
            return 0
        return self.tokens[rank - topology.ffn_ranks] if isinstance(self.tokens, tuple) else self.tokens

    def real_experts(self, topology: Topology) -> int:
        """Experts over all FFN ranks, refused where they break upstream's limits (upstream section 1)."""
        ffn = topology.ffn_ranks
        experts = self.experts or (128 if 128 % ffn == 0 else 32 * ffn)
        if experts % ffn:
            raise Refusal(f"experts {experts} is not divisible by {ffn} FFN ranks")
        per_rank = experts // ffn
        logical = topology.ranks * per_rank
        if per_rank > MAX_EXPERTS_PER_RANK:
            raise Refusal(f"experts per FFN rank {per_rank} is over {MAX_EXPERTS_PER_RANK}")
        if logical > MAX_EXPERTS:
            raise Refusal(f"logical experts {logical} ({topology.ranks} ranks x {per_rank}) is over {MAX_EXPERTS}")
        pool = per_rank if self.routing == "skew" else experts
        if self.topk > pool:
            raise Refusal(f"top-k {self.topk} is over the {pool} experts to draw from")
        return experts

    def experts_per_rank(self, topology: Topology) -> int:
        return self.real_experts(topology) // topology.ffn_ranks

    def source(self, topology: Topology, rank: int, exchange: int, data: bool = True) -> Source:
        """What `rank` (an Attention rank) sends in exchange number `exchange`; x, scales and bias only with `data`.

        random: k distinct experts, uniformly. skew: all k drawn from FFN rank 0's experts (inferred; the record
        does not define its skew). A file: its layer `exchange`, rows from a place that `seed` and `rank` choose.
        """
        tokens = self.tokens_of(topology, rank)
        experts = self.real_experts(topology)
        generator = np.random.default_rng([self.seed, exchange, rank])
        if self.routing in ROUTINGS:
            pool = self.experts_per_rank(topology) if self.routing == "skew" else experts
            order = np.argsort(generator.random((tokens, pool)), axis=1)[:, : self.topk]
            topk = np.ascontiguousarray(order, dtype=np.int64)
            weights = generator.random((tokens, self.topk), dtype=np.float32)
            if self.dropped_share:
                topk[generator.random(topk.shape) < self.dropped_share] = -1
        else:
            topk, weights = read_routes(self.routing, self.topk, experts).take(
                exchange, self.seed + rank - topology.ffn_ranks, tokens
            )
        if not data:
            return Source(None, topk, weights)
        x = _random_bf16(generator, (tokens, self.hidden))
        bias = _random_bf16(generator, (self.bias, tokens, self.hidden)) if self.bias else None
        if self.dtype == "bf16":
            return Source(x, topk, weights, bias=bias)
        codes, scales = quantise(bf16_values(x))
        return Source(codes, topk, weights, scales, bias)

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden row in BF16: what combine carries, whatever the dispatch dtype."""
        return 2 * self.hidden

    @cached_property
    def dispatch_bytes(self) -> int:
        """Bytes of one hidden row as dispatch carries it, scales apart."""
        return self.hidden if self.dtype == "fp8" else 2 * self.hidden

    @cached_property
    def packs(self) -> int:
        """4-byte scale packs of a dispatch row; 0 in BF16."""
        return scale_packs(self.hidden) if self.dtype == "fp8" else 0
