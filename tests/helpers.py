"""What several test modules share: plans of the model, runs that are compared with the reference, broken texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from afdep_sim import kernels
from afdep_sim.model.machine import Machine
from afdep_sim.model.profiles import Profile, load_profile
from afdep_sim.plan import Plan, build_plan
from afdep_sim.protocol import SWITCHES, Protocol
from afdep_sim.reference import check_combined, check_received
from afdep_sim.run import Events, Run
from afdep_sim.topology import Topology
from afdep_sim.workload import Source, Workload

H100 = load_profile("H100")
BASIC_ARMS = ("afdep", "fastafd_m2n")
CONTROL_ARMS = tuple(f"afdep+{s.env}=1" for s in SWITCHES if s.built == (False, True))
ARMS = (*BASIC_ARMS, *CONTROL_ARMS)
Inputs = list[dict[int, Source]]


# ---- plans and runs --------------------------------------------------------------------------------------------------


def make_plan(
    layout: str,
    arm: str,
    tokens: int | tuple[int, ...],
    *,
    exchanges: int = 1,
    sms: int = 24,
    experts_between: str = "stand_in",
    **workload: Any,
) -> Plan:
    """A plan of `exchanges` exchanges of one workload; hidden is 256 unless given."""
    work = Workload(tokens=tokens, **{"hidden": 256, **workload})
    return build_plan(Topology.parse(layout), work, Protocol.parse(arm, sms), exchanges, experts_between)


def describe(plan: Plan) -> str:
    """What is needed to build the plan again."""
    workload = plan.workload
    return (
        f"layout {plan.topology.name}, arm {plan.protocol.arm}, {plan.protocol.transport_sms} transport SMs, "
        f"{len(plan.exchanges)} exchanges, experts {plan.experts!r}, {workload}"
    )


@contextmanager
def replay(what: str) -> Iterator[None]:
    """Say how to replay it beneath whatever is raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"replay: {what}")
        raise


def check_outputs(plan: Plan, inputs: Sequence[Mapping[int, Source]], run: Run) -> None:
    """Compare every row of every exchange with the reference, bit for bit, received rows before combined ones."""
    topology = plan.topology
    for number, exchange in enumerate(plan.exchanges):
        workload, sources = exchange.workload, inputs[number]
        with replay(f"exchange {number} of {describe(plan)}"):
            assert sorted(run.received[number]) == list(topology.ffn)
            assert sorted(run.combined[number]) == list(topology.attention)
            for rank in topology.ffn:
                check_received(topology, workload, rank, sources, run.received[number][rank])
            for rank in topology.attention:
                experts: Any = plan.experts
                check_combined(topology, workload, sources[rank], number, run.combined[number][rank], experts)


def run_checked(
    plan: Plan,
    *,
    profile: Profile = H100,
    inputs: Inputs | None = None,
    factories: Mapping[str, Any] | None = None,
    **machine: Any,
) -> Run:
    """Run a plan with data and check every output; inputs differ from exchange to exchange unless given."""
    inputs = plan.inputs() if inputs is None else inputs
    with replay(f"{describe(plan)}, machine {machine}"):
        run = Machine(profile, received=True, **machine).run(plan, inputs, factories)
        check_outputs(plan, inputs, run)
    return run


def run_timed(plan: Plan, *, profile: Profile = H100, inputs: Inputs | None = None, **machine: Any) -> Events:
    """The events of a run that moves no payload."""
    with replay(f"{describe(plan)}, machine {machine}"):
        return Machine(profile, data=False, **machine).run(plan, inputs).events


def same_every_exchange(plan: Plan, data: bool = False) -> Inputs:
    """The first exchange's inputs for each exchange, so that exchanges differ in nothing but their number."""
    return [plan.inputs(data)[0]] * len(plan.exchanges)


def assert_equal_events(first: Events, second: Events, what: str) -> None:
    """Two runs did the same at the same times; the first difference is named."""
    for field in fields(Events):
        one, other = getattr(first, field.name), getattr(second, field.name)
        assert len(one) == len(other), f"{what}: {len(one)} and {len(other)} {field.name}"
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            assert a == b, f"{what}: {field.name}[{at}] is {a} and {b}"


# ---- one agent at a time ---------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a piece of test text runs: its operations, its rank's window, and the addresses of its tensors."""

    ops: Any
    ctx: int
    rank: int
    window: int
    tensors: Mapping[str, int]


def on_attention(
    body: Callable[[Place], None],
    *,
    plan: Plan | None = None,
    inputs: Inputs | None = None,
    every_block: bool = False,
    profile: Profile = H100,
) -> Run:
    """Run `body` as the text of the first Attention rank's dispatch, in block 0 or in every block, once a block.

    Every other agent and kernel does nothing.
    """
    plan = plan or make_plan("1A1F", "afdep", 8)
    rank = plan.topology.attention[0]
    called: list[int] = []

    def make_dispatch(ops: Any, c: Any) -> Callable[..., None]:
        def kernel(ctx: int, window: int, *arguments: int) -> None:
            if arguments[0] == rank and ops.warp_id() == 0 and (every_block or ops.block_id() == 0):
                called.append(ops.block_id())
                tensors = {name: window + t.offset for name, t in plan.exchanges[0].window.tensors.items()}
                body(Place(ops, ctx, rank, window, tensors))

        return kernel

    def make_nothing(ops: Any, c: Any) -> Callable[..., None]:
        return lambda *arguments: None

    factories = {**dict.fromkeys(kernels.FACTORIES, make_nothing), "dispatch": make_dispatch}
    with replay(describe(plan)):
        run = Machine(profile).run(plan, inputs, factories)
        blocks = plan.protocol.transport_sms if every_block else 1
        assert sorted(called) == list(range(blocks)), f"the body ran in blocks {sorted(called)}"
    return run


def model_ops() -> Any:
    """The model's vocabulary, as a kernel factory receives it."""
    found: list[Any] = []
    on_attention(lambda place: found.append(place.ops))
    return found[0]


# ---- broken texts ----------------------------------------------------------------------------------------------------


def rewritten(module: ModuleType, *replacements: tuple[str, str], **names: Any) -> ModuleType:
    """A copy of a module whose source has each (old, new) applied; each old text must occur exactly once.

    `names` are set in the copy afterwards, in place of what it imported.
    """
    source = inspect.getsource(module)
    for old, new in replacements:
        assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} times {old!r}, not once"
        source = source.replace(old, new)
    copy = ModuleType(module.__name__)
    copy.__file__ = module.__file__
    exec(compile(source, f"rewritten {module.__name__}", "exec"), vars(copy))
    vars(copy).update(names)
    return copy


def broken(kernel: str, *replacements: tuple[str, str], **names: Any) -> dict[str, Any]:
    """The table of kernel factories with one kernel's source rewritten."""
    module = inspect.getmodule(kernels.FACTORIES[kernel])
    assert module is not None
    copy = rewritten(module, *replacements, **names)
    return {**kernels.FACTORIES, kernel: getattr(copy, f"make_{kernel}")}


def without_routes(source: Source, tokens: np.ndarray | slice) -> Source:
    """A source some of whose tokens have no route."""
    topk = source.topk.copy()
    topk[tokens] = -1
    return Source(source.x, topk, source.weights)
