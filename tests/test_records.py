"""Rows of figures: the published file, what agrees with a result, and files that are written whole or not at all."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from afdep_sim import records
from afdep_sim.errors import Refusal
from afdep_sim.protocol import Protocol
from afdep_sim.records import (
    COLUMNS,
    Row,
    agreeing_rows,
    find_published,
    paired_change_pct,
    paired_change_row,
    protocol_of,
    published_rows,
    read_rows,
    round_trip_row,
    write_rows,
)
from afdep_sim.topology import Topology
from afdep_sim.workload import Workload

ROWS = published_rows()
HEADER = ",".join(COLUMNS) + "\n"
AFDEP = Protocol.afdep()
M2N = Protocol.fastafd_m2n()
TREE = "AFDEP_UNION_REDUCE_PREFIX=1;AFDEP_SHARED_FFN_RECEIVE=1"


def published(
    layout: str, tokens: int, protocol: Protocol, baseline: Protocol | None = None, gpu: str = "H100"
) -> float | None:
    row = find_published(
        ROWS,
        gpu=gpu,
        topology=Topology.parse(layout),
        workload=Workload(tokens=tokens),
        protocol=protocol,
        baseline=baseline,
    )
    return None if row is None else row.value


# ---- the published file ---------------------------------------------------------------------------------------------


def test_the_columns_are_the_file_s():
    with resources.files("afdep_sim").joinpath("data/published.csv").open(encoding="utf-8") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS


def test_every_published_row_is_read_with_numbers_as_numbers():
    assert len(ROWS) == len({row.id for row in ROWS}) == 765
    first = ROWS[0]
    assert (first.attention_ranks, first.hidden, first.tokens, first.value) == (2, 2048, 1, 20.7)
    assert (first.value_low, first.value_high, first.baseline_arm) == (None, None, "")
    assert all(isinstance(row.value, float) for row in ROWS if row.value is not None)
    assert all(row.expressible in (0, 1) for row in ROWS)


# ---- what agrees ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "afdep_us", "m2n_us", "change_pct"),
    [(1, 20.7, 31.7, -34.6), (2048, 192.7, 201.0, None)],
)
def test_the_result_table_is_found(tokens, afdep_us, m2n_us, change_pct):
    assert published("2A2F", tokens, AFDEP) == afdep_us
    assert published("2A2F", tokens, M2N) == m2n_us
    if change_pct is not None:
        assert published("2A2F", tokens, AFDEP, M2N) == change_pct


def test_the_result_table_comes_before_repeats_of_the_figure():
    """Section 3 prints 31.6 us and 20.74 us for the cells that the result table prints as 31.7 and 20.7."""
    found = agreeing_rows(
        ROWS, gpu="H100", topology=Topology.parse("2A2F"), workload=Workload(tokens=1), protocol=M2N
    )
    assert [row.section for row in found][:2] == ["result", "3"]
    assert [row.value for row in found][:2] == [31.7, 31.6]


def test_the_union_prefix_counts_where_it_has_an_effect_only():
    """With one FFN rank the prefix of the row's tree matters: section 10's 22.4 us, not the result table's 24.8."""
    assert published("3A1F", 1, AFDEP) == 22.4
    assert published("3A1F", 1, Protocol.afdep(union_reduce_prefix=True)) == 24.8
    assert published("2A2F", 1, Protocol.afdep(union_reduce_prefix=True)) == 20.7


def test_a_control_is_found_in_its_own_tree():
    assert published("2A2F", 1, Protocol.afdep(grid_sync_exit=True), AFDEP) == 9.7
    entry = Protocol.afdep(keep_entry_barriers=True, grid_sync_exit=True)
    assert published("2A2F", 1, entry) == 30.1
    assert published("2A2F", 1, entry, Protocol.afdep(grid_sync_exit=True)) == 32.5
    assert published("2A2F", 1, Protocol.afdep(keep_entry_barriers=True)) is None


def test_a_row_of_the_full_protocol_does_not_pass_for_the_built_one():
    """Section 15's receive kernel is not built: its arm with the control set is ours, 20.2 us, and not 19.8."""
    assert published("2A2F", 1, AFDEP, gpu="H200") == 20.2
    with pytest.raises(Refusal, match="not built yet"):
        protocol_of("afdep", "")
    assert protocol_of("afdep+AFDEP_SHARED_FFN_RECEIVE=1", "") == AFDEP


def test_a_row_s_tree_has_no_effect_on_m2n():
    assert protocol_of("fastafd_m2n", TREE, 64) == Protocol.fastafd_m2n(64)
    assert protocol_of("fastafd_m2n", "unknown") == M2N


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "H20"},
        {"workload": Workload(tokens=1, hidden=4096, topk=4)},
        {"workload": Workload(tokens=1, capacity=4096)},
        {"workload": Workload(tokens=1, routing="skew")},
        {"workload": Workload(tokens=1, bucket=64)},
        {"workload": Workload(tokens=3)},
        {"workload": Workload(tokens=(1, 2))},
        {"workload": Workload(tokens=1, experts=64)},
        {"protocol": Protocol.fastafd_m2n(32)},
        {"topology": Topology.parse("3A2F")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_row_agrees_in_everything_or_not_at_all(change):
    cell = {"gpu": "H100", "topology": Topology.parse("2A2F"), "workload": Workload(tokens=1), "protocol": M2N}
    assert find_published(ROWS, **cell) is not None
    assert find_published(ROWS, **(cell | change)) is None


@pytest.mark.parametrize(
    "change",
    [{"expressible": 0}, {"load": "gemm2048"}, {"value": None}, {"sms": None}, {"mode": "direct"}, {"arm": "solo"}],
    ids=lambda change: next(iter(change)),
)
def test_a_row_that_is_no_plain_measurement_of_the_cell_is_passed_over(change):
    rows = [replace(ROWS[0], **change)]
    cell = {"gpu": "H100", "topology": Topology.parse("2A2F"), "workload": Workload(tokens=1), "protocol": AFDEP}
    assert find_published([ROWS[0]], **cell) == ROWS[0]
    assert find_published(rows, **cell) is None


def test_a_token_count_per_rank_is_a_cell_if_all_are_equal():
    cell = {"gpu": "H100", "topology": Topology.parse("2A2F"), "protocol": AFDEP}
    found = find_published(ROWS, workload=Workload(tokens=(8, 8)), **cell)
    assert found is not None
    assert found.tokens == 8


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_paired_change_is_the_geometric_mean_of_paired_ratios():
    assert paired_change_pct([20.0], [25.0]) == pytest.approx(-20)
    assert paired_change_pct([10.0, 40.0], [20.0, 20.0]) == pytest.approx(0, abs=1e-12)
    assert paired_change_pct([1.0, 3.0, 5.0], [2.0, 3.0, 4.0]) == pytest.approx(
        100 * ((0.5 * 1 * 1.25) ** (1 / 3) - 1)
    )


@pytest.mark.parametrize(
    ("arm", "baseline"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0]), ([float("nan")], [1.0])]
)
def test_times_that_cannot_be_paired_are_refused(arm, baseline):
    with pytest.raises(Refusal):
        paired_change_pct(arm, baseline)


# ---- rows of results ------------------------------------------------------------------------------------------------

CELL = {"gpu": "H100", "profile": "h100", "topology": Topology.parse("2A2F"), "workload": Workload(tokens=8)}


def test_a_result_row_says_what_it_is_and_reads_back_as_its_protocol():
    row = round_trip_row(24.81239, **CELL, protocol=AFDEP, notes="one repeat")
    assert (row.section, row.metric, row.value, row.tokens) == ("model", "round_trip_us", 24.812, 8)
    assert row.notes == "model, profile h100; seed 0; one repeat"
    assert row.id.startswith("model.2a2f-h2048-random.t8.afdep.round-trip-us.")
    for protocol in (AFDEP, M2N, Protocol.afdep(all_rank_exit=True, transport_sms=16)):
        row = round_trip_row(24.8, **CELL, protocol=protocol)
        assert protocol_of(row.arm, row.protocol, row.sms) == protocol


def test_a_result_row_agrees_with_its_own_cell():
    """The columns mean the same in both directions: a row that was built is a row that is found."""
    trip = round_trip_row(24.8, **CELL, protocol=AFDEP)
    change = paired_change_row(-27.1, **CELL, protocol=AFDEP, baseline=M2N)
    cell = {name: value for name, value in CELL.items() if name != "profile"}
    assert find_published([change, trip], **cell, protocol=AFDEP) == trip
    assert find_published([change, trip], **cell, protocol=AFDEP, baseline=M2N) == change


def test_the_id_follows_from_the_configuration_alone():
    row = round_trip_row(24.8, **CELL, protocol=AFDEP)
    assert round_trip_row(99.0, **CELL, protocol=AFDEP, notes="again").id == row.id
    others = [
        round_trip_row(24.8, **CELL, protocol=M2N),
        round_trip_row(24.8, **CELL, protocol=Protocol.afdep(transport_sms=32)),
        round_trip_row(24.8, **(CELL | {"profile": "h200"}), protocol=AFDEP),
        round_trip_row(24.8, **(CELL | {"workload": Workload(tokens=8, seed=1)}), protocol=AFDEP),
        paired_change_row(1.0, **CELL, protocol=AFDEP, baseline=M2N),
        paired_change_row(1.0, **CELL, protocol=AFDEP, baseline=Protocol.afdep(all_rank_exit=True)),
    ]
    assert len({other.id for other in [*others, row]}) == len(others) + 1


def test_what_a_row_s_columns_cannot_say_is_in_its_notes():
    workload = Workload(tokens=(1, 2), bucket=64)
    protocol = Protocol.afdep(union_reduce_prefix=True)
    row = round_trip_row(24.8, **(CELL | {"workload": workload}), protocol=protocol)
    assert row.tokens is None
    assert "tokens (1, 2) in rank order; bucket 64; no effect here: AFDEP_UNION_REDUCE_PREFIX" in row.notes


def test_results_that_are_no_figures_are_refused():
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(Refusal, match="not a time above 0"):
            round_trip_row(value, **CELL, protocol=AFDEP)
    with pytest.raises(Refusal, match="not a number"):
        paired_change_row(float("nan"), **CELL, protocol=AFDEP, baseline=M2N)


def test_a_change_of_transport_sms_is_one_arm_against_itself_at_24():
    wide = Protocol.afdep(transport_sms=64)
    row = paired_change_row(-5.0, **CELL, protocol=wide, baseline=AFDEP)
    assert (row.arm, row.baseline_arm, row.sms) == ("afdep", "afdep", 64)
    cell = {name: value for name, value in CELL.items() if name != "profile"}
    assert find_published([row], **cell, protocol=wide, baseline=AFDEP) == row
    for baseline in (M2N, wide):
        with pytest.raises(Refusal, match="do not fit one row"):
            paired_change_row(-5.0, **CELL, protocol=wide, baseline=baseline)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_rows_survive_a_file(tmp_path: Path):
    path = tmp_path / "rows.csv"
    rows = [*ROWS, round_trip_row(24.8, **CELL, protocol=AFDEP, notes='says "so", twice')]
    write_rows(path, rows)
    assert read_rows(path) == rows
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_a_mapping_may_leave_columns_out(tmp_path: Path):
    path = tmp_path / "rows.csv"
    write_rows(path, [{"id": "x", "value": 21.0, "tokens": 8, "gpu": None}])
    assert read_rows(path) == [Row(id="x", value=21.0, tokens=8)]
    assert path.read_text().splitlines()[1].startswith("x,,")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [({"id": "x", "speed": 1}, "column 'speed' is not a column"), ({"value": 1.0}, "needs an id")],
)
def test_a_refused_row_leaves_the_old_file(tmp_path: Path, row, sentence):
    path = tmp_path / "rows.csv"
    path.write_text("old")
    with pytest.raises(Refusal, match=sentence):
        write_rows(path, [{"id": "good"}, row])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["rows.csv"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch, step):
    path = tmp_path / "rows.csv"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(records.os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        write_rows(path, ROWS)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["rows.csv"]


def test_a_missing_folder_is_one_sentence(tmp_path: Path):
    with pytest.raises(Refusal, match=r"the folder of .* does not exist"):
        write_rows(tmp_path / "none" / "rows.csv", ROWS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("id,section\n", "does not have the 33 columns"),
        (HEADER + "x,only\n", "line 2 of .* column 'cluster' is missing"),
        (HEADER + ",".join(["x", *[""] * 3, "two", *[""] * 28]) + "\n", "line 2 of .* cannot be read"),
        (HEADER + ",".join(["x"] + [""] * 33) + "\n", "line 2 of .* has more cells than columns"),
    ],
)
def test_a_file_that_is_none_of_ours_is_one_sentence(tmp_path: Path, text, sentence):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(Refusal, match=sentence):
        read_rows(path)
