"""The `afdep` command, called in process: what it prints and writes, and what it refuses before anything runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from afdep_sim import Protocol, Topology, Workload, simulate
from afdep_sim.cli import BAD_ARGUMENTS, main
from afdep_sim.perfetto import validate_perfetto
from afdep_sim.records import read_rows
from afdep_sim.routing import example

SMALL = ["run", "2A2F", "--hidden", "512", "--tokens", "1,8", "--workers", "1"]


def test_run_prints_both_arms_with_every_row_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    table = {(line[0], line[1]): line for line in lines if len(line) > 2 and line[1] in ("afdep", "fastafd_m2n")}
    assert set(table) == {(t, a) for t in ("1", "8") for a in ("afdep", "fastafd_m2n")}
    for tokens in (1, 8):
        for arm in ("afdep", "fastafd_m2n"):
            line = table[str(tokens), arm]
            expected = simulate(Topology.parse("2A2F"), Workload(tokens=tokens, hidden=512), Protocol.parse(arm))
            assert line[2] == f"{expected.round_trip_us:.2f}"
            # Every row of 3 exchanges on both sides: received at the FFN ranks, combined at the Attention ranks.
            assert int(line[-1]) == expected.rows_checked > 3 * 2 * tokens
    assert "dispatch entry barrier" in printed
    assert "total" in printed


def test_published_figures_stand_beside_the_model_where_they_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "2A2F", "--tokens", "1", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    afdep = next(line.split() for line in printed.splitlines() if " afdep " in line)
    model, published, error = float(afdep[2]), float(afdep[3]), afdep[4]
    assert published == 20.7
    assert error == f"{100 * (model / published - 1):+.1f}%"
    assert afdep[6] == "-34.6%"


def test_the_same_results_whatever_the_number_of_processes(tmp_path: Path) -> None:
    files = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for workers, file in zip(("1", "2"), files, strict=True):
        assert main([*SMALL[:-1], workers, "--repeats", "2", "--csv", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    rows = read_rows(files[0])
    assert [row.metric for row in rows] == ["round_trip_us", "paired_change_pct", "round_trip_us"] * 2


def test_trace_and_figure_are_written_and_valid(tmp_path: Path) -> None:
    trace, figure = tmp_path / "a.json", tmp_path / "a.svg"
    assert main([*SMALL, "--trace", str(trace), "--plot", str(figure)]) == 0
    assert validate_perfetto(trace.read_text()) > 100
    flows = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "s"]
    assert flows
    assert "fastafd_m2n" in figure.read_text()


@pytest.mark.parametrize(
    ("arguments", "figures"),
    [
        (["2A2F"], ("registered: 17.3 MB (17,301,504 bytes), 50.0% of union's 34.6 MB",)),
        (["3A:1F"], ("registered: 26.0 MB (25,952,256 bytes), 75.0% of union's 34.6 MB", "dispatch_inbox   77,824")),
        (["1A:3F"], ("registered: 25.6 MB (25,559,040 bytes), 73.9% of union's 34.6 MB",)),
        (["2A2F", "--arm", "fastafd_m2n"], ("registered: 34.6 MB (34,603,008 bytes), 100.0% of union's",)),
        (["3A:1F", "--dtype", "fp8"], ("registered: 14.9 MB (14,942,208 bytes)", "2,208")),
        (["2A2F", "--dtype", "fp8"], ("registered: 17.0 MB (17,039,360 bytes), 50.0% of union's 34.1 MB",)),
        (["6A6F"], ("region of the master top-k lane", "combine_inbox    77,824        8")),
        (["2A2F", "--words"], ("dispatch_arrivals", "the last block to add")),
    ],
)
def test_layout_prints_the_records_megabytes(
    arguments: list[str], figures: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Record section 4, at its defaults: union 34.6, 2A2F 17.3, 3A:1F 26.0, 1A:3F 25.6 MB."""
    assert main(["layout", *arguments]) == 0
    printed = capsys.readouterr().out
    for figure in figures:
        assert figure in printed


def test_run_takes_every_shape_and_a_gates_routes(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["--dtype", "fp8", "--not-expanded", "--combine-weights", "--bias", "1", "--host-counts"]
    assert main([*SMALL, *shapes, "--routing", "example", "--alignment", "4", "--arm", "afdep"]) == 0
    printed = capsys.readouterr().out
    assert "routes.npz routing (at 8 tokens the busiest expert has" in printed
    assert main([*SMALL, "--dropped", "0.5", "--arm", "afdep", "--arm", "afdep+AFDEP_ALL_RANK_EXIT=1"]) == 0
    printed = capsys.readouterr().out
    assert "change: against afdep+AFDEP_ALL_RANK_EXIT=1" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "2A"], "layout '2A' is not of the form"),
        (["run", "2A2F", "--tokens", "4096"], "tokens 4096 is over|bucket 4096 is over the capacity of 2048"),
        (["run", "2A2F", "--tokens", "9", "--bucket", "8"], "tokens 9 is over the bucket of 8"),
        (["run", "2A2F", "--tokens", "x"], "tokens 'x' is not a whole number"),
        (["run", "2A2F", "--tokens", "8,8"], "name one count twice"),
        (["run", "2A2F", "--hidden", "100"], "hidden 100 is not a positive multiple of 256"),
        (["run", "2A2F", "--profile", "B200"], "profile 'B200' is not one of"),
        (["run", "2A2F", "--arm", "afdep+AFDEP_NOPE=1"], "'AFDEP_NOPE=1' is unknown or not built"),
        (["run", "2A2F", "--arm", "afdep+AFDEP_SHARED_FFN_RECEIVE=0"], "is not built yet"),
        (["run", "2A2F", "--arm", "afdep", "--arm", "afdep"], "name one protocol twice"),
        (["run", "2A2F", "--sms", "0"], "transport SMs 0 is outside"),
        (["run", "2A2F", "--repeats", "0"], "repeats 0 is below 1"),
        (["run", "2A3F", "--experts", "128"], "experts 128 is not divisible by 3 FFN ranks"),
        (["run", "2A2F", "--csv", "/nowhere/a.csv"], "folder '/nowhere' of a.csv does not exist"),
        (["run", "2A2F", "--plot", "a.pdf"], "does not end in .svg or .png"),
        (["run", "2A2F", "--hidden", "two"], "invalid int value"),
        (["run", "2A2F", "--dtype", "int8"], "invalid choice"),
        (["run", "2A2F", "--routing", "zipf"], "routing 'zipf' is not one of random, skew or the path of an .npz"),
        (["run", "2A2F", "--routing", "/nowhere/a.npz"], "routing file '/nowhere/a.npz' does not exist"),
        (["run", "2A2F", "--topk", "33"], "top-k 33 is outside 1 to 32"),
        (["run", "2A2F", "--topk", "9", "--experts", "8"], "top-k 9 is over the 8 experts to draw from"),
        (["run", "2A30F", "--experts", "3000"], "logical experts 3200 .* is over 2048"),
        (["run", "2A2F", "--experts", "1024"], "experts per FFN rank 512 is over 256"),
        (["run", "2A2F", "--combine-weights"], "weights travel back only in the non-expanded layout"),
        (["run", "2A2F", "--dropped", "2"], "dropped share 2.0 is outside 0 to 1"),
        (["run", "2A2F", "--sms", "140"], "transport SMs 140 is over the device's 132"),
        (["layout", "2A2F", "--capacity", "0"], "bucket 8 is over the capacity of 0"),
        (["layout", "2X2F"], "layout '2X2F' is not of the form"),
        (["walk", "2A2F"], "invalid choice"),
        ([], "required"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_64(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == BAD_ARGUMENTS
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert any(re.search(part, captured.err) for part in sentence.split("|"))


def test_files_are_written_though_nobody_reads_the_output(tmp_path: Path) -> None:
    """`afdep run ... | head -1` must not lose what was asked for."""
    file = tmp_path / "a.csv"
    command = f'"{sys.executable}" -m afdep_sim {" ".join(SMALL)} --csv "{file}" | head -c 1'
    subprocess.run(command, shell=True, check=False, capture_output=True, timeout=120)
    assert len(read_rows(file)) == 6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--csv", ""], "is a folder, not a file|is empty"),
        (["--trace", "{folder}"], "is a folder, not a file"),
        (["--csv", "{folder}/a", "--trace", "{folder}/../{name}/a"], "are one"),
        (["--csv", "/proc/a.csv"], "cannot be written"),
        (["--tokens", "²"], "tokens '²' is not a whole number"),
        (["--alignment", "999999999999999999"], "expert alignment 999999999999999999 is outside 1 to 1024"),
        (["--routing", "example", "--dropped", "0.5"], "dropped share 0.5 applies to drawn routes"),
        (["--workers", "-1"], "workers -1 is below 0"),
    ],
)
def test_targets_and_odd_numbers_are_refused_before_anything_runs(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [o.format(folder=tmp_path, name=tmp_path.name) for o in options]
    assert main(["run", "2A2F", "--tokens", "1", "--hidden", "256", *filled]) == BAD_ARGUMENTS
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(sentence, captured.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [["--dropped", "0.9"], ["--not-expanded"], ["--bias", "1"], ["--alignment", "8"], ["--host-counts"]],
)
def test_no_published_figure_stands_beside_what_the_record_does_not_state(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    assert main(["run", "2A2F", "--tokens", "1", "--workers", "1", "--csv", str(file), *options]) == 0
    assert "20.70" not in capsys.readouterr().out
    assert all(" " in row.notes.partition("seed 0")[2] for row in read_rows(file))


def test_a_record_names_a_file_of_routes_wherever_it_lies(tmp_path: Path) -> None:
    copy = tmp_path / "deep" / "routes.npz"
    copy.parent.mkdir()
    copy.write_bytes(Path(example()).read_bytes())
    found = []
    for at, routing in enumerate(("example", str(copy))):
        file = tmp_path / f"{at}.csv"
        assert main([*SMALL, "--routing", routing, "--csv", str(file)]) == 0
        found.append(file.read_bytes())
    assert found[0] == found[1]
    assert b"routes.npz@" in found[0]
    assert str(tmp_path).encode() not in found[1]
