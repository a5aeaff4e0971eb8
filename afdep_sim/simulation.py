"""One question, one call: what does this protocol cost on this layout, and is every row right?"""

from __future__ import annotations

from dataclasses import dataclass

from afdep_sim.errors import Refusal, whole
from afdep_sim.model.machine import Machine
from afdep_sim.model.profiles import load_profile
from afdep_sim.plan import Plan, build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.reference import check_combined, check_received, check_weights
from afdep_sim.run import Received, Run
from afdep_sim.topology import Topology
from afdep_sim.trace import phase_costs_us, round_trip_us
from afdep_sim.workload import Workload


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate`. round_trip_us: the maximum over Attention ranks, of `reporting_rank` (design's rule).

    phase_costs_us: that rank's critical path by phase name, mean per exchange; sums to the round trip.
    rows_checked: rows compared bit for bit with the reference (received rows and combined rows, every exchange); 0
    where the run moved no data.
    """

    plan: Plan
    run: Run
    round_trip_us: float
    reporting_rank: int
    phase_costs_us: dict[str, float]
    rows_checked: int

    def __str__(self) -> str:
        checked = f"{self.rows_checked} rows checked bit for bit" if self.rows_checked else "no data moved"
        arm, name = self.plan.protocol.arm, self.plan.topology.name
        return f"{name} {arm}: {self.round_trip_us:.2f} us per round trip ({checked})"


def simulate(
    topology: Topology,
    workload: Workload,
    protocol: Protocol,
    *,
    profile: str = "H100",
    exchanges: int = 3,
    seed: int = 0,
    data: bool = True,
    fresh_inputs: bool = False,
) -> Simulation:
    """Run `exchanges` back-to-back exchanges in the model and check every row of every one of them.

    The round trip is taken from the end of the first exchange to the end of the last, so two or more are needed.
    `seed` draws the ranks' launch skew; routes come from `workload.seed`. Every exchange brings the same rows and
    routes, as a replayed graph does (the experts' results still differ, by exchange), unless `fresh_inputs`.
    data=False moves no payload and checks nothing. Raises `Refusal` for what cannot run, `reference.Mismatch` for a
    wrong row, `Deadlock` for a hang.
    """
    seed, exchanges = whole("seed", seed), whole("exchanges", exchanges)
    if exchanges < 2:
        raise Refusal(f"exchanges {exchanges} is below 2, which a round trip needs")
    plan = build_plan(topology, workload, protocol, exchanges)
    inputs = plan.inputs(data, repeated=not fresh_inputs)
    checked = 0

    def check(number: int, rank: int, received: Received) -> None:
        nonlocal checked
        check_received(topology, workload, rank, inputs[number], received)
        checked += len(received.metadata)

    machine = Machine(load_profile(profile), data=data, seed=seed, on_received=check)
    run = machine.run(plan, inputs)
    if data:
        for number, sources in enumerate(inputs):
            for rank in topology.attention:
                check_combined(topology, workload, sources[rank], number, run.combined[number][rank])
                if workload.combine_weights:
                    check_weights(sources[rank], run.combined_weights[number][rank])
                checked += len(sources[rank].topk)
    value, rank = round_trip_us(run.events, topology)
    return Simulation(plan, run, value, rank, phase_costs_us(run.events, rank), checked)
