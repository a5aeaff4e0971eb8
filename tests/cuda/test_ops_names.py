"""The GPU's operations have the names and parameters that the text may rely on. Needs Numba, no GPU."""

from __future__ import annotations

import inspect

import pytest

from afdep_sim.kernels import ops as documented
from afdep_sim.plan import build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.workload import Workload

pytest.importorskip("numba.cuda", reason="Numba for CUDA is not installed: make test-cuda has it")

from afdep_sim.kernels.cuda.ops import make_ops


def parameters(function: object) -> list[str]:
    return list(inspect.signature(getattr(function, "py_func", function)).parameters)


@pytest.mark.parametrize("trace", [False, True])
def test_names_and_parameters_are_those_of_the_vocabulary(trace):
    plan = build_plan(Topology.parse("1A1F"), Workload(tokens=1, hidden=256), Protocol.afdep())
    ops = make_ops(plan.exchanges[0].streams[0][0].constants, trace=trace)
    expected = {name: parameters(f) for name, f in vars(documented).items() if inspect.isfunction(f)}
    found = {name: parameters(f) for name, f in vars(ops).items() if not name.startswith("__")}
    assert found == expected
