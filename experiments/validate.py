"""Is every row right? Plans over the one-domain matrix, each run and compared with the reference bit for bit.

    python experiments/validate.py --heap loopback --cases core
    python experiments/validate.py --machine model --only fp8

One line per case, 'N passed, M failed' last; the exit status is 1 where something failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from afdep_sim.plan import Plan
from afdep_sim.protocol import SWITCHES, Protocol
from afdep_sim.reference import check_combined, check_received, check_weights
from afdep_sim.run import Run
from afdep_sim.runtime.residency import Edges, loopback_plan
from afdep_sim.topology import Topology
from afdep_sim.window import CLEARED, WORD, WORD_OFFSETS, WORDS
from afdep_sim.workload import Source, Workload

ARMS = ("afdep", "fastafd_m2n")
CONTROLS = tuple(f"afdep+{s.env}=1" for s in SWITCHES if s.built == (False, True))
TOKENS = (0, 1, 8, 33, 128, 512)
Inputs = list[dict[int, Source]]


@dataclass(frozen=True)
class Case:
    """One run. sequence: what differs from `workload` exchange by exchange, over and over; else `exchanges` alike.

    bad_route: (token, lane, expert) that the first Attention rank brings in the last exchange, to be refused.
    """

    name: str
    layout: str = "2A2F"
    arm: str = "afdep"
    workload: Mapping[str, Any] = field(default_factory=dict)
    sequence: tuple[Mapping[str, Any], ...] = ({},)
    exchanges: int = 3
    experts: str = "stand_in"
    edges: Edges = "auto"
    sms: int = 24
    bad_route: tuple[int, int, int] | None = None

    def plan(self) -> Plan:
        """For one GPU that all ranks share, on either machine."""
        base = {"tokens": 33, "hidden": 512, **self.workload}
        workloads = [
            Workload(**{**base, **self.sequence[n % len(self.sequence)], "seed": 7}) for n in range(self.exchanges)
        ]
        topology, protocol = Topology.parse(self.layout), Protocol.parse(self.arm, self.sms)
        experts: Any = self.experts
        return loopback_plan(topology, workloads, protocol, experts=experts, edges=self.edges)

    def inputs(self, plan: Plan) -> Inputs:
        """Other rows and routes in every exchange."""
        inputs = plan.inputs()
        if self.bad_route is not None:
            token, lane, expert = self.bad_route
            rank = plan.topology.attention[0]
            source = inputs[-1][rank]
            topk = source.topk.copy()
            topk[token, lane] = expert
            inputs[-1] = {**inputs[-1], rank: replace(source, topk=topk)}
        return inputs


def core_cases() -> Iterator[Case]:
    """What a first run on a machine should see: each shape of kernel once."""
    for arm in ARMS:
        for tokens in (1, 33, 128):
            yield Case(f"{arm} bf16 T={tokens}", arm=arm, workload={"tokens": tokens, "hidden": 2048})
        yield Case(f"{arm} fp8", arm=arm, workload={"dtype": "fp8", "hidden": 2048})
        yield Case(f"{arm} not expanded", arm=arm, workload={"expanded": False, "combine_weights": True})
        yield Case(f"{arm} precomputed", arm=arm, experts="precomputed")
        yield Case(f"{arm} plain edges", arm=arm, edges="plain")
    for arm in CONTROLS:
        yield Case(f"{arm}", arm=arm)
    yield Case("top-k layout", arm="afdep+dev:topk_layout")
    yield Case("one FFN rank", layout="3A1F")
    yield Case("one FFN rank, view", layout="3A1F", arm="afdep+COLLECT_VIEW", workload={"dropped_share": 0.5})
    yield Case("bias", workload={"bias": 2})
    yield Case("bucket cycle", sequence=({"bucket": 64}, {"bucket": 128}, {"bucket": 40}), exchanges=6)
    yield Case("empty source", workload={"tokens": (0, 33)})
    yield Case("dropped routes", workload={"dropped_share": 0.3})
    for expert in (128, -2, 1 << 40):
        yield Case(f"route {expert} refused", bad_route=(20, 5, expert))


def all_cases() -> Iterator[Case]:
    """The matrix: every arm and control against every layout of rows."""
    yield from core_cases()
    rows: tuple[tuple[str, dict[str, Any]], ...] = (
        ("bf16", {}),
        ("fp8", {"dtype": "fp8"}),
        ("bf16 not expanded", {"expanded": False}),
        ("fp8 not expanded, weights", {"dtype": "fp8", "expanded": False, "combine_weights": True}),
    )
    for arm in (*ARMS, *CONTROLS):
        for name, workload in rows:
            for deviation in ("", "+dev:topk_layout"):
                if deviation and not arm.startswith("afdep"):
                    continue
                yield Case(f"matrix {arm}{deviation} {name}", arm=arm + deviation, workload=workload)
    for arm in ARMS:
        for layout in ("1A1F", "1A3F", "3A1F", "3A2F"):
            yield Case(f"matrix {arm} {layout}", layout=layout, arm=arm, workload={"tokens": 40})
        for tokens in TOKENS:
            for dtype in ("bf16", "fp8"):
                workload = {"tokens": tokens, "hidden": 2048, "dtype": dtype}
                yield Case(f"matrix {arm} {dtype} T={tokens}", arm=arm, workload=workload)
        for hidden in (256, 4096, 7168):
            yield Case(f"matrix {arm} H={hidden}", arm=arm, workload={"hidden": hidden})
        for topk in (1, 4, 32):
            yield Case(f"matrix {arm} k={topk}", arm=arm, workload={"topk": topk})
        yield Case(f"matrix {arm} skew", arm=arm, workload={"routing": "skew", "tokens": 128})
        yield Case(f"matrix {arm} alignment", arm=arm, workload={"expert_alignment": 16, "host_counts": True})
        yield Case(f"matrix {arm} no routes", arm=arm, workload={"dropped_share": 1.0})
        yield Case(f"matrix {arm} 12 exchanges", arm=arm, exchanges=12)
        yield Case(f"matrix {arm} 8 SMs", arm=arm, sms=8)
        for bias in (1, 2):
            yield Case(f"matrix {arm} bias {bias}", arm=arm, workload={"bias": bias, "hidden": 4096})
        tokens = ({"tokens": 512}, {"tokens": 1}, {"tokens": 128}, {"tokens": 0}, {"tokens": 8})
        yield Case(f"matrix {arm} T cycle", arm=arm, sequence=tokens, exchanges=10)


CASES = {"core": core_cases, "all": all_cases}


def check_run(plan: Plan, inputs: Sequence[Mapping[int, Source]], run: Run) -> int:
    """Compare every row of every exchange, received ones first, and the words at rest; -> rows compared."""
    checked, topology = 0, plan.topology
    experts: Any = plan.experts
    for number, exchange in enumerate(plan.exchanges):
        workload, sources = exchange.workload, inputs[number]
        for rank in topology.ffn:
            check_received(topology, workload, rank, sources, run.received[number][rank])
            checked += len(run.received[number][rank].metadata)
        for rank in topology.attention:
            check_combined(topology, workload, sources[rank], number, run.combined[number][rank], experts)
            if workload.combine_weights:
                check_weights(sources[rank], run.combined_weights[number][rank])
            checked += len(sources[rank].topk)
    for rank, words in enumerate(run.words):
        for word in WORDS:
            at = WORD_OFFSETS[word.name] // WORD
            if word.kind == CLEARED and words[at : at + word.count].any():
                raise AssertionError(f"rank {rank}: {word.name} is not clear after the last exchange")
    return checked


def run_case(case: Case, machine: Any) -> int:
    """-> rows compared, or 0 for a case that was refused as it should be. Raises what went wrong."""
    plan = case.plan()
    inputs = case.inputs(plan)
    if case.bad_route is None:
        return check_run(plan, inputs, machine.run(plan, inputs))
    try:
        machine.run(plan, inputs)
    except RuntimeError as error:
        if type(error).__name__ == "RouteError" and f"token {case.bad_route[0]} " in str(error):
            return 0
        raise
    raise AssertionError(f"the route to expert {case.bad_route[2]} was not refused")


def make_machine(options: argparse.Namespace) -> Any:
    if options.machine == "model":
        from afdep_sim.model.machine import Machine
        from afdep_sim.model.profiles import load_profile

        return Machine(load_profile("H200"), received=True)
    from afdep_sim.runtime.loopback import LoopbackMachine

    return LoopbackMachine(
        received=True, limit_ms=options.limit_ms, cooperative=False if options.no_cooperative else None
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heap", choices=("loopback",), default="loopback", help="where the ranks' memory lies")
    parser.add_argument("--machine", choices=("gpu", "model"), default="gpu", help="the GPU, or the model on a CPU")
    parser.add_argument("--cases", choices=tuple(CASES), default="core", help="which cases (default core)")
    parser.add_argument("--only", default="", metavar="GLOB", help="cases whose name contains or matches this")
    parser.add_argument("--list", action="store_true", help="print the cases' names and stop")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--limit-ms", type=float, default=2000.0, help="how long a wait in a kernel may last")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds after which the process ends, whatever runs")
    parser.add_argument("--no-cooperative", action="store_true", help="launch transport kernels without the attribute")
    options = parser.parse_args(arguments)
    cases = [
        case for case in CASES[options.cases]() if options.only in case.name or fnmatch.fnmatch(case.name, options.only)
    ]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.budget:
        faulthandler.dump_traceback_later(options.budget, exit=True)
    machine = make_machine(options)
    where = options.heap if options.machine == "gpu" else "model"
    if options.machine == "gpu":
        from afdep_sim.runtime.kernels import prepare_kernels

        started = time.perf_counter()
        built = prepare_kernels([case.plan() for case in cases])
        spilled = sum(1 for kernel in built.values() if kernel.spills)
        print(f"{len(built)} kernels in {time.perf_counter() - started:.1f} s, {spilled} with spills", flush=True)
        print(f"{machine.gpu.name}, cooperative launches {bool(machine.cooperative)}", flush=True)
    results: list[dict[str, Any]] = []
    for case in cases:
        started, rows, error, lost = time.perf_counter(), 0, "", False
        try:
            rows = run_case(case, machine)
        except Exception as found:  # noqa: BLE001 - every case is reported
            error = f"{type(found).__name__}: {found}".splitlines()[0]
            lost = type(found).__name__ == "CudaError"
        seconds = time.perf_counter() - started
        results.append({"case": case.name, "ok": not error, "rows": rows, "seconds": seconds, "error": error})
        print(
            f"{where} {'FAIL' if error else 'ok  '} {case.name:50} {rows:7} rows {seconds:6.2f} s {error}", flush=True
        )
        if lost:
            print(f"the CUDA context is lost; {len(cases) - len(results)} cases were not run", flush=True)
            break
    faulthandler.cancel_dump_traceback_later()
    failed = sum(1 for result in results if not result["ok"])
    if options.out:
        options.out.write_text(json.dumps({"machine": where, "numpy": np.__version__, "results": results}, indent=1))
    print(f"{len(results) - failed} passed, {failed + len(cases) - len(results)} failed")
    return int(failed > 0 or len(results) < len(cases) or not results)


if __name__ == "__main__":
    raise SystemExit(main())
