"""Tokens, buckets, experts and routes: values, limits, and the sentence of every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afdep_sim.errors import Refusal
from afdep_sim.formats import bf16_bits, bf16_values
from afdep_sim.model.machine import Machine
from afdep_sim.model.profiles import load_profile
from afdep_sim.plan import build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.workload import Source, Workload

LAYOUT = Topology.parse("2A2F")


# ---- BF16 -----------------------------------------------------------------------------------------------------------


def test_bf16_bits_round_to_nearest_even() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    values = (upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(bf16_bits(values), want)


def test_bf16_values_are_exact() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80]
    np.testing.assert_array_equal(bf16_values(bits), bits.view(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(bf16_bits(bf16_values(bits)), bits)


# ---- the bucket -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(0, 8), (1, 8), (8, 8), (9, 16), (128, 128), (129, 256), (2047, 2048), (2048, 2048), ((0, 33), 64), ((0, 0), 8)],
)
def test_the_default_bucket_is_the_next_power_of_two(tokens: int | tuple[int, ...], bucket: int) -> None:
    assert Workload(tokens).bucket == bucket


def test_a_bucket_may_be_given() -> None:
    assert Workload(5, bucket=5).bucket == 5
    assert Workload(5, bucket=2048).bucket == 2048


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens": -1}, "tokens -1 is below 0"),
        ({"tokens": (4, -2)}, r"tokens \(4, -2\) is below 0"),
        ({"tokens": ()}, r"tokens \(\)"),
        ({"tokens": 9, "bucket": 8}, "tokens 9 is over the bucket of 8"),
        ({"tokens": (1, 17), "bucket": 16}, "tokens 17 is over the bucket of 16"),
        ({"tokens": 0, "bucket": -1}, "bucket -1 is below 1"),
        ({"tokens": 2049}, "bucket 4096 is over the capacity of 2048"),
        ({"tokens": 1, "capacity": 4}, "bucket 8 is over the capacity of 4"),
        ({"hidden": 0}, "hidden 0 is not a positive multiple of 256"),
        ({"hidden": -256}, "hidden -256 is not a positive multiple of 256"),
        ({"hidden": 2049}, "hidden 2049 is not a positive multiple of 256"),
        ({"topk": 0}, "top-k 0 is outside 1 to 32"),
        ({"topk": 33}, "top-k 33 is outside 1 to 32"),
        ({"dtype": "int8"}, "dtype 'int8' is not one of bf16, fp8"),
        ({"bias": 3}, "bias tensors 3 is outside 0 to 2"),
        ({"dropped_share": 1.5}, "dropped share 1.5 is outside 0 to 1"),
        ({"seed": -1}, "seed -1 is below 0"),
        ({"combine_weights": True}, "weights travel back only in the non-expanded layout"),
        ({"tokens": ()}, r"tokens \(\) names no Attention rank"),
        ({"routing": "zipf"}, "routing 'zipf' is not one of random, skew"),
        ({"experts": -1}, "experts -1 is below 1"),
        ({"expert_alignment": 0}, "expert alignment 0 is outside 1 to 1024"),
    ],
)
def test_refusals_name_the_value_and_the_bound(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refusal, match=f"^{sentence}"):
        Workload(**{"tokens": 4, **fields})


def test_hidden_bytes_are_two_per_element() -> None:
    assert Workload(1, hidden=4096).hidden_bytes == 8192


# ---- tokens and experts ---------------------------------------------------------------------------------------------


def test_tokens_belong_to_attention_ranks() -> None:
    assert [Workload(7).tokens_of(LAYOUT, rank) for rank in range(4)] == [0, 0, 7, 7]
    assert [Workload((3, 5)).tokens_of(LAYOUT, rank) for rank in range(4)] == [0, 0, 3, 5]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_tuple_names_every_attention_rank(rank: int) -> None:
    with pytest.raises(Refusal, match="3 token counts for 2 Attention ranks of 2A2F"):
        Workload((1, 2, 3)).tokens_of(LAYOUT, rank)


@pytest.mark.parametrize(
    ("layout", "experts", "per_rank"),
    [("2A2F", 128, 64), ("3A1F", 128, 128), ("1A3F", 96, 32), ("8A8F", 128, 16), ("1A5F", 160, 32)],
)
def test_the_default_experts_are_divisible(layout: str, experts: int, per_rank: int) -> None:
    topology = Topology.parse(layout)
    assert Workload(1).real_experts(topology) == experts
    assert Workload(1).experts_per_rank(topology) == per_rank


@pytest.mark.parametrize(
    ("layout", "fields", "sentence"),
    [
        ("1A3F", {"experts": 128}, "experts 128 is not divisible by 3 FFN ranks"),
        ("1A1F", {"experts": 257}, "experts per FFN rank 257 is over 256"),
        ("8A1F", {"experts": 256}, r"logical experts 2304 \(9 ranks x 256\) is over 2048"),
        ("2A2F", {"experts": 4, "topk": 5}, "top-k 5 is over the 4 experts to draw from"),
        ("2A2F", {"experts": 8, "routing": "skew"}, "top-k 8 is over the 4 experts to draw from"),
    ],
)
def test_expert_limits(layout: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refusal, match=f"^{sentence}$"):
        Workload(1, **fields).real_experts(Topology.parse(layout))


def test_expert_limits_hold_at_the_bound() -> None:
    assert Workload(1, experts=256).real_experts(Topology.parse("7A1F")) == 256
    assert Workload(1, experts=8).real_experts(LAYOUT) == 8
    assert Workload(1, experts=16, routing="skew").experts_per_rank(LAYOUT) == 8


# ---- sources --------------------------------------------------------------------------------------------------------


def same(a: Source, b: Source) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("x", "topk", "weights"))


def test_a_source_has_the_stated_shapes_and_types() -> None:
    source = Workload((3, 5), hidden=512, topk=6).source(LAYOUT, 3, 0)
    assert source.x is not None
    assert source.x.shape == (5, 512)
    assert source.x.dtype == np.uint16
    assert source.topk.shape == (5, 6)
    assert source.topk.dtype == np.int64
    assert source.weights.shape == (5, 6)
    assert source.weights.dtype == np.float32
    assert source.topk.flags.c_contiguous
    assert np.isfinite(bf16_values(source.x)).all()
    assert ((source.weights >= 0) & (source.weights < 1)).all()


def test_a_timing_only_source_has_the_same_routes_and_no_rows() -> None:
    workload = Workload(9, hidden=256)
    with_rows, without = workload.source(LAYOUT, 2, 1), workload.source(LAYOUT, 2, 1, data=False)
    assert without.x is None
    np.testing.assert_array_equal(with_rows.topk, without.topk)
    np.testing.assert_array_equal(with_rows.weights, without.weights)


def test_every_draw_is_a_function_of_seed_exchange_and_source() -> None:
    workload = Workload(4, hidden=256)
    first = workload.source(LAYOUT, 2, 0)
    assert same(first, workload.source(LAYOUT, 2, 0))
    for other in (
        workload.source(LAYOUT, 3, 0),
        workload.source(LAYOUT, 2, 1),
        Workload(4, hidden=256, seed=1).source(LAYOUT, 2, 0),
    ):
        assert first.x is not None
        assert other.x is not None
        assert not np.array_equal(first.x, other.x)
        assert not np.array_equal(first.topk, other.topk)
        assert not np.array_equal(first.weights, other.weights)


@settings(max_examples=30, deadline=None)
@given(
    layout=st.sampled_from(["2A2F", "1A3F", "3A1F"]),
    tokens=st.integers(0, 40),
    topk=st.integers(1, 32),
    routing=st.sampled_from(["random", "skew"]),
    exchange=st.integers(0, 1000),
)
def test_routes_are_distinct_experts_of_the_pool(
    layout: str, tokens: int, topk: int, routing: str, exchange: int
) -> None:
    topology = Topology.parse(layout)
    workload = Workload(tokens, hidden=256, topk=topk, routing=routing)
    routes = workload.source(topology, topology.attention[-1], exchange, data=False).topk
    pool = workload.experts_per_rank(topology) if routing == "skew" else workload.real_experts(topology)
    assert routes.shape == (tokens, topk)
    assert all(len(set(route)) == topk for route in routes.tolist())
    assert ((routes >= 0) & (routes < pool)).all()


def test_random_routes_reach_every_expert_about_equally() -> None:
    routes = Workload(2048, hidden=256).source(LAYOUT, 2, 0, data=False).topk
    counts = np.bincount(routes.ravel(), minlength=128)
    assert counts.min() > 128 * 0.6
    assert counts.max() < 128 * 1.5


def test_skewed_routes_all_go_to_ffn_rank_0() -> None:
    workload = Workload(64, hidden=256, routing="skew")
    routes = workload.source(LAYOUT, 3, 0, data=False).topk
    assert set((routes // workload.experts_per_rank(LAYOUT)).ravel().tolist()) == {0}


def test_an_ffn_rank_sources_nothing() -> None:
    source = Workload(4, hidden=256).source(LAYOUT, 0, 0)
    assert source.topk.shape == (0, 8)
    assert source.x is not None
    assert source.x.shape == (0, 256)


# ---- kinds of values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens": 1.5}, "tokens 1.5 is not a whole number"),
        ({"tokens": "8"}, "tokens '8' is not a whole number"),
        ({"tokens": None}, "tokens None is not a whole number"),
        ({"tokens": (1, float("nan"))}, "tokens nan is not a whole number"),
        ({"tokens": True}, "tokens True is not a whole number"),
        ({"tokens": 8, "hidden": 2048.0}, "hidden 2048.0 is not a whole number"),
        ({"tokens": 8, "capacity": float("inf")}, "capacity inf is not a whole number"),
        ({"tokens": 8, "expanded": "no"}, "expanded 'no' is not True or False"),
        ({"tokens": 8, "routing": None}, "routing None is not a string"),
        ({"tokens": 8, "dropped_share": "half"}, "dropped share 'half' is not a number"),
    ],
)
def test_the_wrong_kind_of_value_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refusal, match=f"^{sentence}$"):
        Workload(**fields)


def test_numbers_of_any_integer_type_will_do() -> None:
    assert Workload(tokens=np.int64(8), hidden=np.uint16(512)) == Workload(tokens=8, hidden=512)
    assert Workload(tokens=(np.int32(3), 5)).tokens == (3, 5)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("weights", np.zeros((3, 8)), r"weights of rank 2 is float64 \(3, 8\), not float32 \(3, 8\)"),
        ("topk", np.zeros((2, 8), np.int64), r"topk of rank 2 is int64 \(2, 8\), not int64 \(3, 8\)"),
        ("topk", np.zeros((3, 8), np.int32), r"topk of rank 2 is int32 \(3, 8\), not int64 \(3, 8\)"),
        ("x", np.zeros((3, 256), np.float32), r"x of rank 2 is float32 \(3, 256\), not uint16 \(3, 256\)"),
        ("x", None, r"x of rank 2 is None, not uint16 \(3, 256\)"),
    ],
)
def test_inputs_of_another_shape_or_type_never_reach_a_machine(name: str, value: Any, sentence: str) -> None:
    plan = build_plan(LAYOUT, Workload(tokens=3, hidden=256), Protocol.afdep())
    inputs = plan.inputs()
    inputs[0][2] = replace(inputs[0][2], **{name: value})
    with pytest.raises(Refusal, match=f"^{sentence}$"):
        Machine(load_profile("H100")).run(plan, inputs)


def test_inputs_must_be_complete() -> None:
    plan = build_plan(LAYOUT, Workload(tokens=3, hidden=256), Protocol.afdep())
    machine = Machine(load_profile("H100"))
    with pytest.raises(Refusal, match="inputs for 0 exchanges, not for the plan's 1"):
        machine.run(plan, [])
    with pytest.raises(Refusal, match="inputs of exchange 0 lack Attention rank 2"):
        machine.run(plan, [{}])
    with pytest.raises(Refusal, match="a plan of no workload has no exchange"):
        build_plan(LAYOUT, [], Protocol.afdep())
