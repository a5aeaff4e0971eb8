"""Figures of phase costs: what is written in them, where the bars end, and that equal input gives equal files."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from afdep_sim.errors import Refusal
from afdep_sim.plots import FAMILIES, phase_bars

Results = list[tuple[int, str, Mapping[str, float]]]

SVG = "{http://www.w3.org/2000/svg}"
SMALL_RUN = {"gap": 3.0, "dispatch start": 0.2, "dispatch end": 0.1, "dispatch count wait": 6.0, "copy rows": 4.25}
LARGE_RUN = {"gap": 4.0, "dispatch start": 0.9, "dispatch payload": 80.0, "copy rows": 40.0, "reduce rows": 20.5}


def results() -> Results:
    return [
        (1, "afdep", SMALL_RUN),
        (1, "fastafd_m2n", {**SMALL_RUN, "dispatch entry barrier": 5.0}),
        (2048, "afdep", LARGE_RUN),
        (2048, "fastafd_m2n", {**LARGE_RUN, "combine rows": 15.0}),
    ]


def texts(path: Path) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ET.parse(path).iter(f"{SVG}text")]


def pieces(path: Path) -> list[tuple[str, float, float, float]]:
    """(colour, left, right, middle height) of every rectangle with a white edge: the pieces of the bars, as drawn."""
    found = []
    for element in ET.parse(path).iter(f"{SVG}path"):
        style = element.get("style", "")
        colour = re.search(r"fill: (#[0-9a-f]{6})", style)
        if colour and "stroke: #ffffff" in style:
            numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", element.get("d", ""))]
            found.append(
                (colour[1], min(numbers[::2]), max(numbers[::2]), (max(numbers[1::2]) + min(numbers[1::2])) / 2)
            )
    return found


def test_a_figure_names_layout_arms_phases_units_and_totals(tmp_path: Path) -> None:
    phase_bars(results(), tmp_path / "bars.svg", "2A2F, hidden 2,048")
    found = texts(tmp_path / "bars.svg")
    for text in ("2A2F, hidden 2,048", "T = 1 token", "T = 2,048 tokens", "copy", "between kernels", "payload"):
        assert found.count(text) == 1
    assert found.count("afdep") == found.count("fastafd_m2n") == 2
    totals = [text for text in found if text.endswith("\N{MICRO SIGN}s")]
    assert totals == [f"{total} \N{MICRO SIGN}s" for total in ("13.6", "18.6", "145.4", "160.4")]
    assert "microseconds per exchange; each panel has its own scale" in found


def test_bars_are_as_long_as_their_costs_and_stacked_without_holes(tmp_path: Path) -> None:
    phase_bars(results(), tmp_path / "bars.svg", "2A2F")
    rows: dict[float, list[tuple[str, float, float]]] = {}
    for colour, left, right, middle in pieces(tmp_path / "bars.svg"):
        rows.setdefault(round(middle), []).append((colour, left, right))
    bars = [sorted(row, key=lambda piece: piece[1]) for _, row in sorted(rows.items())]
    lengths = [bar[-1][2] - bar[0][1] for bar in bars]
    totals = [math.fsum(costs_us.values()) for _, _, costs_us in results()]
    assert lengths[0] / lengths[1] == pytest.approx(totals[0] / totals[1], rel=1e-4)
    assert lengths[2] / lengths[3] == pytest.approx(totals[2] / totals[3], rel=1e-4)
    assert lengths[1] == pytest.approx(lengths[3], rel=1e-4)
    for bar in bars:
        assert all(left[2] == pytest.approx(right[1], abs=1e-3) for left, right in zip(bar, bar[1:], strict=False))
    copy_rows = bars[0][2]
    assert (copy_rows[2] - copy_rows[1]) / lengths[0] == pytest.approx(4.25 / totals[0], rel=1e-4)


def test_small_phases_share_a_piece_and_a_phase_keeps_its_colour(tmp_path: Path) -> None:
    phase_bars(results(), tmp_path / "bars.svg", "2A2F")
    assert "start, end" in texts(tmp_path / "bars.svg")
    rows: dict[float, list[str]] = {}
    for colour, _, _, middle in pieces(tmp_path / "bars.svg"):
        rows.setdefault(round(middle), []).append(colour)
    # count wait, start and end, copy, gap; entry barrier before them; payload in place of the wait, reduce rows.
    first, second, third, fourth = (rows[middle] for middle in sorted(rows))
    assert [len(row) for row in (first, second, third, fourth)] == [4, 5, 5, 6]
    assert second[1:] == first
    assert set(third) & set(first) == {first[1], first[2], first[3]}
    assert len({colour for row in rows.values() for colour in row}) == 8


def test_the_last_piece_of_a_bar_is_the_gap(tmp_path: Path) -> None:
    phase_bars(results()[:1], tmp_path / "bars.svg", "2A2F")
    grey = "#" + "".join(f"{round(255 * channel):02x}" for channel in FAMILIES["gap"])
    assert max(pieces(tmp_path / "bars.svg"), key=lambda piece: piece[2])[0] == grey


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_equal_input_gives_equal_bytes(tmp_path: Path, suffix: str) -> None:
    phase_bars(results(), tmp_path / f"a{suffix}", "2A2F")
    phase_bars(results(), tmp_path / f"b{suffix}", "2A2F")
    content = (tmp_path / f"a{suffix}").read_bytes()
    assert content == (tmp_path / f"b{suffix}").read_bytes()
    assert content.startswith(b"<?xml" if suffix == ".svg" else b"\x89PNG")
    assert b"<dc:date>" not in content
    phase_bars(results()[:3], tmp_path / f"b{suffix}", "2A2F")
    assert content != (tmp_path / f"b{suffix}").read_bytes()


def test_settings_of_the_caller_neither_count_nor_change(tmp_path: Path) -> None:
    mpl = importlib.import_module("matplotlib")
    phase_bars(results(), tmp_path / "a.svg", "2A2F")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        before = dict(mpl.rcParams)
        phase_bars(results(), tmp_path / "b.svg", "2A2F")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_arms_and_titles_are_text_not_mathematics(tmp_path: Path) -> None:
    arm = "afdep+AFDEP_UNION_REDUCE_PREFIX=1+COLLECT_VIEW+dev:without_done"
    phase_bars([(8, arm, SMALL_RUN), (8, "a$b$<c>", SMALL_RUN)], tmp_path / "bars.svg", "cost $x$ & more")
    found = texts(tmp_path / "bars.svg")
    assert {"cost $x$ & more", "a$b$<c>"} <= set(found)
    assert arm in "".join(found)


def test_a_missing_matplotlib_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Refusal, match=r"^plots need matplotlib: pip install 'afdep-sim\[plots\]'$"):
        phase_bars(results(), tmp_path / "bars.svg", "2A2F")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_drawn_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"'bars.pdf' does not end in .svg or .png"):
        phase_bars(results(), tmp_path / "bars.pdf", "2A2F")
    with pytest.raises(ValueError, match="no results"):
        phase_bars([], tmp_path / "bars.svg", "2A2F")
    with pytest.raises(ValueError, match="'afdep' at 1 tokens is in the results twice"):
        phase_bars([*results(), (1, "afdep", {})], tmp_path / "bars.svg", "2A2F")
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="phase 'gap' of arm 'x' at 4 tokens costs"):
            phase_bars([(4, "x", {"gap": bad})], tmp_path / "bars.svg", "2A2F")
    assert os.listdir(tmp_path) == []


def test_a_lone_small_phase_keeps_its_name_and_place(tmp_path: Path) -> None:
    phase_bars([(4, "x", {"dispatch start": 0.1, "dispatch payload": 9.9})], tmp_path / "bars.svg", "2A2F")
    found = texts(tmp_path / "bars.svg")
    assert found.index("start") < found.index("payload")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("costs_us", [{}, {"gap": 0.0}])
def test_a_bar_of_nothing_is_drawn(tmp_path: Path, costs_us: dict[str, float]) -> None:
    phase_bars([(4, "x", costs_us)], tmp_path / "bars.svg", "2A2F")
    assert "0.0 \N{MICRO SIGN}s" in texts(tmp_path / "bars.svg")
