"""One NVLink domain in full: layouts, dtypes, layouts of the inbox and of the received rows, controls, odd traffic.

Every run of this file compares every row of every exchange with the reference, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers import (
    BASIC_ARMS,
    CONTROL_ARMS,
    H100,
    Inputs,
    assert_equal_events,
    check_outputs,
    describe,
    make_plan,
    replay,
    run_checked,
    run_timed,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afdep_sim.errors import Refusal
from afdep_sim.model.machine import Machine
from afdep_sim.model.rows import RouteError
from afdep_sim.plan import Plan, build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.reference import check_weights
from afdep_sim.topology import Topology
from afdep_sim.window import WORDS
from afdep_sim.workload import Workload

LAYOUTS = ("1A1F", "2A2F", "3A1F", "1A3F", "2A1F", "5A1F", "3A2F", "5A2F", "4A4F", "6A2F", "7A1F")
TOKENS = (0, 1, 7, 8, 33, 128)
ODD_SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "fp8"},
    {"expanded": False},
    {"dtype": "fp8", "expanded": False, "combine_weights": True, "bias": 2},
    {"expert_alignment": 16, "host_counts": True, "bias": 1},
    {"dtype": "fp8", "dropped_share": 0.4, "expert_alignment": 3},
)


def check(plan: Plan, inputs: Inputs | None = None, **machine: Any) -> None:
    """Run and compare everything, weights and words at rest included."""
    inputs = plan.inputs() if inputs is None else inputs
    run = run_checked(plan, inputs=inputs, **machine)
    with replay(describe(plan)):
        for number, exchange in enumerate(plan.exchanges):
            if exchange.workload.combine_weights:
                for rank in plan.topology.attention:
                    check_weights(inputs[number][rank], run.combined_weights[number][rank])
        at = 0
        for word in WORDS:
            if word.kind == "cleared":
                for words in run.words:
                    assert not words[at : at + word.count].any(), f"{word.name} is not cleared"
            at = (8 * (at + word.count) + 127) // 128 * 16


# ---- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_dtype_and_token_count(layout: str) -> None:
    """Both arms and both dtypes at every T; the odd shapes go round, so that each meets each T on some layout."""
    turn = LAYOUTS.index(layout)
    for at, (arm, dtype, tokens) in enumerate(product(BASIC_ARMS, ("bf16", "fp8"), TOKENS)):
        shape = {"dtype": dtype, **ODD_SHAPES[(at + turn) % len(ODD_SHAPES)]}
        check(make_plan(layout, arm, tokens, exchanges=2, **shape))


@pytest.mark.parametrize("arm", CONTROL_ARMS)
def test_every_control_on_every_layout(arm: str) -> None:
    for at, layout in enumerate(LAYOUTS):
        check(make_plan(layout, arm, TOKENS[at % len(TOKENS)] + 1, exchanges=2, **ODD_SHAPES[at % len(ODD_SHAPES)]))


@pytest.mark.parametrize("layout", ["1A1F", "2A2F", "3A1F", "5A2F", "6A6F"])
def test_the_top_k_layout(layout: str) -> None:
    """Replies in the region of their master lane: with more ranks than top-k, or because a switch says so."""
    for arm, shape in product(BASIC_ARMS, ODD_SHAPES):
        check(make_plan(layout, f"{arm}+dev:topk_layout", 9, exchanges=2, **shape))
    check(make_plan(layout, "afdep", 9, exchanges=2, topk=1))


@pytest.mark.parametrize("topk", [1, 2, 3, 5, 8, 16, 31, 32])
def test_every_top_k(topk: int) -> None:
    for layout, dtype in (("2A2F", "bf16"), ("1A3F", "fp8")):
        for arm in BASIC_ARMS:
            check(make_plan(layout, arm, 9, exchanges=2, topk=topk, dtype=dtype))


@pytest.mark.parametrize("sms", [7, 23, 24, 64, 132])
def test_transport_sms(sms: int) -> None:
    for arm in (*BASIC_ARMS, "afdep+AFDEP_GRID_SYNC_EXIT=1"):
        for tokens in (1, 33):
            check(make_plan("2A2F", arm, tokens, exchanges=2, sms=sms))


@pytest.mark.parametrize("hidden", [2048, 4096, 7168, 8192])
def test_hidden_sizes(hidden: int) -> None:
    for dtype in ("bf16", "fp8"):
        check(make_plan("2A2F", "afdep", 7, exchanges=2, hidden=hidden, dtype=dtype))
        check(make_plan("2A1F", "afdep+COLLECT_VIEW", 7, exchanges=2, hidden=hidden, dtype=dtype))
    check(make_plan("2A2F", "fastafd_m2n", 7, exchanges=2, hidden=hidden, dtype="fp8", expanded=False))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_two_thousand_tokens(dtype: str) -> None:
    check(make_plan("3A1F", "afdep", 2048, exchanges=1, dtype=dtype))


# ---- odd traffic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", range(8))
def test_every_subset_of_empty_sources(empty: int) -> None:
    tokens = tuple(0 if empty >> source & 1 else 9 + source for source in range(3))
    for arm in (*BASIC_ARMS, "afdep+AFDEP_UNION_NOTIFY=1", "afdep+COLLECT_VIEW"):
        check(make_plan("3A1F", arm, tokens, exchanges=3))


@pytest.mark.parametrize("arm", [*BASIC_ARMS, *CONTROL_ARMS])
def test_an_ffn_rank_that_receives_nothing_and_tokens_without_routes(arm: str) -> None:
    check(make_plan("2A2F", arm, 17, exchanges=3, routing="skew"))
    check(make_plan("1A3F", arm, 17, exchanges=3, routing="skew", dropped_share=0.5))
    check(make_plan("2A2F", arm, 17, exchanges=3, dropped_share=1.0))


@pytest.mark.parametrize("arm", BASIC_ARMS)
def test_one_token_beside_full_sources(arm: str) -> None:
    check(make_plan("3A1F", arm, (128, 1, 128), exchanges=3, bucket=128))
    check(make_plan("3A2F", arm, (1, 64, 0), exchanges=3, bucket=64, dtype="fp8"))


@pytest.mark.parametrize("arm", [*BASIC_ARMS, *CONTROL_ARMS])
def test_late_ranks_and_late_replies(arm: str) -> None:
    """50 us late, many exchanges' worth: no order may rest on ranks being about as fast as each other."""
    late = 50_000.0
    plan = make_plan("2A2F", arm, 33, exchanges=4)
    for rank, kernel in product(range(4), ("dispatch", "combine")):
        check(plan, delays={(rank, kernel): late})
    check(plan, delays={(0, "combine"): late, (3, "dispatch"): late, (1, "copy_epilogue"): late})
    check(plan, profile=H100.scaled(launch_skew_ns=200))


@pytest.mark.parametrize("arm", [*BASIC_ARMS, *CONTROL_ARMS])
def test_buckets_change_between_exchanges(arm: str) -> None:
    """Region strides follow the bucket, so every range of the window moves from one exchange to the next."""
    topology = Topology.parse("2A2F")
    small = Workload(tokens=8, hidden=256)
    buckets = [small, replace(small, tokens=33, bucket=64), replace(small, tokens=(128, 1), bucket=128), small]
    check(build_plan(topology, [*buckets, *buckets], Protocol.parse(arm)))
    full = [replace(w, bucket=2048) if at % 2 else w for at, w in enumerate(buckets)]
    check(build_plan(topology, full, Protocol.parse(arm)))


def test_one_plan_has_one_row_shape() -> None:
    shapes = [Workload(tokens=8, hidden=256), Workload(tokens=8, hidden=512)]
    with pytest.raises(Refusal, match=r"2 row shapes \(hidden and dtype\), more than 1"):
        build_plan(Topology.parse("2A2F"), shapes, Protocol.afdep())


# ---- the collect view ------------------------------------------------------------------------------------------------


def test_the_view_replaces_the_copy_and_shows_zeros_for_tokens_without_routes() -> None:
    for layout, dtype in product(("1A1F", "2A1F", "7A1F"), ("bf16", "fp8")):
        plan = make_plan(layout, "afdep+COLLECT_VIEW", 20, exchanges=4, dropped_share=0.85, dtype=dtype)
        attention = plan.topology.attention[0]
        assert [launch.kernel for launch in plan.exchanges[0].streams[attention]] == ["dispatch", "combine"]
        inputs = plan.inputs()
        assert any((inputs[n][attention].topk < 0).all(axis=1).any() for n in range(4)), "no token without a route"
        check(plan, inputs)


@pytest.mark.parametrize(
    ("layout", "arm", "shape"),
    [
        ("2A2F", "afdep+COLLECT_VIEW", {}),
        ("2A1F", "afdep+COLLECT_VIEW", {"bias": 1}),
        ("2A1F", "afdep+COLLECT_VIEW", {"expanded": False, "combine_weights": True}),
        ("2A1F", "afdep+COLLECT_VIEW+dev:topk_layout", {}),
        ("2A1F", "fastafd_m2n+COLLECT_VIEW", {}),
    ],
)
def test_where_there_can_be_no_view_the_ordinary_result_is_returned(
    layout: str, arm: str, shape: dict[str, Any]
) -> None:
    plan = make_plan(layout, arm, 9, exchanges=3, dropped_share=0.5, **shape)
    attention = plan.topology.attention[0]
    assert plan.exchanges[0].streams[attention][-1].kernel == "reduce_epilogue"
    check(plan)


def test_a_view_ends_with_the_next_source_dispatch() -> None:
    """Exchange 1 zeroes the row of a token that has lost its route, and replies overwrite the others."""
    plan = make_plan("2A1F", "afdep+COLLECT_VIEW", 4, exchanges=2)
    inputs = plan.inputs()
    for source in inputs[1].values():
        source.topk[2] = -1
    seen: dict[int, np.ndarray] = {}
    run = run_checked(plan, inputs=inputs)
    for rank in plan.topology.attention:
        seen[rank] = run.combined[0][rank]
        assert seen[rank][2].any()
        assert not run.combined[1][rank][2].any()
        assert (run.combined[1][rank][3] != seen[rank][3]).any()


# ---- route checks in the kernel --------------------------------------------------------------------------------------

INVALID = {
    "dummy": (128, "outside 0 to 127"),
    "duplicate": (None, "which the token has already"),
    "negative": (-2, "outside 0 to 127"),
    "wide": ((1 << 32) + 5, "outside 0 to 127"),
}
"""Record section 8: an Attention rank's dummy, an expert twice, a negative that is not -1, an id over 32 bits."""


@pytest.mark.parametrize("exchanges", [1, 3], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_route_stops_its_source_before_anything_is_sent(kind: str, exchanges: int) -> None:
    """The eight cases of record section 8: alone, and in the last exchange of a chain."""
    value, sentence = INVALID[kind]
    plan = make_plan("1A2F", "afdep", 1, exchanges=exchanges)
    inputs = plan.inputs()
    topk = inputs[-1][2].topk
    topk[0, 6] = topk[0, 1] if value is None else value
    reached: list[str] = []

    def observe(what: str, rank: int, offset: int, size: int, agent: int, time_ns: float, exchange: int) -> None:
        if exchange == exchanges - 1 and what in ("land", "set"):
            reached.append(f"{what} rank {rank} offset {offset}")

    with pytest.raises(RouteError, match=rf"rank 2 dispatch .* token 0 lane 6 has expert {topk[0, 6]}, {sentence}"):
        Machine(H100, observer=observe).run(plan, inputs)
    assert reached == []


def test_upstream_does_not_check_routes() -> None:
    """M2N's kernels validate nothing (upstream section 3.1): a duplicate goes through to the copy epilogue's slots."""
    plan = make_plan("2A2F", "fastafd_m2n", 5)
    inputs = plan.inputs()
    inputs[0][3].topk[4, 6] = inputs[0][3].topk[4, 1]
    run = Machine(H100).run(plan, inputs)
    assert run.combined[0][3].shape == (5, 256)


# ---- equal events ----------------------------------------------------------------------------------------------------


def equal_plans(every: int, offset: int) -> list[Plan]:
    """A slice of the matrix: each plan of it runs collapsed and in full."""
    arms = (*BASIC_ARMS, *CONTROL_ARMS, "afdep+dev:topk_layout", "afdep+COLLECT_VIEW")
    cases = [
        (layout, arm, tokens, shape)
        for layout, arm, tokens, shape in product(LAYOUTS, arms, (0, 1, 33), ODD_SHAPES)
    ]
    return [make_plan(la, arm, t, exchanges=2, **shape) for la, arm, t, shape in cases[offset::every]]


def assert_collapse_is_invisible(plan: Plan) -> None:
    collapsed = run_timed(plan)
    assert_equal_events(collapsed, run_timed(plan, collapse=False), f"collapsed and full run of {describe(plan)}")


def test_collapsed_and_full_runs_are_equal() -> None:
    for plan in equal_plans(every=223, offset=11):
        assert_collapse_is_invisible(plan)


@pytest.mark.parametrize("topk", [8, 15, 16, 18, 19])
def test_payload_is_told_from_metadata_whatever_sizes_coincide(topk: int) -> None:
    """At hidden 256, FP8 and top-k 16 to 18 a whole dispatch row is as long as a BF16 hidden row."""
    for arm in BASIC_ARMS:
        plan = make_plan("2A2F", arm, 33, exchanges=2, dtype="fp8", topk=topk)
        inputs = plan.inputs()
        with_data = run_checked(plan, inputs=inputs).events
        assert_equal_events(with_data, run_timed(plan, inputs=inputs), f"data and timing-only run of {describe(plan)}")


@pytest.mark.soak
@pytest.mark.parametrize("offset", range(16))
def test_collapsed_and_full_runs_are_equal_over_the_matrix(offset: int) -> None:
    for plan in equal_plans(every=16, offset=offset):
        assert_collapse_is_invisible(plan)


# ---- configurations nobody thought of --------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ffn = draw(st.integers(1, 4))
    attention = draw(st.integers(1, 5))
    per_rank = draw(st.sampled_from([1, 2, 8, 32]))
    experts = ffn * per_rank
    topk = draw(st.integers(1, min(20, experts)))
    expanded = draw(st.booleans())
    switches = draw(st.sets(st.sampled_from([arm.removeprefix("afdep+") for arm in CONTROL_ARMS])))
    words = sorted(switches) + draw(st.sampled_from([[], ["COLLECT_VIEW"], ["dev:topk_layout"]]))
    arm = "+".join([draw(st.sampled_from(BASIC_ARMS)), *words])
    work = Workload(
        tokens=tuple(draw(st.lists(st.integers(0, 40), min_size=attention, max_size=attention))),
        hidden=draw(st.sampled_from([256, 512])),
        topk=topk,
        experts=experts,
        dtype=draw(st.sampled_from(["bf16", "fp8"])),
        bucket=draw(st.sampled_from([0, 64])),
        expert_alignment=draw(st.sampled_from([1, 4, 7])),
        expanded=expanded,
        bias=draw(st.integers(0, 2)),
        combine_weights=not expanded and draw(st.booleans()),
        host_counts=draw(st.booleans()),
        dropped_share=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 5)),
    )
    sms = draw(st.sampled_from([2, 7, 24]))
    return build_plan(Topology(attention, ffn), work, Protocol.parse(arm, sms), draw(st.integers(1, 3)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(plans())
def test_any_configuration(plan: Plan) -> None:
    check(plan)


@pytest.mark.soak
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_many_configurations(plan: Plan) -> None:
    check(plan)
    assert_collapse_is_invisible(plan)


def test_a_failure_says_how_to_replay_it() -> None:
    plan = make_plan("2A2F", "afdep", 3, seed=4)
    inputs = plan.inputs()
    run = Machine(H100, received=True).run(plan, inputs)
    run.combined[0][2][1, 7] ^= 1
    with pytest.raises(AssertionError, match=r"token 1 element 7") as caught:
        check_outputs(plan, inputs, run)
    assert any("layout 2A2F, arm afdep" in note and "seed=4" in note for note in caught.value.__notes__)
