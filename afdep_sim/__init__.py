"""afdep_sim: one protocol text for Attention-FFN disaggregation, run on GPUs and in a discrete-event model."""

from afdep_sim.errors import Refusal
from afdep_sim.protocol import Protocol
from afdep_sim.simulation import Simulation, simulate
from afdep_sim.topology import Topology
from afdep_sim.workload import Workload

__version__ = "0.1.0"
__all__ = ["Protocol", "Refusal", "Simulation", "Topology", "Workload", "simulate"]
