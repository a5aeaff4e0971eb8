"""The protocol text: one factory per kernel, written over the vocabulary of `kernels.ops`."""

from afdep_sim.kernels.combine import make_combine
from afdep_sim.kernels.copy_epilogue import make_copy_epilogue
from afdep_sim.kernels.dispatch import make_dispatch
from afdep_sim.kernels.reduce_epilogue import make_reduce_epilogue

FACTORIES = {
    "dispatch": make_dispatch,
    "copy_epilogue": make_copy_epilogue,
    "combine": make_combine,
    "reduce_epilogue": make_reduce_epilogue,
}
"""Kernel name, as plans use it -> factory(ops, constants) -> kernel."""
