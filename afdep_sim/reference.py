"""The answer, in NumPy: what every exchange must return bit for bit, rounded once per stage (upstream section 5.1).

A row passes three stages, and each rounds once to BF16: the expert stand-in, the partial of one FFN rank, and the sum
of the partials on the Attention rank. BF16 values are uint16 bit patterns throughout, so equality is equality of bits.

Two experts exist. The *stand-in* is bf16(w * (x * s(e) + b(n))) for row x, expert e, exchange n and weight w: it tells
rows, experts, exchanges and weights apart, which an identity expert would not. The *precomputed* one is a fixed row per
expert; it stands for the expert in timed runs, where no kernel lies between dispatch and combine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afdep_sim.formats import dequantise
from afdep_sim.plan import Experts
from afdep_sim.run import Received
from afdep_sim.topology import Topology
from afdep_sim.workload import MAX_EXPERTS, Source, Workload

Bits = NDArray[np.uint16]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

CHUNK = 1 << 18
"""Elements of one FP32 temporary (1 MiB), so that the passes over a chunk stay in the cache."""

SCALE_STEPS = MAX_EXPERTS
SCALE_STRIDE = 1265
BIAS_STEPS = 256
BIAS_STRIDE = 159
"""Odd strides near the golden section of a power of two: a bijection whose neighbours lie far apart."""

UPPER = np.uint32(0xFFFF0000)
QUIET = np.uint32(0x00400000)
POISON = np.uint16(0x7FC0)
"""A BF16 NaN, for rows that nobody may read."""


class Mismatch(AssertionError):
    """A result differs from the answer; one sentence says where, what it is and what it should be."""


# ---- rounding and reduction -----------------------------------------------------------------------------------------


def _decode(bits: Bits) -> Floats:
    """uint16 [...] BF16 bit patterns -> a fresh float32 [...]; exact."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def _narrow(values: Floats) -> Bits:
    """float32 [...] that hold BF16 values -> uint16 [...], without rounding; `values` is left in ruins."""
    bits = values.view(np.uint32)
    bits >>= np.uint32(16)
    return bits.astype(np.uint16)


def _round(values: Floats) -> None:
    """Rounds float32 [...] to the nearest BF16 in place, ties to even; a NaN keeps its upper bits and becomes quiet."""
    if not values.size:
        return
    bits = values.view(np.uint32)
    if np.isnan(values.max()):
        nan = np.isnan(values)
        bits[nan] = (bits[nan] & UPPER) | QUIET
    half = bits >> np.uint32(16)
    half &= np.uint32(1)
    half += np.uint32(0x7FFF)
    bits += half
    bits &= UPPER


def round_bf16(values: Floats) -> Bits:
    """float32 [...] -> uint16 [...]: the nearest BF16, ties to even.

    Values beyond the largest BF16 become infinite. A NaN stays a NaN: the truncated pattern with its quiet bit set.
    """
    copy = np.array(values, dtype=np.float32, order="C")
    with np.errstate(invalid="ignore"):
        _round(copy)
    return _narrow(copy)


def reduce_rows(rows: Bits) -> Bits:
    """uint16 [k, ..., H] sources -> uint16 [..., H]: the reduction rule of every combine stage (upstream section 5.1).

    No source gives +0. One source is copied bit for bit. Otherwise an FP32 accumulator starts from source 0, takes the
    others in order, and is rounded once. For two sources that equals the packed BF16 add the kernels use: FP32 has
    24 >= 2 * 8 + 2 bits, so rounding the FP32 sum again is the same as rounding the exact sum.
    """
    if len(rows) == 0:
        return np.zeros(rows.shape[1:], np.uint16)
    if len(rows) == 1:
        return np.array(rows[0], np.uint16)
    total = _decode(rows[0])
    with np.errstate(over="ignore", invalid="ignore"):
        for row in rows[1:]:
            total += _decode(row)
        _round(total)
    return _narrow(total)


# ---- experts --------------------------------------------------------------------------------------------------------


def expert_scale(experts: int) -> Floats:
    """float32 [experts]: s(e), distinct multiples of 1/2048 in [0.5, 1.5); s(e) does not depend on `experts`.

    A BF16 value times s(e) is exact in FP32, so a compiler that fuses the multiplication and the addition of the
    stand-in gets the same bits. Raises ValueError over 2,048 experts (upstream section 1), where s would repeat.
    """
    if experts > SCALE_STEPS:
        raise ValueError(f"experts {experts} is over {SCALE_STEPS}")
    steps = np.arange(experts, dtype=np.int64) * SCALE_STRIDE % SCALE_STEPS
    return (0.5 + steps / SCALE_STEPS).astype(np.float32)


def exchange_bias(exchange: int) -> np.float32:
    """b(n), a multiple of 1/256 in (0, 1]: distinct over any 256 exchanges in a row, and far from its neighbours."""
    return np.float32((1 + exchange * BIAS_STRIDE % BIAS_STEPS) / BIAS_STEPS)


@lru_cache(maxsize=1)
def _scales() -> Floats:
    return expert_scale(SCALE_STEPS)


def _stand_in(x: Floats, expert: NDArray[np.integer], weight: Floats, bias: np.float32) -> None:
    """Turns float32 [n, H] rows into their expert's output in place: BF16 values, one rounding per operation."""
    x *= _scales()[expert][:, None]
    x += bias
    x *= weight[:, None]
    _round(x)


def _values(x: NDArray[Any], scales: NDArray[np.int32] | None) -> Floats:
    """The values of dispatched rows: uint16 BF16, or uint8 E4M3 with int32 [n, packs] scales -> float32 [n, H]."""
    return _decode(x) if scales is None else dequantise(x, scales)


def expert_rows(
    x: NDArray[Any],
    expert: NDArray[np.integer],
    weight: Floats,
    exchange: int,
    scales: NDArray[np.int32] | None = None,
    out: Bits | None = None,
) -> Bits:
    """The stand-in's output: [n, H] rows, int [n] global real experts, float32 [n] weights -> uint16 [n, H].

    x: uint16 BF16, or uint8 E4M3 with int32 [n, packs] `scales`. bf16(w * (x * s(e) + b(n))) in FP32, one rounding
    per operation. Written to `out` where it is given. Temporaries stay below a few MiB whatever n is.
    """
    rows, hidden = x.shape
    if out is None:
        out = np.empty((rows, hidden), np.uint16)
    bias = exchange_bias(exchange)
    step = max(1, CHUNK // max(1, hidden))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for at in range(0, rows, step):
            chunk = slice(at, at + step)
            values = _values(x[chunk], None if scales is None else scales[chunk])
            _stand_in(values, expert[chunk], weight[chunk], bias)
            out[chunk] = _narrow(values)
    return out


@lru_cache(maxsize=4)
def precomputed_rows(experts: int, hidden: int) -> Bits:
    """uint16 [experts, hidden]: one fixed random row per expert, read-only; finite, distinct, the same in every run.

    The row of expert e does not depend on `experts`.
    """
    generator = np.random.default_rng([0xAFD, hidden])
    rows = np.concatenate(
        [np.zeros((0, hidden), np.uint16)]
        + [round_bf16(generator.standard_normal((1, hidden), dtype=np.float32)) for _ in range(experts)]
    )
    rows.flags.writeable = False
    return rows


# ---- routes ---------------------------------------------------------------------------------------------------------


def _owners(topology: Topology, workload: Workload, topk: NDArray[np.integer]) -> Ints:
    """int [T, k] global experts -> int64 [T, k]: the FFN rank that holds each, -1 where there is no route."""
    return np.where(topk < 0, -1, topk.astype(np.int64) // workload.experts_per_rank(topology))


def _pack(groups: Ints, items: Ints, count: int) -> Ints:
    """Lists the items of each group, padded with -1: int64 [n] ascending groups and items -> int64 [count, longest]."""
    sizes = np.bincount(groups, minlength=count)
    starts = np.cumsum(sizes) - sizes
    lists = np.full((count, int(sizes.max(initial=0))), -1, np.int64)
    lists[groups, np.arange(len(groups)) - starts[groups]] = items
    return lists


def _reduce_lists(
    lists: Ints, rows_of: Callable[[Ints], Floats], hidden: int, start: Floats | None = None
) -> tuple[Floats, Ints]:
    """Reduces the rows of every list by the rule of `reduce_rows`.

    lists: int64 [n, m], -1 padded; rows_of: int64 [i] list entries -> a float32 [i, hidden] of BF16 values. Returns
    BF16 values as float32 [n, hidden], and int64 [n]: the list each row belongs to. Longer lists come first, so that
    the lists with a source at some position are always a prefix. One source needs no case of its own: `rows_of`
    returns rounded rows, and rounding changes neither a BF16 value nor a quiet NaN. start: float32 [n, hidden], what
    each sum starts from.
    """
    sizes = np.count_nonzero(lists >= 0, axis=1)
    order = np.argsort(-sizes, kind="stable")
    total = np.zeros((len(lists), hidden), np.float32) if start is None else start[order]
    for position in range(int(sizes.max(initial=0))):
        entries = lists[order[: np.count_nonzero(sizes > position)], position]
        rows = rows_of(entries)
        if position or start is not None:
            total[: len(entries)] += rows
        elif len(entries) == len(total):
            total = rows
        else:
            total[: len(entries)] = rows
    _round(total)
    return total, order


def combined(
    topology: Topology, workload: Workload, source: Source, exchange: int, experts: Experts = "stand_in"
) -> Bits:
    """What combine must return to the Attention rank that sent `source` in exchange number `exchange`: uint16 [T, H].

    Each FFN rank reduces the rows of its experts in ascending lane order to one BF16 partial; the partials are reduced
    in ascending order of their master lanes, the highest lane each rank holds (upstream sections 5.1 and 6). A token
    without a route gives +0. Bias tensors come first in the last sum, in order. Raises ValueError where the stand-in
    is asked for and `source` carries no rows.
    """
    if experts not in ("stand_in", "precomputed"):
        raise ValueError(f"experts {experts!r} is not 'stand_in' or 'precomputed'")
    if source.x is None and experts == "stand_in":
        raise ValueError("the expert stand-in needs rows, and this source carries none")
    hidden, (tokens, lanes) = workload.hidden, source.topk.shape
    out = np.zeros((tokens, hidden), np.uint16)

    owner = _owners(topology, workload, source.topk).ravel()
    routed = np.flatnonzero(owner >= 0)
    key = routed // lanes * topology.ffn_ranks + owner[routed]
    by_owner = np.argsort(key, kind="stable")
    keys, group = np.unique(key[by_owner], return_inverse=True)
    lanes_of_partial = _pack(group, routed[by_owner], len(keys))
    token_of_partial = keys // topology.ffn_ranks

    flat_expert, flat_weight = source.topk.ravel(), source.weights.ravel()
    bias = exchange_bias(exchange)
    table = precomputed_rows(workload.real_experts(topology), hidden) if experts == "precomputed" else None

    def expert_of(entries: Ints) -> Floats:
        if table is not None:
            return _decode(table[flat_expert[entries]])
        assert source.x is not None
        token = entries // lanes
        rows = _values(source.x[token], None if source.scales is None else source.scales[token])
        _stand_in(rows, flat_expert[entries], flat_weight[entries], bias)
        return rows

    step = max(1, CHUNK // (hidden * min(topology.ffn_ranks, lanes)))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for at in range(0, tokens, step):
            end = min(at + step, tokens)
            first, last = np.searchsorted(token_of_partial, (at, end))
            lists = lanes_of_partial[first:last]
            partials, order = _reduce_lists(lists, expert_of, hidden)
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            token, master = token_of_partial[first:last] - at, lists.max(axis=1, initial=-1)
            by_master = np.lexsort((master, token))
            partials_of_token = _pack(token[by_master], place[by_master], end - at)
            start = None
            if source.bias is not None:
                start = _decode(source.bias[0][at:end])
                for tensor in source.bias[1:]:
                    start += _decode(tensor[at:end])
            total, order = _reduce_lists(partials_of_token, partials.__getitem__, hidden, start)
            out[at + order] = _narrow(total)
    return out


def expert_partials(
    topology: Topology,
    workload: Workload,
    x: NDArray[Any],
    scales: NDArray[np.int32] | None,
    expert: NDArray[np.integer],
    weight: Floats,
    exchange: int,
    experts: Experts = "stand_in",
) -> Bits:
    """What the experts of one FFN rank return where rows are not expanded: one partial per received row.

    x: [n, H] received rows (and scales); expert: int [n, k] global experts, -1 where a lane's expert is elsewhere;
    weight: float32 [n, k]. Lanes are reduced in ascending order, as combine does in the expanded layout.
    """
    rows, lanes = expert.shape
    flat_expert, flat_weight, bias = expert.ravel(), weight.ravel(), exchange_bias(exchange)
    table = precomputed_rows(workload.real_experts(topology), workload.hidden) if experts == "precomputed" else None

    def expert_of(entries: Ints) -> Floats:
        if table is not None:
            return _decode(table[flat_expert[entries]])
        row = entries // lanes
        values = _values(x[row], None if scales is None else scales[row])
        _stand_in(values, flat_expert[entries], flat_weight[entries], bias)
        return values

    out = np.zeros((rows, workload.hidden), np.uint16)
    step = max(1, CHUNK // workload.hidden)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for at in range(0, rows, step):
            chunk = expert[at : at + step]
            row, lane = np.nonzero(chunk >= 0)
            total, order = _reduce_lists(
                _pack(row, (at + row) * lanes + lane, len(chunk)), expert_of, workload.hidden
            )
            out[at + order] = _narrow(total)
    return out


def rows_expected(
    topology: Topology, workload: Workload, sources: Mapping[int, Source]
) -> dict[tuple[int, int], int]:
    """(source rank, FFN rank) -> rows the first sends to the second: one per token with at least one expert there."""
    rows: dict[tuple[int, int], int] = {}
    for rank, source in sources.items():
        owner = _owners(topology, workload, source.topk)
        for ffn in topology.ffn:
            rows[rank, ffn] = int(np.count_nonzero((owner == ffn).any(axis=1)))
    return rows


def _blocks(
    topology: Topology, workload: Workload, rank: int, sources: Mapping[int, Source]
) -> tuple[Ints, Ints, Ints]:
    """The expert blocks of FFN `rank`: int64 [El] real counts, int64 [El] aligned starts, int64 [El] aligned sizes."""
    local = workload.experts_per_rank(topology)
    counts = np.zeros(local, np.int64)
    for source in sources.values():
        mine = source.topk[_owners(topology, workload, source.topk) == rank]
        counts += np.bincount(mine - rank * local, minlength=local)
    alignment = workload.expert_alignment
    sizes = (counts + alignment - 1) // alignment * alignment
    return counts, np.cumsum(sizes) - sizes, sizes


def precomputed_y(
    topology: Topology, workload: Workload, rank: int, sources: Mapping[int, Source], out: Bits | None = None
) -> Bits:
    """The expert output tensor of FFN `rank` in a timed run: uint16 [slots, H] up to the last aligned block.

    Every real slot of an expert's block holds that expert's precomputed row, whichever token racing puts there. Slots
    that only fill up the alignment hold NaN: nobody may read them. Written to `out` where it is given.
    """
    local = workload.experts_per_rank(topology)
    counts, starts, sizes = _blocks(topology, workload, rank, sources)
    table = precomputed_rows(workload.real_experts(topology), workload.hidden)[rank * local :]
    y = np.empty((int(sizes.sum()), workload.hidden), np.uint16) if out is None else out
    for expert in np.flatnonzero(counts):
        block = y[starts[expert] :][: sizes[expert]]
        block[: counts[expert]] = table[expert]
        block[counts[expert] :] = POISON
    return y


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_combined(
    topology: Topology,
    workload: Workload,
    source: Source,
    exchange: int,
    got: Bits,
    experts: Experts = "stand_in",
) -> None:
    """Raises `Mismatch` unless uint16 [T, H] `got` equals `combined`: it names the first wrong element and its bits."""
    want = combined(topology, workload, source, exchange, experts)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Mismatch(
            f"exchange {exchange}: the combined tensor is {got.dtype} {got.shape}, not {want.dtype} {want.shape}"
        )
    wrong = got != want
    if at := _first(wrong):
        token, element = at
        raise Mismatch(
            f"exchange {exchange}: token {token} element {element} is 0x{got[token, element]:04x}, "
            f"not 0x{want[token, element]:04x}; {np.count_nonzero(wrong.any(axis=1))} of {len(want)} rows are wrong"
        )


def _first(wrong: NDArray[np.bool_] | np.bool_) -> tuple[int, ...] | None:
    """The index of the first True in row-major order, None where there is none."""
    at = int(np.argmax(wrong)) if wrong.size else 0
    return tuple(int(i) for i in np.unravel_index(at, wrong.shape)) if wrong.any() else None


def _expect(name: str, got: NDArray[np.integer], want: NDArray[np.integer]) -> None:
    """Raises `Mismatch` at the first difference of two vectors."""
    if got.shape != want.shape:
        raise Mismatch(f"{name} has shape {got.shape}, not {want.shape}")
    if at := _first(got != want):
        raise Mismatch(f"{name}[{at[0]}] is {got[at]}, not {want[at]}")


def check_weights(source: Source, got: Floats) -> None:
    """Raises `Mismatch` unless float32 [T, k] `got` holds the weights of the routed lanes, and 0 elsewhere."""
    want = np.where(source.topk >= 0, source.weights, np.float32(0))
    if got.shape != want.shape:
        raise Mismatch(f"combined weights have shape {got.shape}, not {want.shape}")
    if at := _first(got.view(np.uint32) != want.view(np.uint32)):
        raise Mismatch(f"combined weight of token {at[0]} lane {at[1]} is {got[at]}, not {want[at]}")


def check_received(
    topology: Topology, workload: Workload, rank: int, sources: Mapping[int, Source], received: Received
) -> None:
    """Raises `Mismatch` unless FFN `rank` holds what `sources` sent (upstream section 4).

    sources: every Attention rank's `Source`, by global rank. Checked, in this order: psum_rank (inclusive rows per
    global source rank); psum_expert (per local expert the aligned start, plus the real count in the expanded layout;
    then the total of the aligned sizes); host counts; the metadata rows (source id = source rank * bucket + token,
    each exactly once and inside its source's segment; source rank * k + master lane). Expanded: a slot where the
    lane's expert is here and -1 elsewhere, every slot inside its expert's block and used once. Otherwise: the local
    experts. Then weights and rows, bit for bit; rows are not checked for a source without x.
    """
    where = f"FFN rank {rank}:"
    counts, starts, sizes = _blocks(topology, workload, rank, sources)
    rows = rows_expected(topology, workload, sources)
    per_rank = np.array([rows.get((source, rank), 0) for source in range(topology.ranks)], np.int64)
    psum_rank = np.cumsum(per_rank)
    real = counts if workload.expanded else 0
    _expect(f"{where} psum_rank", received.psum_rank, psum_rank)
    _expect(f"{where} psum_expert", received.psum_expert, np.append(starts + real, sizes.sum()))
    if received.host_counts is not None:
        _expect(f"{where} host_counts", received.host_counts, -np.append(per_rank, sizes) - 1)
    total = int(psum_rank[-1])
    if received.metadata.shape != (total, 2 + workload.topk):
        raise Mismatch(f"{where} the metadata has shape {received.metadata.shape}, not {(total, 2 + workload.topk)}")
    origin, token = _tokens_of_rows(where, topology, workload, psum_rank, sources, received)
    expert = np.full((total, workload.topk), -1, np.int64)
    weight = np.zeros((total, workload.topk), np.float32)
    for source_rank, source in sources.items():
        here = np.flatnonzero(origin == source_rank)
        expert[here], weight[here] = source.topk[token[here]], source.weights[token[here]]
    local = workload.experts_per_rank(topology)
    mine = (expert >= rank * local) & (expert < (rank + 1) * local)
    if at := _first(~mine.any(axis=1)):
        raise Mismatch(f"{where} row {at[0]} is token {token[at]} of rank {origin[at]}, which has no expert here")
    master = origin * workload.topk + workload.topk - 1 - np.argmax(mine[:, ::-1], axis=1)
    if at := _first(received.metadata[:, 1] != master):
        raise Mismatch(
            f"{where} row {at[0]} has source and master lane {received.metadata[at[0], 1]}, not {master[at]}"
        )
    if workload.expanded:
        row, lane, slot = _check_slots(where, rank * local, starts, counts, sizes, received, expert, mine, weight)
    else:
        row = slot = np.arange(total)
        lane = None
        _expect_table(where, "local expert", received.topk, np.where(mine, expert - rank * local, -1))
        _expect_table(where, "weight bits", received.weights.view(np.uint32), weight.view(np.uint32))
    _check_rows(where, workload, sources, received, origin, token, row, lane, slot)


def _expect_table(where: str, name: str, got: NDArray[np.integer] | None, want: NDArray[np.integer]) -> None:
    """Raises `Mismatch` at the first difference of two tables of rows and lanes."""
    if got is None or got.shape != want.shape:
        raise Mismatch(f"{where} the table of {name}s is missing or not of shape {want.shape}")
    if at := _first(got != want):
        raise Mismatch(f"{where} row {at[0]} lane {at[1]} has {name} {got[at]}, not {want[at]}")


def _tokens_of_rows(
    where: str,
    topology: Topology,
    workload: Workload,
    psum_rank: Ints,
    sources: Mapping[int, Source],
    received: Received,
) -> tuple[Ints, Ints]:
    """Which token each row is, by its metadata: int64 [n] source ranks and int64 [n] tokens, each pair once."""
    identity = received.metadata[:, 0].astype(np.int64)
    origin, token = np.divmod(identity, workload.bucket)
    segment = np.searchsorted(psum_rank, np.arange(len(identity)), side="right")
    if at := _first(origin != segment):
        raise Mismatch(f"{where} row {at[0]} names source rank {origin[at]} in the segment of rank {segment[at]}")
    sent = np.array([len(sources[r].topk) if r in sources else 0 for r in range(topology.ranks)], np.int64)[origin]
    if at := _first(token >= sent):
        raise Mismatch(
            f"{where} row {at[0]} names token {token[at]} of rank {origin[at]}, which sent {sent[at]} tokens"
        )
    ascending = np.sort(identity)
    if at := _first(ascending[1:] == ascending[:-1]):
        twice = np.flatnonzero(identity == ascending[at])
        raise Mismatch(
            f"{where} token {token[twice[0]]} of rank {origin[twice[0]]} is in row {twice[0]} and in row {twice[1]}"
        )
    return origin, token


def _check_slots(
    where: str,
    first_expert: int,
    starts: Ints,
    counts: Ints,
    sizes: Ints,
    received: Received,
    expert: Ints,
    mine: NDArray[np.bool_],
    weight: Floats,
) -> tuple[Ints, Ints, Ints]:
    """The expanded layout's slots and their weights -> int64 [m] rows, lanes and slots, one of each per copy."""
    metadata, slots = received.metadata.astype(np.int64), int(sizes.sum())
    if len(received.x) < slots or len(received.weights) < slots:
        raise Mismatch(
            f"{where} x has {len(received.x)} slots and weights have {len(received.weights)}, below {slots}"
        )
    if at := _first(~mine & (metadata[:, 2:] != -1)):
        raise Mismatch(
            f"{where} row {at[0]} lane {at[1]} has slot {metadata[:, 2:][at]}, but its expert {expert[at]} is not here"
        )
    row, lane = np.nonzero(mine)
    slot, block = metadata[row, 2 + lane], expert[mine] - first_expert
    begin, end = starts[block], starts[block] + counts[block]
    if at := _first((slot < begin) | (slot >= end)):
        raise Mismatch(
            f"{where} row {row[at]} lane {lane[at]} has slot {slot[at]}, outside [{begin[at]}, {end[at]}) "
            f"of expert {expert[mine][at]}"
        )
    uses = np.bincount(slot, minlength=slots)
    if at := _first(uses > 1):
        raise Mismatch(f"{where} slot {at[0]} is used {uses[at]} times")
    weight_bits, weight_wanted = received.weights[slot].view(np.uint32), weight[mine].view(np.uint32)
    if at := _first(weight_bits != weight_wanted):
        raise Mismatch(
            f"{where} row {row[at]} lane {lane[at]} slot {slot[at]} has weight 0x{weight_bits[at]:08x}, "
            f"not 0x{weight_wanted[at]:08x}"
        )
    return row, lane, slot


def _check_rows(
    where: str,
    workload: Workload,
    sources: Mapping[int, Source],
    received: Received,
    origin: Ints,
    token: Ints,
    row: Ints,
    lane: Ints | None,
    slot: Ints,
) -> None:
    """Every copy (received row `row[i]`, for `lane[i]` in `slot[i]` if expanded) equals its source's row and scales."""
    step = max(1, CHUNK // workload.hidden)
    for source_rank, source in sources.items():
        if source.x is None:
            continue
        entries = np.flatnonzero(origin[row] == source_rank)
        for chunk in np.split(entries, range(step, len(entries), step)):
            tensors = [("element", received.x, source.x)]
            if source.scales is not None and received.scales is not None:
                tensors.append(("scale pack", received.scales, source.scales))
            for name, held, sent in tensors:
                got, want = held[slot[chunk]], sent[token[row[chunk]]]
                if at := _first(got != want):
                    entry = chunk[at[0]]
                    copy = "" if lane is None else f" lane {lane[entry]} slot {slot[entry]}"
                    raise Mismatch(
                        f"{where} row {row[entry]}{copy} {name} {at[1]} is "
                        f"0x{got[at]:04x}, not 0x{want[at]:04x} of token {token[row[entry]]} of rank {source_rank}"
                    )
