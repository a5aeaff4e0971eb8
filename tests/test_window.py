"""Offsets and sizes: the record's digits, what may overlap and what may not, and every word's life cycle."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.window import (
    CLEARED,
    LINE,
    MONOTONIC,
    WORD,
    WORD_OFFSETS,
    WORDS,
    WORKSPACE_BYTES,
    Region,
    Window,
    Word,
    align,
    combine_row_bytes,
    dispatch_row_bytes,
)
from afdep_sim.workload import MAX_EXPERTS_PER_RANK, Workload


def build(arm: str, layout: str, **fields: Any) -> Window:
    topology = Topology.parse(layout)
    return Window.build(topology, Workload(**{"tokens": 2048, **fields}), Protocol.parse(arm).resolve(topology))


# ---- rows and registered memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "dispatch", "combine"),
    [(2048, 4224, 4160), (4096, 8320, 8256), (7168, 14464, 14400), (8192, 16512, 16448)],
)
def test_row_bytes_at_top_8(hidden: int, dispatch: int, combine: int) -> None:
    assert dispatch_row_bytes(2 * hidden, 8) == dispatch
    assert combine_row_bytes(2 * hidden, 8) == combine


@pytest.mark.parametrize("topk", range(1, 33))
def test_row_metadata_fits_and_stays_aligned(topk: int) -> None:
    dispatch, combine = dispatch_row_bytes(512, topk), combine_row_bytes(512, topk)
    assert dispatch % 32 == combine % 32 == 0
    assert 0 <= dispatch - 512 - (12 * topk + 4) < 32
    assert 0 <= combine - 512 - 8 * topk < 32


@pytest.mark.parametrize(
    ("arm", "layout", "registered"),
    [
        ("fastafd_m2n", "2A2F", 34_603_008),
        ("fastafd_m2n", "3A:1F", 34_603_008),
        ("afdep+AFDEP_UNION_BUFFERS=1", "1A:3F", 34_603_008),
        ("afdep", "2A2F", 17_301_504),
        ("afdep", "3A:1F", 25_952_256),
        ("afdep", "1A:3F", 25_559_040),
    ],
)
def test_registered_memory_has_the_records_digits(arm: str, layout: str, registered: int) -> None:
    window = build(arm, layout)
    assert window.registered_bytes == registered
    assert window.registered_mb == registered / 1e6


def test_registered_memory_follows_the_capacity_and_strides_follow_the_bucket() -> None:
    small, large = build("afdep", "2A2F", tokens=8), build("afdep", "2A2F")
    assert small.registered_bytes == large.registered_bytes
    assert small.dispatch_inbox.rows == 8
    assert large.dispatch_inbox.rows == 2048
    assert build("afdep", "2A2F", tokens=8, capacity=1024).registered_bytes == 2 * 1024 * 4224


@pytest.mark.parametrize(
    ("arm", "layout", "dispatch", "combine"),
    [("afdep", "3A1F", 3, 1), ("afdep", "1A3F", 1, 3), ("fastafd_m2n", "3A1F", 4, 4), ("fastafd_m2n", "1A3F", 4, 4)],
)
def test_inboxes_have_a_region_per_sender(arm: str, layout: str, dispatch: int, combine: int) -> None:
    window = build(arm, layout, tokens=16, hidden=4096)
    assert window.dispatch_inbox == Region("dispatch_inbox", WORKSPACE_BYTES, dispatch, 16, 8320)
    assert window.combine_inbox == Region("combine_inbox", WORKSPACE_BYTES, combine, 16, 8256)


def test_the_expanded_tensor_holds_the_worst_case() -> None:
    # Rows of every rank's bucket times the lanes that can meet on one rank, each block aligned.
    assert build("afdep", "2A2F", tokens=16).received_rows == 4 * 16 * 8
    assert build("afdep", "2A2F", tokens=16, experts=8).received_rows == 4 * 16 * 4
    assert build("afdep", "2A2F", tokens=16, expert_alignment=16).received_rows == align(4 * 16 * 8 + 15 * 64, 16)


# ---- overlaps -------------------------------------------------------------------------------------------------------


def test_region_arithmetic() -> None:
    region = Region("a", 100, 2, 3, 10)
    assert (region.bytes, region.end) == (60, 160)
    assert region.overlap(Region("b", 150, 1, 1, 100)) == range(150, 160)
    assert region.overlap(Region("b", 120, 1, 1, 10)) == range(120, 130)
    assert len(region.overlap(Region("b", 160, 1, 1, 10))) == 0
    assert len(region.overlap(Region("b", 0, 1, 1, 100))) == 0


def test_the_inboxes_overlap_as_upstreams_do() -> None:
    window = build("afdep", "2A2F")
    inboxes = window.dispatch_inbox, window.combine_inbox
    assert window.dispatch_inbox.offset == window.combine_inbox.offset == WORKSPACE_BYTES
    assert len(inboxes[0].overlap(inboxes[1])) == min(inboxes[0].bytes, inboxes[1].bytes) > 0


@settings(max_examples=60, deadline=None)
@given(
    arm=st.sampled_from(["afdep", "fastafd_m2n", "afdep+AFDEP_UNION_BUFFERS=1"]),
    layout=st.sampled_from(["2A2F", "3A1F", "1A3F", "1A1F", "7A1F"]),
    tokens=st.integers(0, 2048),
    hidden=st.integers(1, 32).map(lambda n: 256 * n),
    topk=st.integers(1, 32),
    alignment=st.sampled_from([1, 3, 128]),
)
def test_nothing_but_the_inboxes_overlaps(
    arm: str, layout: str, tokens: int, hidden: int, topk: int, alignment: int
) -> None:
    window = build(arm, layout, tokens=tokens, hidden=hidden, topk=topk, expert_alignment=alignment)
    tensors = list(window.tensors.values())
    assert all(name == region.name for name, region in window.tensors.items())
    for inbox in (window.dispatch_inbox, window.combine_inbox):
        assert inbox.offset >= WORKSPACE_BYTES
        assert inbox.bytes <= window.registered_bytes
        assert inbox.offset % 32 == inbox.row_bytes % 32 == 0
        assert not any(len(inbox.overlap(tensor)) for tensor in tensors)
    assert not any(len(a.overlap(b)) for a, b in combinations(tensors, 2))
    assert all(tensor.offset % 256 == 0 for tensor in tensors)
    assert max(tensor.end for tensor in tensors) <= window.arena_bytes
    assert window.arena_bytes % 4096 == 0


def test_tensors_hold_what_they_are_named_for() -> None:
    window = build("afdep", "3A1F", tokens=16, topk=6, expert_alignment=4)
    shapes = {name: (region.rows, region.row_bytes) for name, region in window.tensors.items()}
    slots = window.received_rows
    assert slots == 4 * 16 * 6 + 3 * 128
    assert shapes == {
        "x": (16, 4096),
        "scales": (16, 0),
        "topk": (16, 48),
        "weights": (16, 24),
        "slot_of_lane": (16, 24),
        "psum_rank": (1, 8 * 4),
        "psum_expert": (1, 8 * 129),
        "metadata": (4 * 16, 4 * 8),
        "received_topk": (0, 24),
        "received_weights": (slots, 4),
        "received_scales": (slots, 0),
        "received_x": (slots, 4096),
        "expert_y": (slots, 4096),
        "combined_x": (16, 4096),
        "combined_weights": (0, 24),
        "bias0": (0, 4096),
        "bias1": (0, 4096),
        "host_counts": (0, 8 * (4 + 128)),
    }


def test_tensors_of_a_call_that_carries_everything() -> None:
    shape = {"tokens": 16, "topk": 6, "dtype": "fp8", "expanded": False, "combine_weights": True, "bias": 2}
    window = build("afdep", "3A1F", **shape, host_counts=True)
    shapes = {name: (region.rows, region.row_bytes) for name, region in window.tensors.items()}
    assert window.received_rows == 4 * 16
    assert shapes["x"] == (16, 2048)
    assert shapes["scales"] == (16, 16)
    assert shapes["received_x"] == (64, 2048)
    assert shapes["received_scales"] == (64, 16)
    assert shapes["received_topk"] == shapes["received_weights"] == (64, 24)
    assert shapes["expert_y"] == (64, 4096)
    assert shapes["combined_weights"] == (16, 24)
    assert shapes["bias0"] == shapes["bias1"] == (16, 4096)
    assert shapes["host_counts"] == (1, 8 * (4 + 128))


def test_the_top_k_layout_has_a_region_per_lane() -> None:
    """More ranks than top-k, or the switch: the reply goes to its master lane's region (upstream section 5)."""
    assert build("afdep", "3A1F", tokens=16).combine_inbox.regions == 1
    assert build("afdep+dev:topk_layout", "3A1F", tokens=16).combine_inbox.regions == 8
    assert build("afdep", "5A4F", tokens=16).combine_inbox.regions == 8
    assert build("afdep", "4A4F", tokens=16).combine_inbox.regions == 4
    assert build("fastafd_m2n", "4A4F", tokens=16).combine_inbox.regions == 8


def test_fp8_rows_and_registered_megabytes() -> None:
    """Row bytes of upstream section 2.3; FP8 buffers are sized for one scale per 32 values (upstream section 11)."""
    rows = {2048: 2208, 4096: 4256, 7168: 7360, 8192: 8384}
    for hidden, row_bytes in rows.items():
        assert build("afdep", "2A2F", tokens=2048, hidden=hidden, dtype="fp8").dispatch_inbox.row_bytes == row_bytes
    assert build("afdep", "2A2F", tokens=2048, dtype="fp8").registered_bytes == 2 * 2048 * 4160
    assert build("afdep", "3A1F", tokens=2048, dtype="fp8").registered_bytes == 3 * 2048 * (2048 + 256 + 128)
    assert build("fastafd_m2n", "2A2F", tokens=2048, dtype="fp8").registered_bytes == 4 * 2048 * 4160


# ---- words ----------------------------------------------------------------------------------------------------------


def span(word: Word) -> range:
    start = WORD_OFFSETS[word.name]
    return range(start, start + WORD * word.count)


def test_word_groups_are_named_once_and_lie_in_the_workspace() -> None:
    assert [word.name for word in WORDS] == list(WORD_OFFSETS)
    assert len(WORD_OFFSETS) == len(WORDS)
    assert all(span(word).start >= 0 and span(word).stop <= WORKSPACE_BYTES for word in WORDS)
    assert WORKSPACE_BYTES % 4096 == 0


def test_each_word_group_starts_a_line_that_no_other_group_touches() -> None:
    lines = {word.name: set(range(span(word).start // LINE, (span(word).stop - 1) // LINE + 1)) for word in WORDS}
    assert all(span(word).start % LINE == 0 for word in WORDS)
    for a, b in combinations(lines.values(), 2):
        assert not a & b


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.name)
def test_every_word_has_a_complete_life_cycle(word: Word) -> None:
    assert word.count >= 1
    assert word.set_by
    assert word.waited_by
    assert word.kind in (CLEARED, MONOTONIC)
    if word.kind == CLEARED:
        assert word.cleared_by
        assert not word.cleared_by.startswith(("never", "nobody"))
    else:
        assert word.cleared_by.startswith("never")


def test_words_are_sized_for_every_layout() -> None:
    counts = {word.name: word.count for word in WORDS}
    assert counts["dispatch_arrivals"] == counts["combine_arrivals"] == counts["slots"] == 1024
    assert counts["counts"] == counts["count_reduction"] == 1024 + 2048
    assert counts["barrier_signals"] == 2
    # One receiver's count words: a row word per source, and an expert word per source and local expert.
    topology = Topology.parse("7A1F")
    assert topology.ranks * (1 + MAX_EXPERTS_PER_RANK) <= counts["counts"]


def test_peers_write_exactly_the_words_that_say_so() -> None:
    assert {word.name for word in WORDS if word.remote} == {
        "barrier_signals",
        "dispatch_arrivals",
        "combine_arrivals",
        "counts",
    }
