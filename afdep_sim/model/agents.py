"""What the machine keeps of a running kernel: the launch, its blocks, and the agents that run the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afdep_sim.model.engine import Task
from afdep_sim.model.sms import Need
from afdep_sim.plan import Launch


class KernelRun:
    """One launch in progress on one rank."""

    __slots__ = (
        "agents_left_to_sync",
        "arguments",
        "blocks_left",
        "complete",
        "end_ns",
        "exchange",
        "function",
        "grid_arrived",
        "grid_last",
        "grid_waiting",
        "index",
        "last_agent",
        "last_agent_ns",
        "launch",
        "live_agents",
        "need",
        "next",
        "parked",
        "pending",
        "position",
        "primary",
        "ready_ns",
        "start_ns",
        "started",
        "triggered",
        "waiting",
        "work",
    )

    def __init__(self, launch: Launch, exchange: int, position: int, primary: KernelRun | None) -> None:
        self.launch = launch
        self.need = Need.of(launch)
        self.exchange = exchange
        self.position = position
        """Its place in the stream."""
        self.primary = primary
        """The launch before it in its stream."""
        self.next: KernelRun | None = None
        self.index = -1
        self.function: Callable[..., None] | None = None
        self.arguments: tuple[Any, ...] = ()
        self.work: dict[int, list[tuple[int, str]]] | None = None
        """Block -> (warp, label) with something to do; None until it is known."""
        self.pending = list(range(launch.grid))
        """Blocks without an SM yet, in order."""
        self.parked: list[tuple[list[int], list[int], float]] = []
        """Blocks resident but not yet running agents: (blocks, their SMs, start)."""
        self.blocks_left = launch.grid
        self.triggered = 0
        self.started = False
        self.complete = False
        self.start_ns = 0.0
        self.end_ns = 0.0
        self.ready_ns = 0.0
        """When `wait_dependencies` returns: the primary's completion and its exposure."""
        self.last_agent = -1
        self.last_agent_ns = 0.0
        self.waiting: list[Agent] = []
        """Agents inside `wait_dependencies`."""
        self.live_agents = 0
        self.grid_arrived = 0.0
        self.grid_last = -1
        self.grid_waiting: list[Agent] = []


class BlockRun:
    """A resident block, or several idle ones that started together and are represented once (`sms` has them all)."""

    __slots__ = (
        "agents",
        "arrived_ns",
        "counters",
        "end_ns",
        "id",
        "last",
        "left",
        "run",
        "sm",
        "sms",
        "start_ns",
        "triggered",
        "waiting",
    )

    def __init__(self, run: KernelRun, block: int, sms: list[int], start_ns: float) -> None:
        self.run = run
        self.id = block
        self.sm = sms[0]
        self.sms = sms
        self.start_ns = start_ns
        self.end_ns = 0.0
        self.agents = 0
        self.left = 0
        self.triggered = False
        self.arrived_ns = 0.0
        self.last = -1
        self.waiting: list[Agent] = []
        self.counters: Any = None
        """The notify group's shared counters."""


class Agent(Task):
    """A warp, or a group acting as one, that runs the text. `index` is its place in the events, -1 if untraced."""

    __slots__ = ("block", "index", "load", "rank", "ready", "run", "stage", "stores_done", "warp")

    def __init__(self, run: KernelRun, block: BlockRun, warp: int, index: int, now: float) -> None:
        # Not through Task.__init__: there are thousands of these, and the call costs as much as the rest.
        self.function = run.function  # type: ignore[assignment]
        self.arguments = run.arguments
        self.now = now
        self.greenlet = None
        self.run = run
        self.block = block
        self.rank = run.launch.rank
        self.warp = warp
        self.index = index
        self.stores_done = 0.0
        """When its bulk stores so far are complete."""
        self.stage: Any = None
        """Its staged row, once it has asked for it."""
        self.ready = 0.0
        """When the ordinary loads it has issued have returned."""
        self.load: tuple[int, int, float] = (0, 0, 0.0)
        """Its bulk load in flight: address, bytes, completion."""
