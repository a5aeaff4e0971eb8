"""How long is a round trip? Arms side by side over token counts, medians in microseconds.

    python experiments/roundtrip.py --heap loopback --layout 2A2F --tokens 1,8,32,128,512 \
        --arm afdep --arm fastafd_m2n --repeats 3 --out roundtrip.json

Each repeat is a fresh process with new routes, and takes the arms in turn at every token count. Loopback: all ranks on
one GPU, which is no measurement of as many GPUs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from afdep_sim.plan import Plan, build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.runtime.residency import loopback_plan
from afdep_sim.topology import Topology
from afdep_sim.workload import Workload


def make_plan(options: argparse.Namespace, arm: str, tokens: int, repeat: int, exchanges: int) -> Plan:
    workload = Workload(
        tokens=tokens, hidden=options.hidden, topk=options.topk, dtype=options.dtype, seed=options.seed + repeat
    )
    topology, protocol = Topology.parse(options.layout), Protocol.parse(arm, options.sms)
    if options.machine == "model" and not options.loopback_shape:
        return build_plan(topology, workload, protocol, exchanges, "precomputed")
    return loopback_plan(topology, workload, protocol, exchanges, "precomputed", edges=options.edges)


def on_model(options: argparse.Namespace, arm: str, tokens: int, repeat: int) -> dict[str, Any]:
    from afdep_sim.model.machine import Machine
    from afdep_sim.model.profiles import load_profile
    from afdep_sim.trace import round_trip_us

    plan = make_plan(options, arm, tokens, repeat, 3)
    machine = Machine(load_profile("H200"), data=False, seed=options.seed + repeat)
    events = machine.run(plan, plan.inputs(False, repeated=True)).events
    return {"us": round_trip_us(events, plan.topology)[0]}


def on_gpu(options: argparse.Namespace, machine: Any, arm: str, tokens: int, repeat: int) -> dict[str, Any]:
    from afdep_sim.kernels.cuda.compile import native_digest

    plan = make_plan(options, arm, tokens, repeat, 1)
    timed = machine.time_round_trips(plan, options.exchanges, options.replays, clock=options.clock)
    slowest = timed.slowest_us
    return {
        "us": float(np.median(slowest)),
        "p05_us": float(np.quantile(slowest, 0.05)),
        "p95_us": float(np.quantile(slowest, 0.95)),
        "graph_us": float(np.median(timed.whole_us)),
        "rows_checked": timed.rows_checked,
        "native_digest": native_digest(plan),
        "epilogue": next(
            {"grid": launch.grid, "programmatic": launch.programmatic}
            for stream in plan.exchanges[0].streams
            for launch in stream
            if not launch.cooperative
        ),
    }


def run_repeat(options: argparse.Namespace, repeat: int) -> list[dict[str, Any]]:
    """Every token count and arm once, arms in turn; odd repeats take them backwards."""
    machine: Any = None
    if options.machine == "gpu":
        from afdep_sim.runtime.kernels import prepare_kernels
        from afdep_sim.runtime.loopback import LoopbackMachine

        cooperative = False if options.no_cooperative else None
        machine = LoopbackMachine(limit_ms=options.limit_ms, cooperative=cooperative)
        prepare_kernels(
            [make_plan(options, arm, tokens, repeat, 1) for arm in options.arm for tokens in options.tokens]
        )
    results = []
    for tokens in options.tokens:
        for arm in options.arm if repeat % 2 == 0 else reversed(options.arm):
            row: dict[str, Any] = {"machine": where(options), "tokens": tokens, "arm": arm, "repeat": repeat}
            try:
                row |= (
                    on_model(options, arm, tokens, repeat)
                    if machine is None
                    else on_gpu(options, machine, arm, tokens, repeat)
                )
            except Exception as error:  # noqa: BLE001 - the other cells are still worth having
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            text = row.get("error") or " ".join(f"{k} {v:.2f}" for k, v in row.items() if k.endswith("us"))
            print(f"{where(options)} repeat {repeat} T={tokens} {arm}: {text}", flush=True)
            results.append(row)
            if row.get("error", "").startswith("CudaError"):
                return results
    return results


def where(options: argparse.Namespace) -> str:
    return "model" if options.machine == "model" else str(options.heap)


def in_fresh_processes(arguments: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "repeat.json"
            command = [sys.executable, __file__, *arguments, "--repeat", str(repeat), "--out", str(out)]
            subprocess.run(command, check=False)
            if out.exists():
                results += json.loads(out.read_text())["results"]
            else:
                print(f"repeat {repeat} left no results", flush=True)
    return results


def table(options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """Medians over repeats; the change of each arm against the last one."""
    title = f"{where(options)} {options.layout} H={options.hidden} {options.dtype} top-{options.topk}, us, medians"
    lines = [
        f"{title} of {options.repeats}",
        f"{where(options):9} {'T':>5} " + "".join(f"{a:>28}" for a in options.arm),
    ]
    for tokens in options.tokens:
        cells: dict[str, list[float]] = {
            arm: [r["us"] for r in results if r["tokens"] == tokens and r["arm"] == arm and "us" in r]
            for arm in options.arm
        }
        base = cells[options.arm[-1]]
        line = f"{where(options):9} {tokens:5} "
        for arm in options.arm:
            text = f"{median(cells[arm]):.2f}" if cells[arm] else "-"
            if arm != options.arm[-1] and cells[arm] and base:
                text += f" ({100 * (median(cells[arm]) / median(base) - 1):+.1f}%)"
            line += f"{text:>28}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heap", choices=("loopback",), default="loopback", help="where the ranks' memory lies")
    parser.add_argument("--machine", choices=("gpu", "model"), default="gpu", help="the GPU, or the model on a CPU")
    parser.add_argument("--loopback-shape", action="store_true", help="model: the grids and edges that loopback has")
    parser.add_argument("--layout", default="2A2F")
    parser.add_argument("--tokens", type=lambda s: [int(t) for t in s.split(",")], default=[1, 8, 32, 128, 512])
    parser.add_argument("--arm", action="append", help="once per arm; the last is the base (default: both presets)")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--sms", type=int, default=24, help="transport blocks per rank")
    parser.add_argument("--edges", choices=("auto", "programmatic", "plain"), default="auto", help="of epilogues")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--repeat", type=int, help="run this repeat alone, in this process")
    parser.add_argument("--exchanges", type=int, default=17, help="per graph; a round trip is over one fewer")
    parser.add_argument("--replays", type=int, default=50, help="of each graph")
    parser.add_argument("--clock", choices=("events", "timer"), default="events", help="what marks an exchange's end")
    parser.add_argument("--limit-ms", type=float, default=2000.0, help="how long a wait in a kernel may last")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds after which a repeat ends, whatever runs")
    parser.add_argument("--no-cooperative", action="store_true", help="launch transport kernels without the attribute")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    options.arm = options.arm or ["afdep", "fastafd_m2n"]
    if options.repeat is not None:
        if options.budget:
            faulthandler.dump_traceback_later(options.budget, exit=True)
        results = run_repeat(options, options.repeat)
        faulthandler.cancel_dump_traceback_later()
    elif options.machine == "model":
        results = [row for repeat in range(options.repeats) for row in run_repeat(options, repeat)]
    else:
        results = in_fresh_processes(given, options.repeats)
    if options.out:
        settings = {k: v for k, v in vars(options).items() if k not in ("out", "repeat")}
        options.out.write_text(json.dumps({"settings": settings, "results": results}, indent=1))
    if options.repeat is None:
        print(table(options, results))
    wanted = len(options.tokens) * len(options.arm) * (1 if options.repeat is not None else options.repeats)
    return int(len([row for row in results if "us" in row]) < wanted)


if __name__ == "__main__":
    raise SystemExit(main())
