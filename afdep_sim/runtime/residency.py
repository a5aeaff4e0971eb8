"""Whether R virtual ranks on one GPU can wait for each other: what must be resident together fits, or nothing runs.

A transport block waits for other ranks' blocks, and an epilogue block with a programmatic edge holds its SM while its
primary waits. So all ranks' transport grids and early epilogue grids need an SM's room at the same time (design
section 5). An epilogue without the edge starts when nothing of its rank waits any more, and needs no room kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from afdep_sim.errors import Refusal
from afdep_sim.plan import HOPPER, Device, Experts, Launch, Plan, build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.workload import Workload

Edges = Literal["auto", "programmatic", "plain"]
SYSTEM_SHARED_BYTES = 1024
"""What the system keeps of every block's shared memory (CUDA programming guide, compute capability 9.0)."""


@dataclass(frozen=True)
class Residency:
    """Blocks of one rank that must be resident together, and the room there is for all ranks' blocks."""

    ranks: int
    transport: int
    early: int
    """Blocks of the largest epilogue with a programmatic edge; 0 where none has one."""
    sms: int
    per_sm: int

    @property
    def needed(self) -> int:
        return self.ranks * (self.transport + self.early)

    @property
    def room(self) -> int:
        return self.sms * self.per_sm


def blocks_per_sm(launches: Sequence[Launch], device: Device) -> int:
    """How many blocks share an SM whichever of `launches` they are of: each counts as the largest in every resource."""
    shared = max(launch.shared_bytes for launch in launches) + SYSTEM_SHARED_BYTES
    threads = max(launch.threads for launch in launches)
    registers = max(launch.threads * launch.registers for launch in launches)
    fit = (
        device.shared_per_sm_bytes // shared,
        device.threads_per_sm // threads,
        device.registers_per_sm // registers,
        device.blocks_per_sm,
    )
    return min(fit)


def residency(plan: Plan, sms: int = 0) -> Residency:
    """What a plan needs on one GPU with `sms` SMs (the plan's device's where 0)."""
    launches = [launch for exchange in plan.exchanges for stream in exchange.streams for launch in stream]
    return Residency(
        plan.topology.ranks,
        max(launch.grid for launch in launches if launch.cooperative),
        max((launch.grid for launch in launches if launch.programmatic), default=0),
        sms or plan.device.sms,
        blocks_per_sm(launches, plan.device),
    )


def check_residency(plan: Plan, sms: int = 0) -> Residency:
    """Refuses a plan whose ranks could keep each other from the SMs that they wait for."""
    found = residency(plan, sms)
    if found.needed > found.room:
        early = f" and {found.early} early epilogue blocks" if found.early else ""
        raise Refusal(
            f"loopback of {plan.topology.name}: {found.ranks} ranks of {found.transport} transport blocks{early} are "
            f"{found.needed} blocks that wait for each other, over the {found.room} that {found.sms} SMs hold"
        )
    return found


def loopback_plan(
    topology: Topology,
    workload: Workload | Sequence[Workload],
    protocol: Protocol,
    exchanges: int = 1,
    experts: Experts = "stand_in",
    device: Device = HOPPER,
    edges: Edges = "auto",
) -> Plan:
    """A plan whose ranks share one GPU.

    edges: 'programmatic' gives each rank's epilogues an equal share of the SMs that the transport grids leave, and
    their programmatic edge; 'plain' gives them every SM and no edge; 'auto' is the first where the share is not
    empty. Raises `Refusal` where the ranks do not fit.
    """
    if edges not in ("auto", "programmatic", "plain"):
        raise Refusal(f"edges {edges!r} is not auto, programmatic or plain")
    share = max(0, device.sms - topology.ranks * protocol.transport_sms) // topology.ranks
    if edges == "programmatic" and share < 1:
        raise Refusal(
            f"loopback of {topology.name}: {topology.ranks} ranks of {protocol.transport_sms} transport blocks leave "
            f"no SM of {device.sms} per rank for an early epilogue"
        )
    early = edges != "plain" and share > 0
    plan = build_plan(
        topology, workload, protocol, exchanges, experts, device, epilogue_sms=share if early else 0, programmatic=early
    )
    check_residency(plan)
    return plan
