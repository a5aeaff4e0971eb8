"""Figures of phase costs. matplotlib is imported where a figure is drawn, so the rest works without it."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from afdep_sim.errors import Refusal
from afdep_sim.kernels.phases import NAMES
from afdep_sim.trace import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = tuple[int, str, Mapping[str, float]]
"""(tokens, arm, microseconds by phase name)."""
Shade = tuple[float, float, float]

FAMILIES: Mapping[str, tuple[float, float, float]] = {
    "dispatch": (0.00, 0.45, 0.70),
    "copy": (0.90, 0.62, 0.00),
    "experts": (0.94, 0.89, 0.26),
    "combine": (0.00, 0.62, 0.45),
    "reduce": (0.80, 0.47, 0.65),
    "gap": (0.55, 0.55, 0.55),
}
"""Families of phases in the order of an exchange, and their colours (Okabe and Ito, safe for colour-blind readers)."""
SMALL = 0.03
"""A phase below this share of every bar is drawn with its family's other small ones."""

WIDTH_IN = 11.0
BAR_IN = 0.56
TEXT = "#222222"


class Part(NamedTuple):
    """One colour of the figure: the phases it stands for, and what it is called inside its family."""

    family: str
    label: str
    phases: tuple[str, ...]
    shade: Shade

    def cost_us(self, costs_us: Mapping[str, float]) -> float:
        return math.fsum(costs_us.get(phase, 0.0) for phase in self.phases)


@dataclass(frozen=True)
class Sheet:
    """Where everything lies, in inches from the top left corner; a panel holds the bars of one token count."""

    panels: tuple[tuple[int, tuple[tuple[str, Mapping[str, float]], ...]], ...]
    label_in: float
    legend_rows: int

    top_in = 1.32
    between_in = 0.92
    right_in = 1.0

    @property
    def bars_in(self) -> float:
        """The width that the longest bar of each panel takes."""
        return WIDTH_IN - self.label_in - self.right_in

    def panel(self, index: int) -> tuple[float, float]:
        """(top, height) of a panel's bars."""
        before = sum(len(bars) * BAR_IN + self.between_in for _, bars in self.panels[:index])
        return self.top_in + before, len(self.panels[index][1]) * BAR_IN

    @property
    def legend_top_in(self) -> float:
        top_in, height_in = self.panel(len(self.panels) - 1)
        return top_in + height_in + 0.72

    @property
    def height_in(self) -> float:
        return self.legend_top_in + 0.34 + 0.21 * self.legend_rows


def check_target(path: Path) -> None:
    """Refuse a figure that could not be drawn: a suffix other than .svg or .png, or no matplotlib to draw with."""
    if path.suffix not in (".svg", ".png"):
        raise Refusal(f"plot file {path.name!r} does not end in .svg or .png")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise Refusal("plots need matplotlib: pip install 'afdep-sim[plots]'") from None


def phase_bars(results: Sequence[Result], path: str | os.PathLike[str], title: str) -> None:
    """Draw what each exchange's time went to: a panel per token count, a stacked bar per arm, its total at the end.

    results: (tokens, arm, microseconds by phase name); panels and bars come in the order of their first appearance.
    title: names the layout and shape. The suffix of `path` is .svg or .png; equal input gives equal bytes, and the
    file is written whole or not at all.

    Raises `Refusal` without matplotlib or for another suffix, `ValueError` without results, for an arm that a panel
    has twice, and for a cost that is negative or not finite.
    """
    path = Path(path)
    check_target(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    _check(results)
    settings: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "svg.fonttype": "none",
        "svg.hashsalt": "afdep_sim",
        "text.color": TEXT,
        "text.parse_math": False,
    }
    image = io.BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        figure = Figure()
        _draw(figure, results, title)
        metadata = {"Date": None, "Creator": "afdep_sim"} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(image, format=path.suffix[1:], dpi=150, metadata=metadata)
    write_whole(path, image.getvalue())


def _check(results: Sequence[Result]) -> None:
    if not results:
        raise ValueError("there are no results to plot")
    seen = set()
    for tokens, arm, costs_us in results:
        if (tokens, arm) in seen:
            raise ValueError(f"arm {arm!r} at {tokens} tokens is in the results twice")
        seen.add((tokens, arm))
        for phase, cost_us in costs_us.items():
            if not (math.isfinite(cost_us) and cost_us >= 0):
                raise ValueError(f"phase {phase!r} of arm {arm!r} at {tokens} tokens costs {cost_us} us")


def _family(phase: str) -> str:
    first = phase.split(maxsplit=1)[0]
    return first if first in FAMILIES else "gap"


def _parts(results: Sequence[Result]) -> list[Part]:
    """What to draw, in the order of an exchange: the phases that count somewhere, and each family's rest."""
    shares: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    for _, _, costs_us in results:
        total_us = math.fsum(costs_us.values()) or 1.0
        for phase, cost_us in costs_us.items():
            shares[phase] = max(shares.get(phase, 0.0), cost_us / total_us)
    parts: list[Part] = []
    for family, colour in FAMILIES.items():
        mine = [phase for phase, share in shares.items() if share > 0 and _family(phase) == family]
        small = [phase for phase in mine if shares[phase] < SMALL]
        if len(small) == 1:
            small = []
        groups = [(phase,) for phase in mine if phase not in small] + ([tuple(small)] if small else [])
        for i, group in enumerate(groups):
            label = _short(family, group[0]) if len(group) == 1 else f"{len(group)} small phases"
            parts.append(Part(family, label, group, _shade(colour, i, len(groups))))
    return parts


def _short(family: str, phase: str) -> str:
    return phase.removeprefix(family).strip() or phase


def _shade(colour: Shade, index: int, count: int) -> Shade:
    """The family's colour, from darker to lighter over its `count` parts; few parts stay near it."""
    tone = (index / max(count - 1, 1) - 0.28) * min(1.0, (count - 1) / 5)
    red, green, blue = (c + (1 - c) * tone if tone > 0 else c + c * tone for c in colour)
    return red, green, blue


def _ink(shade: Shade) -> str:
    """Black or white, whichever stands out more against `shade` (relative luminance of sRGB)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shade]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def _width_in(text: str, points: float) -> float:
    """About how wide a line of text is; on the safe side for the letters that phases and arms are made of."""
    return 0.66 * points / 72 * max(map(len, text.split("\n")))


def _wrapped(arm: str) -> str:
    """A long arm in lines that begin with its switches."""
    lines = textwrap.wrap(arm.replace("+", " +"), 30, break_on_hyphens=False) if len(arm) > 30 else [arm]
    return "\n".join(line.replace(" +", "+") for line in lines)


def _arm_points(label: str) -> float:
    return 8.0 if "\n" in label else 10.0


def _draw(figure: Figure, results: Sequence[Result], title: str) -> None:
    parts = _parts(results)
    panels: dict[int, list[tuple[str, Mapping[str, float]]]] = {}
    for tokens, arm, costs_us in results:
        panels.setdefault(tokens, []).append((_wrapped(arm), costs_us))
    sheet = Sheet(
        tuple((tokens, tuple(bars)) for tokens, bars in panels.items()),
        max(1.0, 0.4 + max(_width_in(arm, _arm_points(arm)) for bars in panels.values() for arm, _ in bars)),
        max(sum(part.family == family for part in parts) for family in FAMILIES) if parts else 0,
    )
    figure.set_size_inches(WIDTH_IN, sheet.height_in)
    figure.text(0.3 / WIDTH_IN, 1 - 0.42 / sheet.height_in, title, fontsize=15, fontweight="bold", va="center")
    subtitle = "Mean time per exchange on the critical path of the slowest Attention rank, by what it was spent on"
    figure.text(0.3 / WIDTH_IN, 1 - 0.73 / sheet.height_in, subtitle, fontsize=10.5, va="center", color="#555555")
    for i, (tokens, bars) in enumerate(sheet.panels):
        top_in, height_in = sheet.panel(i)
        axes = figure.add_axes(
            (
                sheet.label_in / WIDTH_IN,
                1 - (top_in + height_in) / sheet.height_in,
                sheet.bars_in / WIDTH_IN,
                height_in / sheet.height_in,
            )
        )
        _panel(axes, parts, bars, sheet.bars_in)
        axes.set_title(f"T = {tokens:,} token{'s' * (tokens != 1)}", loc="left", fontsize=11, fontweight="bold", pad=7)
        if i == len(sheet.panels) - 1:
            own = "; each panel has its own scale" if len(sheet.panels) > 1 else ""
            axes.set_xlabel(f"microseconds per exchange{own}", fontsize=10, color=TEXT, labelpad=5)
    _legend(figure, parts, sheet)


def _panel(axes: Axes, parts: Sequence[Part], bars: Sequence[tuple[str, Mapping[str, float]]], width_in: float) -> None:
    """The bars of one token count, the first on top."""
    longest_us = max(math.fsum(costs_us.values()) for _, costs_us in bars) or 1.0
    for row, (_, costs_us) in enumerate(bars):
        left_us = 0.0
        for part in parts:
            cost_us = part.cost_us(costs_us)
            if cost_us <= 0:
                continue
            axes.barh(row, cost_us, 0.8, left_us, color=part.shade, edgecolor="white", linewidth=0.8)
            text = _inside(part, cost_us, width_in * cost_us / longest_us)
            middle_us, ink = left_us + cost_us / 2, _ink(part.shade)
            axes.text(middle_us, row, text, ha="center", va="center", fontsize=8, color=ink, linespacing=1.15)
            left_us += cost_us
        total = f"{math.fsum(costs_us.values()):.1f} \N{MICRO SIGN}s"
        axes.annotate(
            total,
            (left_us, row),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    axes.set_xlim(0, longest_us)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    for tick, (arm, _) in zip(axes.set_yticks(range(len(bars)), [arm for arm, _ in bars]), bars, strict=True):
        tick.label1.set_fontsize(_arm_points(arm))
    axes.tick_params(axis="x", labelsize=9, color="#999999", labelcolor="#555555", length=3)
    axes.tick_params(axis="y", length=0, pad=6, labelcolor=TEXT)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#999999")


def _inside(part: Part, cost_us: float, room_in: float) -> str:
    """What fits into a bar's piece: its name and cost, its cost, or nothing."""
    value = f"{cost_us:.1f}"
    for text in _namings(part):
        if _width_in(f"{text}\n{value}", 8) + 0.06 <= room_in:
            return f"{text}\n{value}"
    return value if _width_in(value, 8) + 0.04 <= room_in else ""


def _namings(part: Part) -> Iterator[str]:
    if part.label != part.family:
        yield f"{part.family} {part.label}" if len(part.phases) == 1 else f"{part.family}, {part.label}"
    yield part.label


def _legend(figure: Figure, parts: Sequence[Part], sheet: Sheet) -> None:
    """A column per family under the panels: its name, then a swatch per part, in the order of the bars."""
    families = list(dict.fromkeys(part.family for part in parts))
    column_in = (WIDTH_IN - 0.6) / max(len(families), 1)

    def put(column: int, row: int, right_in: float) -> tuple[float, float]:
        down_in = sheet.legend_top_in + 0.1 + 0.21 * row
        return (0.3 + column * column_in + right_in) / WIDTH_IN, 1 - down_in / sheet.height_in

    from matplotlib.patches import Rectangle

    for column, family in enumerate(families):
        figure.text(*put(column, 0, 0), family, fontsize=9.5, fontweight="bold", va="center")
        for row, part in enumerate((part for part in parts if part.family == family), 1):
            x, y = put(column, row, 0)
            size = (0.2 / WIDTH_IN, 0.14 / sheet.height_in)
            corner = (x, y - size[1] / 2)
            figure.add_artist(Rectangle(corner, *size, transform=figure.transFigure, color=part.shade, linewidth=0))
            figure.text(*put(column, row, 0.27), _spelled(part, column_in - 0.4), fontsize=9, va="center")


def _spelled(part: Part, room_in: float) -> str:
    """A part's name in the legend: all of its phases, if they fit into one line."""
    if part.phases == ("gap",):
        return "between kernels"
    every = ", ".join(_short(part.family, phase) for phase in part.phases)
    return every if len(part.phases) == 1 or _width_in(every, 9) <= room_in else part.label
