"""`afdep run LAYOUT`: round trips of several arms and token counts, by phase, beside the published figures."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from afdep_sim.cli.options import add_shape, add_traffic, table, workload_of
from afdep_sim.errors import Refusal
from afdep_sim.model.profiles import available, load_profile
from afdep_sim.perfetto import write_perfetto
from afdep_sim.plan import build_plan
from afdep_sim.plots import check_target, phase_bars
from afdep_sim.protocol import Protocol
from afdep_sim.records import (
    Row,
    find_published,
    paired_change_pct,
    paired_change_row,
    published_rows,
    round_trip_row,
    write_rows,
)
from afdep_sim.routing import imbalance
from afdep_sim.simulation import simulate
from afdep_sim.topology import Topology
from afdep_sim.trace import phase_table
from afdep_sim.workload import ROUTINGS, Workload

DEFAULT_ARMS = ("afdep", "fastafd_m2n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layout", help="ranks of each role: 2A2F, 3A:1F, 2F:2A")
    add_shape(parser)
    parser.add_argument("--tokens", default="1,8,32,128,512,2048", help="tokens per Attention rank, comma separated")
    add_traffic(parser)
    parser.add_argument(
        "--arm",
        action="append",
        metavar="ARM",
        help="a preset with +NAME=VALUE switches; repeat it for more, the last is the baseline "
        f"(default {' and '.join(DEFAULT_ARMS)})",
    )
    parser.add_argument("--profile", default="H100", help=f"machine: {', '.join(available())} (default H100)")
    parser.add_argument("--sms", type=int, default=24, help="SMs of dispatch and combine (default 24)")
    parser.add_argument("--repeats", type=int, default=1, help="repeats, each with new routes and skew (default 1)")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one per core)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write rows with the columns of published.csv")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write phase bars (.svg or .png)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the first arm's first token count as Perfetto JSON"
    )


@dataclass(frozen=True)
class Cell:
    """One simulation to run: a repeat of an arm at a token count."""

    topology: Topology
    workload: Workload
    protocol: Protocol
    profile: str
    seed: int


@dataclass(frozen=True)
class Result:
    """What the tables need of a cell. Times in us."""

    round_trip_us: float
    phase_costs_us: dict[str, float]
    rows_checked: int


def run_cell(cell: Cell) -> Result:
    """Simulate one cell; every row is compared with the reference."""
    done = simulate(cell.topology, cell.workload, cell.protocol, profile=cell.profile, seed=cell.seed)
    return Result(done.round_trip_us, done.phase_costs_us, done.rows_checked)


@dataclass(frozen=True)
class Grid:
    """What a command asks for, checked: every arm at every token count, `repeats` times."""

    topology: Topology
    workloads: list[Workload]
    protocols: list[Protocol]
    profile: str
    repeats: int

    def cells(self) -> Iterator[Cell]:
        for workload in self.workloads:
            for protocol in self.protocols:
                for repeat in range(self.repeats):
                    seed = workload.seed + repeat
                    yield Cell(self.topology, replace(workload, seed=seed), protocol, self.profile, seed)


def parse_grid(options: argparse.Namespace) -> Grid:
    """Everything that can be refused is refused here, before anything runs."""
    topology = Topology.parse(options.layout)
    load_profile(options.profile)
    if options.repeats < 1:
        raise Refusal(f"repeats {options.repeats} is below 1")
    if options.workers < 0:
        raise Refusal(f"workers {options.workers} is below 0 (0 is one per core)")
    arms = options.arm or list(DEFAULT_ARMS)
    protocols = [Protocol.parse(arm, options.sms) for arm in arms]
    if len(set(protocols)) < len(protocols):
        raise Refusal(f"arms {', '.join(arms)} name one protocol twice")
    workloads = []
    for text in options.tokens.split(","):
        if not (text.strip().isascii() and text.strip().isdigit()):
            raise Refusal(f"tokens {text.strip()!r} is not a whole number of 0 or more")
        workloads.append(workload_of(options, int(text)))
    if len(set(workloads)) < len(workloads):
        raise Refusal(f"tokens {options.tokens} name one count twice")
    for workload in workloads:
        for protocol in protocols:
            build_plan(topology, workload, protocol)
    check_targets([path for path in (options.csv, options.plot, options.trace) if path is not None])
    if options.plot is not None:
        check_target(options.plot)
    return Grid(topology, workloads, protocols, options.profile, options.repeats)


def check_targets(paths: Sequence[Path]) -> None:
    """Refuse files that could not be written, or that would replace each other."""
    for path in paths:
        if not path.name:
            raise Refusal(f"file name {str(path)!r} is empty")
        if path.is_dir():
            raise Refusal(f"{str(path)!r} is a folder, not a file")
        if not path.parent.is_dir():
            raise Refusal(f"folder {str(path.parent)!r} of {path.name} does not exist")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise Refusal(f"folder {str(path.parent)!r} of {path.name} cannot be written ({error.strerror})") from None
    if len({path.resolve() for path in paths}) < len(paths):
        raise Refusal(f"two of the files {', '.join(map(str, paths))} are one")


def run_grid(grid: Grid, workers: int) -> dict[Cell, Result]:
    """Results by cell; the same whatever the number of processes. The heaviest cells start first."""
    cells = sorted(grid.cells(), key=lambda cell: -cell.workload.bucket)
    workers = min(workers or os.cpu_count() or 1, len(cells))
    if workers == 1:
        return dict(zip(cells, _watched(map(run_cell, cells), len(cells)), strict=True))
    with ProcessPoolExecutor(workers) as pool:
        return dict(zip(cells, _watched(pool.map(run_cell, cells), len(cells)), strict=True))


def _watched(results: Iterable[Result], count: int) -> Iterator[Result]:
    """Pass results on; on a terminal, say how far it is."""
    shown = sys.stderr.isatty()
    for done, result in enumerate(results, 1):
        if shown:
            print(f"\r{done} of {count} simulations", end="\n" if done == count else "", file=sys.stderr, flush=True)
        yield result


def main(options: argparse.Namespace) -> int:
    grid = parse_grid(options)
    results = run_grid(grid, options.workers)
    by_arm: dict[tuple[object, Protocol], list[Result]] = {}
    for cell in grid.cells():
        by_arm.setdefault((cell.workload.tokens, cell.protocol), []).append(results[cell])
    text, rows = summary(grid, by_arm)
    costs = {key: _mean_costs([r.phase_costs_us for r in found]) for key, found in by_arm.items()}
    written = []
    if options.csv:
        write_rows(options.csv, rows)
        written.append(f"rows: {options.csv}")
    if options.plot:
        bars = [(int(str(tokens)), protocol.arm, c) for (tokens, protocol), c in costs.items()]
        phase_bars(bars, options.plot, title=title(grid))
        written.append(f"figure: {options.plot}")
    if options.trace:
        cell = next(grid.cells())
        done = simulate(cell.topology, cell.workload, cell.protocol, profile=cell.profile, seed=cell.seed)
        write_perfetto(options.trace, done.run.events, grid.topology)
        written.append(f"trace: {options.trace} ({cell.protocol.arm}, {cell.workload.tokens} tokens)")
    # Files first: whoever reads this may stop reading at any line.
    print(heading(grid))
    print(text)
    print("\nPhases on the critical path, us per exchange; columns are tokens and arm\n")
    print(phase_table({f"{tokens} {_short(protocol, grid)}": c for (tokens, protocol), c in costs.items()}))
    for protocol in grid.protocols:
        if off := protocol.resolve(grid.topology).off:
            print(f"{protocol.arm}: no effect on {grid.topology.name}: {', '.join(off)}")
    print("\n".join(written), end="\n" if written else "")
    return 0


def _mean_costs(costs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(c.get(name, 0.0) for c in costs) for name in costs[0]}


def _short(protocol: Protocol, grid: Grid) -> str:
    """'afdep', 'm2n', or the arm's number where switches make names long."""
    if protocol.arm == "fastafd_m2n":
        return "m2n"
    return protocol.arm if protocol.arm == "afdep" else f"arm{grid.protocols.index(protocol) + 1}"


def title(grid: Grid) -> str:
    """What a figure is headed with: layout, shape and machine."""
    workload = grid.workloads[0]
    return f"{grid.topology.name}, hidden {workload.hidden}, {workload.dtype}: model of {grid.profile.upper()}"


def heading(grid: Grid) -> str:
    """What the tables are headed with: everything but tokens and arms."""
    workload = grid.workloads[0]
    return (
        f"{grid.topology.name}, one NVLink domain: hidden {workload.hidden}, {workload.dtype}, top-{workload.topk} of "
        f"{workload.real_experts(grid.topology)} experts, {grid.protocols[0].transport_sms} transport SMs, "
        f"{_routing(grid)}\n"
        f"model of {load_profile(grid.profile).gpu}, uncalibrated; {grid.repeats} repeat(s), median; "
        "round trip = maximum over Attention ranks\n"
    )


def _routing(grid: Grid) -> str:
    """The routing by name and, of the busiest experts and ranks, the load over the mean: 1 is even."""
    topology, workload = grid.topology, grid.workloads[-1]
    name = workload.routing if workload.routing in ROUTINGS else Path(workload.routing).name
    routes = np.concatenate([workload.source(topology, r, 0, data=False).topk for r in topology.attention])
    experts = workload.real_experts(topology)
    return (
        f"{name} routing (at {workload.tokens} tokens the busiest expert has {imbalance(routes, experts, experts):.2f} "
        f"and the busiest FFN rank {imbalance(routes, experts, topology.ffn_ranks):.2f} times the mean load)"
    )


def summary(grid: Grid, by_arm: Mapping[tuple[object, Protocol], list[Result]]) -> tuple[str, list[Row]]:
    """The main table (aligned text) and its rows in the columns of published.csv."""
    gpu, topology, profile, baseline = load_profile(grid.profile).gpu, grid.topology, grid.profile, grid.protocols[-1]
    find = partial(find_published, published_rows(), gpu=gpu, topology=topology)
    lines = [("tokens", "arm", "round trip us", "published", "error", "change", "published", "rows checked")]
    rows: list[Row] = []
    for workload in grid.workloads:
        base = [r.round_trip_us for r in by_arm[workload.tokens, baseline]]
        for protocol in grid.protocols:
            found = by_arm[workload.tokens, protocol]
            times = [r.round_trip_us for r in found]
            median = statistics.median(times)
            rows.append(
                round_trip_row(
                    median,
                    gpu=gpu,
                    profile=profile,
                    topology=topology,
                    workload=workload,
                    protocol=protocol,
                    low_us=min(times),
                    high_us=max(times),
                )
            )
            known = _value(find(workload=workload, protocol=protocol))
            change = known_change = ""
            if protocol != baseline:
                pct = paired_change_pct(times, base)
                rows.append(
                    paired_change_row(
                        pct,
                        gpu=gpu,
                        profile=profile,
                        topology=topology,
                        workload=workload,
                        protocol=protocol,
                        baseline=baseline,
                    )
                )
                change = f"{pct:+.1f}%"
                paired = _value(find(workload=workload, protocol=protocol, baseline=baseline))
                known_change = "-" if paired is None else f"{paired:+.1f}%"
            lines.append(
                (
                    str(workload.tokens),
                    protocol.arm,
                    f"{median:.2f}",
                    "-" if known is None else f"{known:.2f}",
                    "-" if known is None else f"{100 * (median / known - 1):+.1f}%",
                    change,
                    known_change,
                    str(sum(r.rows_checked for r in found)),
                )
            )
    return f"{table(lines, left=(1,))}\nchange: against {baseline.arm}, geometric mean of paired repeats", rows


def _value(row: Row | None) -> float | None:
    return None if row is None else row.value
