"""How fast the model is: its engine against SimPy's on two small programs, and the CPU time of one exchange of 2A2F.

    python experiments/bench.py [--against DIR] [--repeats N] [--json FILE]

All times are CPU times of one process with the cycle collector off, for whatever is measured; two things that are
compared run in turns (A B A B), and a ratio is that of two neighbours. `--against DIR` times the same exchanges with
another model too: DIR holds a module `bench_model` with `one(attention, ffn, tokens, union, data, collapse=, n=,
checkit=) -> (model, round trip, CPU seconds per exchange)`, which warms up by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from afdep_sim.errors import Refusal
from afdep_sim.model.engine import Engine, Task
from afdep_sim.model.machine import Inputs, Machine
from afdep_sim.model.profiles import load_profile
from afdep_sim.plan import Plan, build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.trace import write_whole
from afdep_sim.workload import Workload

REPEATS = 7
BAD_ARGUMENTS = 64


class Spread(NamedTuple):
    """The median of repeats between their ends."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """'1.50 (1.25-2.00)' with two digits."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of one call, and what it returned. Nothing is collected meanwhile, whoever is measured."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.process_time()
        result = function()
        return time.process_time() - start, result
    finally:
        if collecting:
            gc.enable()


# ---- engines: ping-pong and fan-in, the same operations in both ------------------------------------------------------

LATENCY_NS = 700.0
ISSUE_NS = 20.0
FAN = 64
ENGINE_AIM = 3.0
PING_PONG = "ping-pong"
FAN_IN = f"{FAN}-to-1 fan-in"
PROGRAMS = {PING_PONG: 20_000, FAN_IN: 600}
"""Program -> its rounds. A put costs its issue, a signal adds to a flag a latency later, a wait needs a threshold."""


class Flag:
    """A word that signals add to, and who waits for it: (threshold, whoever is woken)."""

    __slots__ = ("value", "waiting")

    def __init__(self) -> None:
        self.value = 0
        self.waiting: list[tuple[int, Any]] = []


def operations(program: str, rounds: int) -> int:
    """Puts, signals and waits that a program asks for."""
    return rounds * (6 if program == PING_PONG else 3 * FAN + 2)


def run_ours(program: str, rounds: int) -> float:
    """Run a program on this project's engine: tasks are plain functions. Returns the end time in ns.

    A signal is an event at its arrival, whatever the sender's clock; a wait looks at the flag at its task's time.
    """
    engine = Engine()
    at, block, wake, sync = engine.at, engine.block, engine.wake, engine.sync

    def put() -> None:
        engine.current.now += ISSUE_NS

    def signal(flag: Flag, amount: int) -> None:
        at(engine.current.now + LATENCY_NS, arrived, (flag, amount))

    def arrived(signalled: tuple[Flag, int]) -> None:
        flag, amount = signalled
        flag.value = value = flag.value + amount
        if flag.waiting:
            waiting, flag.waiting = flag.waiting, []
            for entry in waiting:
                if entry[0] <= value:
                    wake(entry[1], engine.now)
                else:
                    flag.waiting.append(entry)

    def wait(flag: Flag, threshold: int) -> None:
        task = sync()
        if flag.value < threshold:
            flag.waiting.append((threshold, task))
            block()

    def ping(mine: Flag, other: Flag) -> None:
        for n in range(1, rounds + 1):
            put()
            signal(other, 1)
            wait(mine, n)

    def pong(mine: Flag, other: Flag) -> None:
        for n in range(1, rounds + 1):
            wait(mine, n)
            put()
            signal(other, 1)

    def gather(flag: Flag, back: Flag) -> None:
        for n in range(1, rounds + 1):
            wait(flag, n * FAN)
            signal(back, 1)

    one, other = Flag(), Flag()
    if program == PING_PONG:
        engine.start(Task(ping, (one, other), 0.0))
        engine.start(Task(pong, (other, one), 0.0))
    else:
        engine.start(Task(gather, (one, other), 0.0))
        for _ in range(FAN):
            engine.start(Task(ping, (other, one), 0.0))
    return engine.run()


def run_simpy(program: str, rounds: int) -> float:
    """Run a program on SimPy: tasks are generators. Returns the end time in ns."""
    import simpy

    environment = simpy.Environment()
    timeout, event = environment.timeout, environment.event

    def put() -> Any:
        return timeout(ISSUE_NS)

    def signal(flag: Flag, amount: int) -> None:
        timeout(LATENCY_NS, (flag, amount)).callbacks.append(arrived)

    def arrived(signalled: Any) -> None:
        flag, amount = signalled.value
        flag.value = value = flag.value + amount
        if flag.waiting:
            waiting, flag.waiting = flag.waiting, []
            for entry in waiting:
                if entry[0] <= value:
                    entry[1].succeed()
                else:
                    flag.waiting.append(entry)

    def wait(flag: Flag, threshold: int) -> Any:
        """An event to yield, asked for only where the flag is not there yet."""
        waiter = event()
        flag.waiting.append((threshold, waiter))
        return waiter

    def ping(mine: Flag, other: Flag) -> Iterator[Any]:
        for n in range(1, rounds + 1):
            yield put()
            signal(other, 1)
            if mine.value < n:
                yield wait(mine, n)

    def pong(mine: Flag, other: Flag) -> Iterator[Any]:
        for n in range(1, rounds + 1):
            if mine.value < n:
                yield wait(mine, n)
            yield put()
            signal(other, 1)

    def gather(flag: Flag, back: Flag) -> Iterator[Any]:
        for n in range(1, rounds + 1):
            if flag.value < n * FAN:
                yield wait(flag, n * FAN)
            signal(back, 1)

    one, other = Flag(), Flag()
    if program == PING_PONG:
        environment.process(ping(one, other))
        environment.process(pong(other, one))
    else:
        environment.process(gather(one, other))
        for _ in range(FAN):
            environment.process(ping(other, one))
    environment.run()
    return float(environment.now)


@dataclass(frozen=True)
class EngineFigure:
    """Protocol operations per second of both engines on one program, and the ratio of neighbouring runs."""

    program: str
    rounds: int
    operations: int
    end_ns: float
    repeats: int
    ours_per_s: Spread
    simpy_per_s: Spread
    ratio: Spread
    aim: float
    met: bool


def compare_engines(program: str, rounds: int, repeats: int) -> EngineFigure:
    """Run one program on both engines in turns, after one short turn each; their end times must be equal."""
    for run in (run_ours, run_simpy):
        run(program, max(1, rounds // 10))
    count = operations(program, rounds)
    ours, simpy, ends = [], [], set()
    for _ in range(repeats):
        for run, rates in ((run_ours, ours), (run_simpy, simpy)):
            seconds, end = cpu_seconds(lambda run=run: run(program, rounds))
            rates.append(count / seconds)
            ends.add(end)
    assert len(ends) == 1, f"{program}: the engines end at {sorted(ends)} ns"
    ratio = Spread.of([a / b for a, b in zip(ours, simpy, strict=True)])
    return EngineFigure(
        program,
        rounds,
        count,
        ends.pop(),
        repeats,
        Spread.of(ours),
        Spread.of(simpy),
        ratio,
        ENGINE_AIM,
        ratio.median >= ENGINE_AIM,
    )


# ---- exchanges -------------------------------------------------------------------------------------------------------

TOPOLOGY = Topology(2, 2)
ARMS = ("afdep", "fastafd_m2n")


@dataclass(frozen=True)
class Cell:
    """Which exchange is timed: the mean of `exchanges` that follow a first one. The aim is in ms of CPU time.

    most: the most repeats, where a run takes seconds; 0 for no limit.
    """

    arm: str
    tokens: int
    data: bool
    collapse: bool
    exchanges: int
    aim_ms: float | None = None
    most: int = 0
    hidden: int = 2048

    @property
    def what(self) -> str:
        """What is moved, and who runs."""
        return "data" if self.data else "timing-only" if self.collapse else "timing-only, every warp"


CELLS = tuple(
    cell
    for arm in ARMS
    for cell in (
        Cell(arm, 1, data=False, collapse=True, exchanges=10, aim_ms=4.0),
        Cell(arm, 1, data=False, collapse=False, exchanges=2, most=3),
        Cell(arm, 2048, data=False, collapse=True, exchanges=1, most=2),
        Cell(arm, 2048, data=True, collapse=True, exchanges=1, aim_ms=1200.0, most=3),
    )
)


@dataclass(frozen=True)
class CellFigure:
    """CPU ms of one exchange and of the first; `theirs` and `ratio` (ours over theirs) where another model ran too."""

    cell: Cell
    repeats: int
    agents: int
    per_exchange_ms: Spread
    first_ms: Spread
    met: bool | None
    theirs_ms: Spread | None = None
    ratio: Spread | None = None


One = Callable[..., tuple[Any, float, float]]


def load_one(folder: Path) -> One:
    """`one` of the `bench_model` in `folder`, whose modules are found there."""
    if not (folder / "bench_model.py").is_file():
        raise Refusal(f"--against {str(folder)!r} has no bench_model.py")
    sys.path.insert(0, str(folder.resolve()))
    one: One = import_module("bench_model").one
    return one


def prepare(cell: Cell, exchanges: int) -> tuple[Plan, Inputs]:
    workload = Workload(cell.tokens, hidden=cell.hidden)
    plan = build_plan(TOPOLOGY, workload, Protocol.parse(cell.arm), exchanges, experts="precomputed")
    return plan, plan.inputs(cell.data, repeated=True)


def time_cell(cell: Cell, repeats: int, one: One | None = None) -> CellFigure:
    """Time one cell: (n + 1 exchanges less one) / n, where one exchange pays for everything that is new in a run.

    The cell where every warp is an agent must have the events of the one where idle warps are collapsed.
    """
    profile = load_profile("H100")
    machine = Machine(profile, data=cell.data, collapse=cell.collapse)
    first, all_ = prepare(cell, 1), prepare(cell, cell.exchanges + 1)
    Machine(profile, data=cell.data).run(*prepare(Cell(cell.arm, 1, cell.data, True, 1, hidden=cell.hidden), 1))
    firsts, per, theirs = [], [], []
    agents = 0
    for repeat in range(repeats):
        alone, _ = cpu_seconds(lambda: machine.run(*first))
        together, run = cpu_seconds(lambda: machine.run(*all_))
        events = run.events
        agents = len(events.agents) // len(all_[0].exchanges)
        # Rows and words are let go before another run needs as much memory.
        del run
        firsts.append(1e3 * alone)
        per.append(1e3 * (together - alone) / cell.exchanges)
        if not cell.collapse and repeat == 0:
            collapsed = Machine(profile, data=cell.data).run(*all_).events
            assert events == collapsed, f"{cell}: the events differ from those with idle warps collapsed"
        if one:
            m2n = cell.arm == "fastafd_m2n"
            layout = (TOPOLOGY.attention_ranks, TOPOLOGY.ffn_ranks, cell.tokens)
            gc.collect()
            seconds = one(*layout, m2n, cell.data, collapse=cell.collapse, n=cell.exchanges, checkit=False)[2]
            theirs.append(1e3 * seconds)
    spread = Spread.of(per)
    return CellFigure(
        cell,
        repeats,
        agents,
        spread,
        Spread.of(firsts),
        None if cell.aim_ms is None else spread.median <= cell.aim_ms,
        Spread.of(theirs) if one else None,
        Spread.of([a / b for a, b in zip(per, theirs, strict=True)]) if one else None,
    )


# ---- the report ------------------------------------------------------------------------------------------------------


def verdict(met: bool | None) -> str:
    return "" if met is None else "met" if met else "missed"


def aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Columns as wide as their widest entry, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(v.ljust(w) if i < left else v.rjust(w) for i, (v, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def engine_table(figures: Sequence[EngineFigure]) -> str:
    lines = [("program", "operations", "end us", "repeats", "ours k/s", "SimPy k/s", "ratio", "aim", "")]
    lines += [
        (
            f.program,
            str(f.operations),
            f"{f.end_ns / 1e3:.1f}",
            str(f.repeats),
            Spread(*(v / 1e3 for v in f.ours_per_s)).text(0),
            Spread(*(v / 1e3 for v in f.simpy_per_s)).text(0),
            f.ratio.text(2),
            f">= {f.aim:.1f}",
            verdict(f.met),
        )
        for f in figures
    ]
    return aligned(lines, 1)


def cell_table(figures: Sequence[CellFigure]) -> str:
    compared = any(f.theirs_ms for f in figures)
    lines = [["tokens", "arm", "what", "repeats", "agents", "ms per exchange", "first ms", "aim", ""]]
    if compared:
        lines[0] += ["theirs ms", "ours/theirs"]
    for f in figures:
        c = f.cell
        digits = 2 if f.per_exchange_ms.median < 100 else 0
        line = [str(c.tokens), c.arm, c.what, str(f.repeats), str(f.agents)]
        line += [f.per_exchange_ms.text(digits), f"{f.first_ms.median:.{digits}f}"]
        line += ["-" if c.aim_ms is None else f"<= {c.aim_ms:.0f}", verdict(f.met)]
        if compared:
            line += [f.theirs_ms.text(digits), f.ratio.text(2)] if f.theirs_ms and f.ratio else ["-", "-"]
        lines.append(line)
    return aligned(lines, 3)


def machine_line() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("greenlet", "numpy", "simpy"))
    return (
        f"{platform.platform()}, {platform.python_implementation()} {platform.python_version()}, "
        f"{os.cpu_count()} cores; {packages}"
    )


def as_json(command: str, repeats: int, engines: Sequence[EngineFigure], cells: Sequence[CellFigure]) -> dict[str, Any]:
    """The figures as they are printed, with every spread as {median, low, high}."""

    def plain(value: Any) -> Any:
        if isinstance(value, Spread):
            return value._asdict()
        return asdict(value) if isinstance(value, Cell) else value

    return {
        "command": command,
        "machine": machine_line(),
        "repeats": repeats,
        "engines": [{name: plain(value) for name, value in vars(f).items()} for f in engines],
        "cells": [{name: plain(value) for name, value in vars(f).items()} for f in cells],
    }


def watched(count: int) -> Iterator[None]:
    """On a terminal, say how far it is each time."""
    for done in range(1, count + 1):
        if sys.stderr.isatty():
            print(f"\r{done} of {count} ", end="\n" if done == count else "", file=sys.stderr, flush=True)
        yield


def measure(
    repeats: int, one: One | None, programs: Mapping[str, int], cells: Sequence[Cell]
) -> tuple[list[EngineFigure], list[CellFigure]]:
    """Everything the report needs; a cell may be repeated less often.

    Each cell has a process of its own, so that the memory of one is nothing to the next, whichever model took it.
    """
    progress = watched(len(programs) + len(cells))
    engines, timed = [], []
    for program, rounds in programs.items():
        engines.append(compare_engines(program, rounds, repeats))
        next(progress)
    for cell in cells:
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            timed.append(pool.submit(time_cell, cell, min(repeats, cell.most or repeats), one).result())
        next(progress)
    return engines, timed


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="bench.py", description="Time the model's engine and its exchanges.")
    parser.add_argument("--against", type=Path, metavar="DIR", help="time the same exchanges with DIR's bench_model")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"repeats (default {REPEATS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same figures as JSON")
    options = parser.parse_args(arguments)
    try:
        if options.repeats < 1:
            raise Refusal(f"repeats {options.repeats} is below 1")
        if options.json is not None and not options.json.parent.is_dir():
            raise Refusal(f"folder {str(options.json.parent)!r} of {options.json.name} does not exist")
        try:
            import_module("simpy")
        except ModuleNotFoundError as error:
            raise Refusal("the engines are compared with SimPy, which is not installed: the extra 'bench'") from error
        one = load_one(options.against) if options.against else None
    except Refusal as refusal:
        print(f"bench.py: {refusal}", file=sys.stderr)
        return BAD_ARGUMENTS
    command = shlex.join(["python", "experiments/bench.py", *arguments])
    print(f"{command}\n{machine_line()}\nCPU time, cycle collector off: median (lowest-highest) of the repeats\n")
    engines, cells = measure(options.repeats, one, PROGRAMS, CELLS)
    print(f"Protocol operations per second: ours and SimPy in turns\n\n{engine_table(engines)}\n")
    shape = f"{TOPOLOGY.name}, hidden 2048, BF16, top-8 of 128 experts, precomputed"
    print(f"CPU time of one exchange: {shape}; agents are the traced ones\n\n{cell_table(cells)}")
    if options.json:
        content = json.dumps(as_json(command, options.repeats, engines, cells), indent=1) + "\n"
        write_whole(options.json, content.encode())
        print(f"\nfigures: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
