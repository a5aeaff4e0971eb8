"""The timing script at tiny sizes: equal programs on both engines, equal events, and what it prints and writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afdep_sim.run import Events

SCRIPT = Path(__file__).resolve().parent.parent / "experiments" / "bench.py"
SPREAD = {"median", "low", "high"}

STAND_IN = """
calls = []

def one(attention, ffn, tokens, union, data, collapse=True, n=1, checkit=True):
    calls.append((attention, ffn, tokens, union, data, collapse, n, checkit))
    return None, 1.0, 0.5
"""


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bench_script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_script"]


@pytest.fixture
def small(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with short programs and small exchanges, each kind of cell once."""
    cells = (
        bench.Cell("afdep", 1, data=False, collapse=True, exchanges=2, aim_ms=1e9, hidden=256),
        bench.Cell("afdep", 1, data=False, collapse=False, exchanges=1, most=1, hidden=256),
        bench.Cell("fastafd_m2n", 8, data=True, collapse=True, exchanges=1, aim_ms=0.0, hidden=256),
    )
    monkeypatch.setattr(bench, "CELLS", cells)
    monkeypatch.setattr(bench, "PROGRAMS", dict.fromkeys(bench.PROGRAMS, 3))
    return bench


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with another model's `bench_model`, forgotten afterwards."""
    (tmp_path / "bench_model.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "bench_model", raising=False)
    return tmp_path


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_both_engines_end_each_program_at_the_same_time(bench: ModuleType, rounds: int) -> None:
    trip = bench.LATENCY_NS + bench.ISSUE_NS
    # Ping-pong: two signals and two puts a round. Fan-in: a put and a signal there, a signal back.
    expected = {bench.PING_PONG: 2 * trip * rounds, bench.FAN_IN: (trip + bench.LATENCY_NS) * rounds}
    assert set(expected) == set(bench.PROGRAMS)
    for program, end in expected.items():
        assert bench.run_ours(program, rounds) == end
        assert bench.run_simpy(program, rounds) == end


def test_operations_are_those_the_programs_ask_for(bench: ModuleType) -> None:
    assert bench.operations(bench.PING_PONG, 10) == 10 * 2 * 3
    assert bench.operations(bench.FAN_IN, 10) == 10 * (64 * 3 + 2)


def test_engines_that_end_at_different_times_are_not_compared(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = bench.run_ours
    monkeypatch.setattr(bench, "run_ours", lambda program, rounds: ours(program, rounds) + 1.0)
    with pytest.raises(AssertionError, match="the engines end at"):
        bench.compare_engines(bench.PING_PONG, 2, 1)


def test_the_ratio_is_that_of_neighbouring_runs(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 4.0, 2.0, 4.0, 1.0, 3.0])
    monkeypatch.setattr(bench, "cpu_seconds", lambda function: (next(seconds), function()))
    figure = bench.compare_engines(bench.PING_PONG, 10, 3)
    assert figure.ratio == (3.0, 2.0, 4.0)
    assert figure.met
    assert figure.ours_per_s == (60.0, 30.0, 60.0)
    assert figure.simpy_per_s == (15.0, 15.0, 20.0)


# ---- exchanges ------------------------------------------------------------------------------------------------------


def test_an_exchange_costs_what_more_of_them_cost_more(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.010, 0.050, 0.020, 0.040])
    monkeypatch.setattr(bench, "cpu_seconds", lambda function: (next(seconds), function()))
    cell = bench.Cell("afdep", 1, data=False, collapse=True, exchanges=4, aim_ms=7.5, hidden=256)
    figure = bench.time_cell(cell, 2)
    assert figure.first_ms == pytest.approx((15.0, 10.0, 20.0))
    assert figure.per_exchange_ms == pytest.approx((7.5, 5.0, 10.0))
    assert figure.met == (figure.per_exchange_ms.median <= 7.5)
    assert figure.agents > 0
    assert figure.theirs_ms is None
    assert figure.ratio is None


def test_a_cell_with_every_warp_is_refused_where_its_events_differ(
    small: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(small.Machine):  # type: ignore[misc, name-defined]
        def run(self, *arguments: Any) -> Any:
            run = super().run(*arguments)
            if self.collapse:
                run.events = Events()
            return run

    every_warp = small.CELLS[1]
    small.time_cell(every_warp, 1)
    monkeypatch.setattr(small, "Machine", Wrong)
    with pytest.raises(AssertionError, match="the events differ"):
        small.time_cell(every_warp, 1)


def test_another_model_is_timed_in_turns_at_the_same_cells(small: ModuleType, stand_in: Path) -> None:
    one = small.load_one(stand_in)
    figures = [small.time_cell(cell, 2, one) for cell in small.CELLS]
    for figure in figures:
        assert figure.theirs_ms == (500.0, 500.0, 500.0)
        assert figure.ratio.median == pytest.approx(figure.per_exchange_ms.median / 500.0)
    calls = sys.modules["bench_model"].calls
    assert calls[::2] == [
        (2, 2, 1, False, False, True, 2, False),
        (2, 2, 1, False, False, False, 1, False),
        (2, 2, 8, True, True, True, 1, False),
    ]


# ---- the report -----------------------------------------------------------------------------------------------------


def test_the_table_says_what_was_met_and_the_json_holds_the_same_figures(
    small: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    assert small.main(["--repeats", "2", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"python experiments/bench.py --repeats 2 --json {path}\n")
    assert "ours/theirs" not in printed
    written = json.loads(path.read_text(encoding="utf-8"))
    assert set(written) == {"command", "machine", "repeats", "engines", "cells"}
    assert written["machine"] in printed
    assert written["repeats"] == 2
    assert [f["program"] for f in written["engines"]] == list(small.PROGRAMS)
    for figure in written["engines"]:
        assert set(figure["ratio"]) == set(figure["ours_per_s"]) == set(figure["simpy_per_s"]) == SPREAD
        assert figure["met"] == (figure["ratio"]["median"] >= figure["aim"])
    assert [f["repeats"] for f in written["cells"]] == [2, 1, 2]
    assert [f["met"] for f in written["cells"]] == [True, None, False]
    for figure in written["cells"]:
        assert set(figure["per_exchange_ms"]) == set(figure["first_ms"]) == SPREAD
        assert figure["theirs_ms"] is figure["ratio"] is None
        assert figure["cell"]["hidden"] == 256
    rows = [line for line in printed.splitlines() if "afdep" in line or "fastafd_m2n" in line]
    assert [row.split()[-1] for row in rows if "<=" in row] == ["met", "missed"]
    assert list(tmp_path.iterdir()) == [path], "nothing but the JSON is left"


def test_the_comparison_is_a_column(
    small: ModuleType, stand_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small, "CELLS", small.CELLS[:1])
    assert small.main(["--repeats", "1", "--against", str(stand_in)]) == 0
    assert "ours/theirs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--repeats", "0"], "repeats 0 is below 1"),
        (["--json", "no-such-folder/bench.json"], "folder 'no-such-folder' of bench.json does not exist"),
        (["--against", "no-such-folder"], "--against 'no-such-folder' has no bench_model.py"),
    ],
)
def test_what_cannot_run_is_one_sentence_before_anything_runs(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it measures"))
    assert bench.main(arguments) == bench.BAD_ARGUMENTS
    captured = capsys.readouterr()
    assert captured.err == f"bench.py: {sentence}\n"
    assert captured.out == ""
