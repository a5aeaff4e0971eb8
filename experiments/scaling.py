"""How time and memory of a model run grow with tokens and with ranks, and what they are spent on.

Each cell is a fresh process: CPU time per exchange (timing-only and with data), its peak memory, agents and engine
events per exchange. `python experiments/scaling.py [--quick]` prints two tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time

from afdep_sim.model.machine import Machine
from afdep_sim.model.profiles import load_profile
from afdep_sim.plan import build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.workload import Workload

EXCHANGES = 2
TOKENS = (1, 8, 32, 128, 512, 2048)
RANKS = (2, 4, 8, 16, 32, 64)


def measure(layout: str, arm: str, tokens: int, data: bool) -> dict[str, float]:
    """One cell, in this process: seconds, megabytes and counts per exchange, the first (cold) one left out."""
    topology, protocol = Topology.parse(layout), Protocol.parse(arm)
    workload = Workload(tokens=tokens)
    seconds, events = {}, {}
    for exchanges in (1, 1 + EXCHANGES):
        plan = build_plan(topology, workload, protocol, exchanges, experts="precomputed")
        inputs = plan.inputs(data, repeated=True)
        start = time.process_time()
        run = Machine(load_profile("H100"), data=data).run(plan, inputs)
        seconds[exchanges] = time.process_time() - start
        events[exchanges] = run.engine_events
    return {
        "ms": 1e3 * (seconds[1 + EXCHANGES] - seconds[1]) / EXCHANGES,
        "events": (events[1 + EXCHANGES] - events[1]) / EXCHANGES,
        "agents": len(run.events.agents) / (1 + EXCHANGES),
        "rows": sum(c["rows"] for c in run.events.counters) / (1 + EXCHANGES),
        "count_words": sum(c["count_words"] for c in run.events.counters) / (1 + EXCHANGES),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(layout: str, arm: str, tokens: int, data: bool) -> dict[str, float]:
    """`measure` in a fresh process, so that peaks do not add up."""
    command = [sys.executable, __file__, "--cell", json.dumps([layout, arm, tokens, data])]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def line(name: str, layout: str, arm: str, tokens: int) -> str:
    timing, data = (in_a_process(layout, arm, tokens, moves) for moves in (False, True))
    return (
        f"{name:>6}  {arm:<11}  {timing['ms']:9.1f}  {data['ms']:9.1f}"
        f"  {timing['peak_mb']:9.0f}  {data['peak_mb']:9.0f}"
        f"  {timing['agents']:8.0f}  {timing['events']:8.0f}  {1e3 * timing['ms'] / timing['events']:8.1f}"
        f"  {timing['rows']:7.0f}  {timing['count_words']:11.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the largest cells")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(*json.loads(options.cell))))
        return
    print(f"{platform.platform()}, Python {platform.python_version()}; per exchange, {EXCHANGES} after the first\n")
    head = (
        "        arm          timing ms    data ms  timing MB    data MB    agents    events  us/event     rows"
        "  count words"
    )
    print("2A2F by tokens\n" + head.replace("      ", "tokens", 1))
    for tokens in TOKENS[: 4 if options.quick else None]:
        for arm in ("afdep", "fastafd_m2n"):
            print(line(str(tokens), "2A2F", arm, tokens), flush=True)
    print("\none token, half of the ranks Attention, by ranks\n" + head.replace("      ", " ranks", 1))
    for ranks in RANKS[: 3 if options.quick else None]:
        for arm in ("afdep", "fastafd_m2n"):
            print(line(str(ranks), f"{ranks // 2}A{ranks // 2}F", arm, 1), flush=True)


if __name__ == "__main__":
    main()
