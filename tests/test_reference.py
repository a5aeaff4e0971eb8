"""The reference against an oracle that works element by element, and the checks against corrupted results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from afdep_sim import reference
from afdep_sim.reference import Experts, Mismatch
from afdep_sim.run import Received
from afdep_sim.topology import Topology
from afdep_sim.workload import Source, Workload

LAYOUTS = ("2A2F", "1A3F", "3A1F")
MINUS_ZERO = 0x8000


def small(layout: str, topk: int = 4, tokens: int = 5, **more: int) -> tuple[Topology, Workload]:
    topology = Topology.parse(layout)
    experts = {1: 8, 2: 8, 3: 9}[topology.ffn_ranks]
    return topology, Workload(tokens, hidden=256, topk=topk, experts=experts, **more)  # type: ignore[arg-type]


def sources_of(topology: Topology, workload: Workload, exchange: int = 0, unrouted: float = 0.3) -> dict[int, Source]:
    """Sources with a share of routes dropped, a token without any (where there are two) and some zero weights."""
    sources = {}
    for rank in topology.attention:
        source = workload.source(topology, rank, exchange)
        generator = np.random.default_rng([rank, exchange])
        source.topk[generator.random(source.topk.shape) < unrouted] = -1
        if len(source.topk) > 1:
            source.topk[1] = -1
        source.weights[generator.random(source.weights.shape) < 0.1] = 0.0
        sources[rank] = source
    return sources


# ---- the oracle: one element at a time, float64 operations rounded once ---------------------------------------------


def single(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def half_bits(value: float) -> int:
    return int(np.array(np.float32(value)).astype(ml_dtypes.bfloat16).view(np.uint16))


def half_value(bits: int) -> float:
    return float(np.array(bits, np.uint16).view(ml_dtypes.bfloat16))


def oracle_reduce(sources: list[int]) -> int:
    if not sources:
        return 0
    if len(sources) == 1:
        return sources[0]
    total = half_value(sources[0])
    for bits in sources[1:]:
        total = single(total + half_value(bits))
    return half_bits(total)


def oracle(topology: Topology, workload: Workload, source: Source, exchange: int, experts: Experts) -> np.ndarray:
    total_experts = workload.real_experts(topology)
    scale = reference.expert_scale(total_experts)
    bias = float(reference.exchange_bias(exchange))
    table = reference.precomputed_rows(total_experts, workload.hidden)
    out = np.zeros((len(source.topk), workload.hidden), np.uint16)
    for token, route in enumerate(source.topk.tolist()):
        lanes_of: dict[int, list[int]] = {}
        for lane, expert in enumerate(route):
            if expert >= 0:
                lanes_of.setdefault(expert * topology.ffn_ranks // total_experts, []).append(lane)
        for element in range(workload.hidden):
            replies = []
            for lanes in sorted(lanes_of.values(), key=max):
                rows = []
                for lane in lanes:
                    expert = route[lane]
                    if experts == "precomputed":
                        rows.append(int(table[expert, element]))
                        continue
                    assert source.x is not None
                    scaled = single(half_value(source.x[token, element]) * float(scale[expert]))
                    rows.append(half_bits(single(float(source.weights[token, lane]) * single(scaled + bias))))
                replies.append(oracle_reduce(rows))
            out[token, element] = oracle_reduce(replies)
    return out


# ---- rounding -------------------------------------------------------------------------------------------------------


def test_round_bf16_equals_ml_dtypes_for_every_upper_half() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper | lower).view(np.float32)
    got = reference.round_bf16(values)
    nan = np.isnan(values)
    with np.errstate(invalid="ignore"):
        want = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(got[nan].view(ml_dtypes.bfloat16).astype(np.float32)).all()
    np.testing.assert_array_equal(got[nan], (values.view(np.uint32)[nan] >> 16) | 0x0040)


def test_round_bf16_leaves_its_argument_alone_and_takes_any_shape() -> None:
    values = np.array([[1.00390625], [3.4e38]], np.float32)
    before = values.copy()
    assert reference.round_bf16(values).tolist() == [[0x3F80], [0x7F80]]  # a tie to even, and an overflow
    np.testing.assert_array_equal(values, before)
    assert reference.round_bf16(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert reference.round_bf16(np.float32(-0.0)).item() == MINUS_ZERO  # type: ignore[arg-type]


def exact_sum(a: int, b: int) -> int:
    """The BF16 nearest to the exact sum of two finite BF16 patterns, in integers of 2**-133, ties to even."""
    scaled = [int(math.ldexp(half_value(bits), 133)) for bits in (a, b)]
    total = sum(scaled)
    if total == 0:
        return MINUS_ZERO if a == b == MINUS_ZERO else 0
    shift = max(0, abs(total).bit_length() - 8)
    quotient, rest = divmod(abs(total), 1 << shift)
    twice = 2 * rest
    quotient += twice > 1 << shift or (twice == 1 << shift and quotient % 2 == 1)
    sign = MINUS_ZERO if total < 0 else 0
    if quotient << shift >= 1 << (128 + 133):
        return sign | 0x7F80
    return sign | half_bits(math.ldexp(quotient, shift - 133))


def test_two_sources_equal_the_exact_sum_rounded_once() -> None:
    generator = np.random.default_rng(1)
    everywhere = generator.integers(0, 1 << 16, (2, 12_000)).astype(np.uint16)
    subnormal = (everywhere[:, :4_000] & 0x80FF).astype(np.uint16)
    near = everywhere.copy()  # exponents at most 12 apart, where ties and sticky bits decide
    exponent = np.clip((near[0] >> 7 & 0xFF).astype(np.int64) + generator.integers(-12, 13, near.shape[1]), 0, 254)
    near[1] = (near[1] & 0x807F) | exponent.astype(np.uint16) << 7
    pairs = np.concatenate([everywhere, subnormal, near], axis=1)
    pairs = pairs[:, ((pairs & 0x7F80) != 0x7F80).all(axis=0)]
    pairs = np.concatenate([pairs, [[0, 0, MINUS_ZERO, 0x3F80], [0, MINUS_ZERO, MINUS_ZERO, 0xBF80]]], axis=1)
    pairs = pairs.astype(np.uint16)
    got = reference.reduce_rows(pairs)
    want = [exact_sum(int(a), int(b)) for a, b in pairs.T]
    assert len(want) > 20_000
    np.testing.assert_array_equal(got, want)


# ---- reduction ------------------------------------------------------------------------------------------------------


def test_no_source_gives_plus_zero() -> None:
    got = reference.reduce_rows(np.zeros((0, 2, 256), np.uint16))
    assert got.dtype == np.uint16
    assert got.shape == (2, 256)
    assert not got.any()


def test_one_source_is_copied_bit_for_bit() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)[None]  # signalling NaNs and -0 among them
    got = reference.reduce_rows(every)
    np.testing.assert_array_equal(got, every[0])
    got[0] = 1
    assert every[0, 0] == 0


@pytest.mark.parametrize("count", [2, 3, 8])
def test_several_minus_zeros_stay_minus_zero(count: int) -> None:
    assert (reference.reduce_rows(np.full((count, 4), MINUS_ZERO, np.uint16)) == MINUS_ZERO).all()


def test_reduction_keeps_the_order_and_rounds_once() -> None:
    one, tiny = half_bits(1.0), half_bits(2.0**-8)
    # In FP32 the two halves of an ulp add up; rounding to BF16 in between would lose both.
    assert reference.reduce_rows(np.array([[one], [tiny], [tiny]], np.uint16)).item() == half_bits(1.0078125)
    big, small_ = half_bits(2.0**24), half_bits(1.0)
    minus = half_bits(-(2.0**24))
    assert reference.reduce_rows(np.array([[big], [small_], [minus]], np.uint16)).item() == 0
    assert reference.reduce_rows(np.array([[big], [minus], [small_]], np.uint16)).item() == small_


def test_reduction_of_infinities_and_nans_stays_silent() -> None:
    rows = np.array([[0x7F80, 0x7F7F, 0x7F81], [0xFF80, 0x7F7F, 0x3F80]], np.uint16)
    with np.errstate(all="raise"):
        got = reference.reduce_rows(rows)
    values = got.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.isnan(values).tolist() == [True, False, True]
    assert got[1] == 0x7F80


@pytest.mark.parametrize("count", range(9))
def test_reduction_equals_the_oracle(count: int) -> None:
    rows = reference.round_bf16(np.random.default_rng(count).standard_normal((count, 3, 64), dtype=np.float32))
    got = reference.reduce_rows(rows)
    want = [oracle_reduce(rows.reshape(count, 192)[:, i].tolist()) for i in range(192)]
    np.testing.assert_array_equal(got.ravel(), want)


# ---- experts --------------------------------------------------------------------------------------------------------


def test_scales_are_distinct_exact_and_independent_of_the_count() -> None:
    scale = reference.expert_scale(2048)
    assert scale.dtype == np.float32
    assert len(set(scale.tolist())) == 2048
    assert scale.min() >= 0.5
    assert scale.max() < 1.5
    np.testing.assert_array_equal(scale * 2048, np.rint(scale * 2048))
    np.testing.assert_array_equal(reference.expert_scale(96), scale[:96])
    # Neighbours and experts of equal local number stay apart by far more than the 2**-8 that BF16 resolves.
    for step in (1, 32, 64):
        assert np.abs(scale[step:128] - scale[: 128 - step]).min() > 2**-6


def test_more_experts_than_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="experts 2049 is over 2048"):
        reference.expert_scale(2049)


def test_biases_differ_between_exchanges() -> None:
    biases = [float(reference.exchange_bias(n)) for n in range(256)]
    assert isinstance(reference.exchange_bias(3), np.float32)
    assert len(set(biases)) == 256
    assert min(biases) > 0
    assert max(biases) == 1
    assert min(abs(a - b) for a, b in itertools.pairwise(biases)) > 0.25


def test_expert_rows_equal_the_oracle_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(7)
    x = generator.integers(0, 1 << 16, (7, 256)).astype(np.uint16)
    x[(x & 0x7F80) == 0x7F80] = 0x0001  # a subnormal instead of infinities and NaNs
    expert = generator.integers(0, 128, 7).astype(np.int32)
    weight = generator.standard_normal(7).astype(np.float32)
    bias, scale = float(reference.exchange_bias(9)), reference.expert_scale(128)
    want = [
        [
            half_bits(single(float(weight[i]) * single(single(half_value(bits) * float(scale[expert[i]])) + bias)))
            for bits in x[i].tolist()
        ]
        for i in range(7)
    ]
    before = x.copy()
    whole = reference.expert_rows(x, expert, weight, 9)
    np.testing.assert_array_equal(whole, want)
    np.testing.assert_array_equal(x, before)
    monkeypatch.setattr(reference, "CHUNK", 600)
    np.testing.assert_array_equal(reference.expert_rows(x, expert, weight, 9), whole)


def test_expert_rows_carry_nans_and_infinities_silently() -> None:
    x = np.array([[0x7F80, 0x7FFF, 0x7F7F, 0x3F80]], np.uint16)
    with np.errstate(all="raise"):
        got = reference.expert_rows(x, np.array([0]), np.array([4.0], np.float32), 0)
    values = got.view(ml_dtypes.bfloat16).astype(np.float32)[0]
    assert values[0] == np.inf
    assert np.isnan(values[1])
    assert values[2] == np.inf
    assert values[3] == 2 + 4 / 256
    assert reference.expert_rows(x[:0], np.zeros(0, np.int32), np.zeros(0, np.float32), 0).shape == (0, 4)


def test_the_stand_in_tells_experts_exchanges_and_weights_apart() -> None:
    topology, workload = Topology.parse("2A2F"), Workload(1, hidden=256)
    source = workload.source(topology, 2, 0)
    assert source.x is not None
    rows = np.repeat(source.x, 128, axis=0)
    weight = np.full(128, 0.5, np.float32)
    first = reference.expert_rows(rows, np.arange(128), weight, 0)
    assert len(np.unique(first, axis=0)) == 128
    assert not (first == reference.expert_rows(rows, np.arange(128), weight, 1)).all(axis=1).any()
    assert not (first == reference.expert_rows(rows, np.arange(128), weight * np.float32(1.1), 0)).all(axis=1).any()


def test_precomputed_rows_are_fixed_finite_and_distinct() -> None:
    rows = reference.precomputed_rows(128, 256)
    assert rows.shape == (128, 256)
    assert rows.dtype == np.uint16
    assert ((rows & 0x7F80) != 0x7F80).all()
    assert len(np.unique(rows, axis=0)) == 128
    np.testing.assert_array_equal(reference.precomputed_rows(96, 256), rows[:96])
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 0


# ---- combined -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["stand_in", "precomputed"])
@pytest.mark.parametrize("topk", range(1, 9))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_combined_equals_the_oracle(layout: str, topk: int, experts: Experts) -> None:
    topology, workload = small(layout, topk, tokens=4)
    source = sources_of(topology, workload, exchange=topk)[topology.attention[-1]]
    got = reference.combined(topology, workload, source, topk, experts)
    np.testing.assert_array_equal(got, oracle(topology, workload, source, topk, experts))
    assert got.dtype == np.uint16


def test_combined_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    topology, workload = small("1A3F", topk=8, tokens=37)
    source = sources_of(topology, workload)[3]
    whole = reference.combined(topology, workload, source, 2)
    for chunk in (1, 6000):
        monkeypatch.setattr(reference, "CHUNK", chunk)
        np.testing.assert_array_equal(reference.combined(topology, workload, source, 2), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_combined_is_reduce_rows_of_expert_rows(layout: str) -> None:
    topology, workload = small(layout, topk=8, tokens=600, bucket=1024)
    source = sources_of(topology, workload)[topology.ffn_ranks]
    assert source.x is not None
    got = reference.combined(topology, workload, source, 5)
    local = workload.experts_per_rank(topology)
    for token, route in enumerate(source.topk):
        rows = np.repeat(source.x[token : token + 1], 8, axis=0)
        outputs = reference.expert_rows(rows, np.maximum(route, 0), source.weights[token], 5)
        lanes = [np.flatnonzero((route >= 0) & (route // local == rank)) for rank in topology.ffn]
        replies = [reference.reduce_rows(outputs[j]) for j in sorted((j for j in lanes if j.size), key=max)]
        want = reference.reduce_rows(np.array(replies, np.uint16).reshape(-1, 256))
        np.testing.assert_array_equal(got[token], want)


def test_replies_are_added_in_the_order_of_their_master_lanes() -> None:
    # Rank partials 2**24, 1 and -2**24: the sum is 1 where the two large ones meet first, else 0.
    topology, workload = small("1A3F", topk=4, tokens=2)
    zero = half_bits(0.0)
    bias = float(reference.exchange_bias(0))
    x = np.full((2, 256), zero, np.uint16)
    weights = np.zeros((2, 4), np.float32)
    big, one = 2.0**24 / bias, 1.0 / bias
    # Token 0: rank 2 comes first by lowest lane and last by master lane. Token 1: rank 1 comes last, not rank 2.
    topk = np.array([[6, 0, 3, 7], [0, 6, 3, -1]], np.int32)
    weights[0] = [one, big, -big, 0.0]  # ranks 0 and 1 cancel before rank 2 comes
    weights[1] = [big, one, -big, 0.0]  # rank 2 is lost beside rank 0, then rank 1 cancels
    got = reference.combined(topology, workload, Source(x, topk, weights), 0)
    assert set(got[0].tolist()) == {half_bits(1.0)}
    assert set(got[1].tolist()) == {0}


def test_minus_zero_and_empty_routes() -> None:
    topology, workload = small("2A2F", topk=2, tokens=4)
    x = np.full((4, 256), half_bits(-64.0), np.uint16)
    topk = np.array([[0, -1], [-1, -1], [0, 1], [7, 0]], np.int32)
    source = Source(x, topk, np.zeros((4, 2), np.float32))  # 0 * a negative value is -0
    got = reference.combined(topology, workload, source, 0)
    assert [set(row) for row in got.tolist()] == [{MINUS_ZERO}, {0}, {MINUS_ZERO}, {MINUS_ZERO}]


def test_combined_of_no_tokens_is_empty() -> None:
    topology, workload = small("2A2F", tokens=0)
    assert reference.combined(topology, workload, workload.source(topology, 2, 0), 0).shape == (0, 256)


def test_combined_without_rows_needs_precomputed_experts() -> None:
    topology, workload = small("2A2F")
    source = workload.source(topology, 2, 0, data=False)
    assert reference.combined(topology, workload, source, 0, "precomputed").shape == (5, 256)
    with pytest.raises(ValueError, match="this source carries none"):
        reference.combined(topology, workload, source, 0)
    with pytest.raises(ValueError, match="experts 'identity' is not"):
        reference.combined(topology, workload, source, 0, "identity")  # type: ignore[arg-type]


def test_check_combined_names_the_first_wrong_element() -> None:
    topology, workload = small("2A2F")
    source = sources_of(topology, workload)[2]
    got = reference.combined(topology, workload, source, 3)
    reference.check_combined(topology, workload, source, 3, got)
    bad = got.copy()
    bad[2, 17] ^= 1
    bad[2, 200] ^= 1
    bad[4] = 0x7FC0
    sentence = rf"exchange 3: token 2 element 17 is 0x{bad[2, 17]:04x}, not 0x{got[2, 17]:04x}; 2 of 5 rows are wrong"
    with pytest.raises(Mismatch, match=sentence):
        reference.check_combined(topology, workload, source, 3, bad)
    with pytest.raises(Mismatch, match=r"exchange 4: token 0 element 0 .* rows are wrong"):
        reference.check_combined(topology, workload, source, 4, got)
    with pytest.raises(Mismatch, match=r"exchange 3: the combined tensor is uint16 \(4, 256\), not uint16 \(5, 256\)"):
        reference.check_combined(topology, workload, source, 3, got[:4])
    with pytest.raises(Mismatch, match="exchange 3"):
        reference.check_combined(topology, workload, source, 3, got, "precomputed")


def test_plus_zero_in_place_of_minus_zero_is_wrong() -> None:
    topology, workload = small("2A2F", topk=1, tokens=1)
    source = Source(np.full((1, 256), half_bits(-64.0), np.uint16), np.zeros((1, 1), np.int32), np.zeros((1, 1), "f4"))
    with pytest.raises(Mismatch, match="token 0 element 0 is 0x0000, not 0x8000; 1 of 1 rows are wrong"):
        reference.check_combined(topology, workload, source, 0, np.zeros((1, 256), np.uint16))


# ---- received -------------------------------------------------------------------------------------------------------


def receive(topology: Topology, workload: Workload, rank: int, sources: dict[int, Source]) -> Received:
    """What FFN `rank` should hold, token by token, with the slots of a block given out in a shuffled order."""
    generator = np.random.default_rng(rank)
    local, bucket, topk = workload.experts_per_rank(topology), workload.bucket, workload.topk
    mine = range(rank * local, (rank + 1) * local)
    pending = []
    psum_rank = []
    for source_rank in range(topology.ranks):
        if source_rank in sources:
            arrivals = [t for t, route in enumerate(sources[source_rank].topk.tolist()) if set(route) & set(mine)]
            pending += [(source_rank, int(token)) for token in generator.permutation(arrivals)]
        psum_rank.append(len(pending))
    slots: dict[int, list[int]] = {}
    psum_expert = []
    at = 0
    for expert in mine:
        count = sum(int((source.topk == expert).sum()) for source in sources.values())
        slots[expert] = generator.permutation(range(at, at + count)).tolist()
        psum_expert.append(at + count)
        at += -(-count // workload.expert_alignment) * workload.expert_alignment
    psum_expert.append(at)
    metadata = np.full((len(pending), 2 + topk), -1, np.int32)
    x = np.full((at, workload.hidden), 0x7FC0, np.uint16)
    weights = np.full(at, np.nan, np.float32)
    for row, (source_rank, token) in enumerate(pending):
        source = sources[source_rank]
        assert source.x is not None
        metadata[row, 0] = source_rank * bucket + token
        for lane, expert in enumerate(source.topk[token].tolist()):
            if expert in mine:
                slot = slots[expert].pop()
                metadata[row, 1] = source_rank * topk + lane
                metadata[row, 2 + lane] = slot
                x[slot] = source.x[token]
                weights[slot] = source.weights[token, lane]
    return Received(np.array(psum_rank), np.array(psum_expert), metadata, x, weights)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_received_accepts_what_is_right(layout: str, alignment: int) -> None:
    topology, workload = small(layout, topk=5, expert_alignment=alignment)
    sources = sources_of(topology, workload)
    rows = reference.rows_expected(topology, workload, sources)
    assert set(rows) == {(source, ffn) for source in topology.attention for ffn in topology.ffn}
    for rank in topology.ffn:
        received = receive(topology, workload, rank, sources)
        reference.check_received(topology, workload, rank, sources, received)
        per_source = np.diff(received.psum_rank, prepend=0)
        assert [rows[source, rank] for source in topology.attention] == per_source[topology.ffn_ranks :].tolist()
        received.x = np.concatenate([received.x, received.x])  # more of the tensor than is used
        received.weights = np.concatenate([received.weights, received.weights])
        reference.check_received(topology, workload, rank, sources, received)


def test_check_received_accepts_nothing_at_all() -> None:
    topology, workload = small("2A2F", tokens=0)
    sources = sources_of(topology, workload)
    empty = Received(
        np.zeros(4, np.int64), np.zeros(5, np.int64), np.zeros((0, 6), np.int32), np.zeros((0, 256), np.uint16),
        np.zeros(0, np.float32),
    )  # fmt: skip
    reference.check_received(topology, workload, 0, sources, empty)
    assert set(reference.rows_expected(topology, workload, sources).values()) == {0}


def test_check_received_accepts_uneven_sources_and_sources_without_rows() -> None:
    topology = Topology.parse("3A1F")
    workload = Workload((0, 3, 9), hidden=256, topk=3, experts=8, expert_alignment=8)
    sources = sources_of(topology, workload, unrouted=0.0)
    received = receive(topology, workload, 0, sources)
    reference.check_received(topology, workload, 0, sources, received)
    assert reference.rows_expected(topology, workload, sources) == {(1, 0): 0, (2, 0): 2, (3, 0): 8}
    bare = {rank: Source(None, source.topk, source.weights) for rank, source in sources.items()}
    received.x[:] = 0
    reference.check_received(topology, workload, 0, bare, received)


# Rank 1 of 2A2F holds experts 4 to 7; bucket 8, top-k 3, alignment 4. Lanes with experts there:
#   rank 2: token 0 lanes 0, 2; token 1 lane 1; token 2 none (experts 0 and 1 only); token 3 lanes 0, 1
#   rank 3: token 0 lane 2; token 1 lanes 0, 1, 2
ROUTES = {
    2: [[4, 0, 5], [1, 4, -1], [0, 1, -1], [5, 6, 2]],
    3: [[0, 1, 6], [6, 5, 4]],
}


def known() -> tuple[Topology, Workload, dict[int, Source], Received]:
    """The routes above, received in token order, so that every number in a sentence is known."""
    topology = Topology.parse("2A2F")
    workload = Workload((4, 2), hidden=256, topk=3, experts=8, expert_alignment=4)
    sources = {
        rank: Source(workload.source(topology, rank, 0).x, np.array(route, np.int32), np.zeros((len(route), 3), "f4"))
        for rank, route in ROUTES.items()
    }
    for rank, source in sources.items():
        source.weights[:] = np.arange(source.weights.size).reshape(source.weights.shape) + 100 * rank
    metadata = [
        [16, 8, 0, -1, 4],
        [17, 7, -1, 1, -1],
        [19, 7, 5, 8, -1],
        [24, 11, -1, -1, 9],
        [25, 11, 10, 6, 2],
    ]
    received = receive(topology, workload, 1, sources)
    received.metadata = np.array(metadata, np.int32)
    for source_id, _, *slots in metadata:
        rank, token = divmod(source_id, 8)
        for lane, slot in enumerate(slots):
            if slot >= 0:
                x = sources[rank].x
                assert x is not None
                received.x[slot] = x[token]
                received.weights[slot] = sources[rank].weights[token, lane]
    return topology, workload, sources, received


def test_the_known_case_is_right() -> None:
    topology, workload, sources, received = known()
    assert received.psum_rank.tolist() == [0, 0, 3, 5]
    assert received.psum_expert.tolist() == [3, 7, 11, 12, 12]
    reference.check_received(topology, workload, 1, sources, received)


def psum_rank(received: Received) -> None:
    received.psum_rank[2] += 1


def psum_rank_shape(received: Received) -> None:
    received.psum_rank = received.psum_rank[:3]


def psum_expert(received: Received) -> None:
    received.psum_expert[1] = 4  # the start, as if the epilogue had counted nothing


def psum_expert_total(received: Received) -> None:
    received.psum_expert[4] = 11


def too_few_rows(received: Received) -> None:
    received.metadata = received.metadata[:4]


def too_few_slots(received: Received) -> None:
    received.x = received.x[:11]


def wrong_segment(received: Received) -> None:
    received.metadata[[2, 3]] = received.metadata[[3, 2]]


def negative_source(received: Received) -> None:
    received.metadata[0, 0] = -1


def beyond_the_sent(received: Received) -> None:
    received.metadata[3, 0] = 3 * 8 + 2


def twice(received: Received) -> None:
    received.metadata[2] = received.metadata[0]


def no_expert_here(received: Received) -> None:
    received.metadata[1, 0] = 18


def master_lane(received: Received) -> None:
    received.metadata[0, 1] = 6  # the lowest lane instead of the highest


def slot_elsewhere(received: Received) -> None:
    received.metadata[1, 2] = 1


def slot_missing(received: Received) -> None:
    received.metadata[0, 4] = -1


def swap_across_experts(received: Received) -> None:
    received.metadata[0, [2, 4]] = received.metadata[0, [4, 2]]


def slot_in_the_gap(received: Received) -> None:
    received.metadata[1, 3] = 3


def slot_shared(received: Received) -> None:
    received.metadata[1, 3] = 0


def weight(received: Received) -> None:
    received.weights[8] = 0.0


def weight_sign(received: Received) -> None:
    received.weights[0] = -received.weights[0]


def stale_row(received: Received) -> None:
    received.x[9, 77:] ^= 1


def swap_rows(received: Received) -> None:
    received.x[[0, 1]] = received.x[[1, 0]]


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (psum_rank, r"psum_rank\[2\] is 4, not 3"),
        (psum_rank_shape, r"psum_rank has shape \(3,\), not \(4,\)"),
        (psum_expert, r"psum_expert\[1\] is 4, not 7"),
        (psum_expert_total, r"psum_expert\[4\] is 11, not 12"),
        (too_few_rows, r"the metadata has shape \(4, 5\), not \(5, 5\)"),
        (too_few_slots, r"x has 11 slots and weights have 12, below 12"),
        (wrong_segment, r"row 2 names source rank 3 in the segment of rank 2"),
        (negative_source, r"row 0 names source rank -1 in the segment of rank 2"),
        (beyond_the_sent, r"row 3 names token 2 of rank 3, which sent 2 tokens"),
        (twice, r"token 0 of rank 2 is in row 0 and in row 2"),
        (no_expert_here, r"row 1 is token 2 of rank 2, which has no expert here"),
        (master_lane, r"row 0 has source and master lane 6, not 8"),
        (slot_elsewhere, r"row 1 lane 0 has slot 1, but its expert 1 is not here"),
        (slot_missing, r"row 0 lane 2 has slot -1, outside \[4, 7\) of expert 5"),
        (swap_across_experts, r"row 0 lane 0 has slot 4, outside \[0, 3\) of expert 4"),
        (slot_in_the_gap, r"row 1 lane 1 has slot 3, outside \[0, 3\) of expert 4"),
        (slot_shared, r"slot 0 is used 2 times"),
        (weight, r"row 2 lane 1 slot 8 has weight 0x00000000, not 0x43520000"),
        (weight_sign, r"row 0 lane 0 slot 0 has weight 0xc3480000, not 0x43480000"),
        (stale_row, r"row 3 lane 2 slot 9 element 77 is 0x[0-9a-f]{4}, not 0x[0-9a-f]{4} of token 0 of rank 3"),
        (swap_rows, r"row 0 lane 0 slot 0 element 0 is 0x[0-9a-f]{4}, not 0x[0-9a-f]{4} of token 0 of rank 2"),
    ],
)
def test_check_received_names_what_is_wrong(corrupt: Callable[[Received], None], sentence: str) -> None:
    topology, workload, sources, received = known()
    corrupt(received)
    with pytest.raises(Mismatch, match=f"^FFN rank 1: {sentence}$"):
        reference.check_received(topology, workload, 1, sources, received)


def test_the_first_wrong_row_is_found_behind_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", 512)
    topology, workload, sources, received = known()
    reference.check_received(topology, workload, 1, sources, received)
    received.x[8, 255] ^= 0x8000
    with pytest.raises(Mismatch, match="row 2 lane 1 slot 8 element 255 is"):
        reference.check_received(topology, workload, 1, sources, received)


def test_precomputed_y_follows_the_blocks() -> None:
    topology, workload, sources, _ = known()
    y = reference.precomputed_y(topology, workload, 1, sources)
    table = reference.precomputed_rows(8, 256)
    blocks = [4] * 3 + [None] + [5] * 3 + [None] + [6] * 3 + [None]
    assert y.shape == (12, 256)
    for slot, expert in enumerate(blocks):
        if expert is None:
            assert np.isnan(y[slot].view(ml_dtypes.bfloat16).astype(np.float32)).all()
        else:
            np.testing.assert_array_equal(y[slot], table[expert])
