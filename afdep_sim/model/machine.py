"""The machine that runs the text on a CPU: GPUs with SMs, streams, programmatic edges, and one agent per busy warp.

`Machine(profile).run(plan) -> Run`. Idle warps are represented once (`collapse`), which changes no time: an agent
without work ends at the same time as its twins, and blocks without work that start together end together.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from afdep_sim import kernels
from afdep_sim.arena import BF16_NAN, Arena, combined_weights, input_tensors, output
from afdep_sim.arena import received as received_views
from afdep_sim.model.agents import Agent, BlockRun, KernelRun
from afdep_sim.model.engine import Engine
from afdep_sim.model.fabric import Fabric
from afdep_sim.model.memory import RANK_SHIFT, Memory
from afdep_sim.model.ops import make_ops
from afdep_sim.model.profiles import Profile
from afdep_sim.model.rows import ProtocolError
from afdep_sim.model.sms import Occupancy
from afdep_sim.plan import Constants, Context, Plan, Tensor, WindowBase
from afdep_sim.reference import expert_partials, expert_rows, precomputed_y
from afdep_sim.run import AgentEvent, Events, Join, LaunchEvent, Mark, Received, Run
from afdep_sim.topology import Role
from afdep_sim.window import WORKSPACE_BYTES
from afdep_sim.workload import Source

Inputs = Sequence[Mapping[int, Source]]


class Deadlock(RuntimeError):
    """Tasks wait and nothing is left that could wake them. The message is the table of who waits for what."""


class Machine:
    """A simulated set of GPUs under `profile`.

    data: move payload bytes (else only metadata and words move: timing-only). collapse: represent idle warps once.
    early_dependents: run every warp of a programmatic dependent from the moment its block is resident, for texts that
    do something before `wait_dependencies` (by default its agents are created when its primary completes, at the
    same times). seed: draws each rank's launch skew. delays: (rank, kernel) -> ns by which that rank's launches of
    that kernel reach its GPU late. received: keep what FFN ranks received; on_received: called as
    on_received(exchange, rank, views) instead, before the experts' step. observer: called as
    observer(kind, rank, offset, bytes, agent, time_ns, exchange) for every landing ('land'), payload read ('read'),
    word write ('set') and clear ('clear').
    A run is a pure function of (plan, inputs, seed).
    """

    def __init__(
        self,
        profile: Profile,
        *,
        data: bool = True,
        collapse: bool = True,
        early_dependents: bool = False,
        seed: int = 0,
        delays: Mapping[tuple[int, str], float] | None = None,
        received: bool = False,
        on_received: Callable[[int, int, Received], None] | None = None,
        observer: Callable[..., None] | None = None,
    ) -> None:
        self.profile = profile
        self.data = data
        self.collapse = collapse
        self.early_dependents = early_dependents
        self.seed = seed
        self.delays = dict(delays or {})
        self.received = received
        self.on_received = on_received
        self.observer = observer

    def run(self, plan: Plan, inputs: Inputs | None = None, factories: Mapping[str, Any] | None = None) -> Run:
        """Run every exchange of `plan`; inputs[n][rank] for each Attention rank (drawn from the workloads if None).

        factories: kernel name -> factory, the shipped text unless given (a broken protocol, say). Raises `Deadlock`.
        """
        if inputs is None:
            inputs = plan.inputs(self.data)
        plan.check_inputs(inputs, self.data)
        # A run makes many small tuples and frees few: the cycle collector would scan them again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            simulation = _Simulation(self, plan, inputs, factories or kernels.FACTORIES)
            try:
                return simulation.run()
            finally:
                simulation.engine.close()
        finally:
            if collecting:
                gc.enable()


class _Simulation:
    """The state of one run."""

    def __init__(self, machine: Machine, plan: Plan, inputs: Inputs, factories: Mapping[str, Any]) -> None:
        self.plan, self.inputs, self.factories = plan, inputs, factories
        self.profile, self.data, self.collapse = machine.profile, machine.data, machine.collapse
        self.early_dependents = machine.early_dependents
        self.keep_received, self.on_received = machine.received, machine.on_received
        self.observer, self.seed, self.delays = machine.observer, machine.seed, machine.delays
        ranks = plan.topology.ranks
        self.engine = Engine(self.agent_ended)
        self.memory = Memory(ranks, plan.arena_bytes)
        self.arenas = [Arena(array) for array in self.memory.arrays]
        self.fabric = Fabric(machine.profile, ranks, plan.device.sms)
        self.occupancy = [Occupancy(plan.device) for _ in range(ranks)]
        self.marks: list[tuple[int, int, float]] = []
        self.joins: list[tuple[int, float, str, int, float]] = []
        self.agents: list[list[Any]] = []
        self.launches: list[KernelRun] = []
        self.ends_ns: list[list[float]] = [[] for _ in range(ranks)]
        self.counters: list[dict[str, int]] = [
            dict.fromkeys(("kernels", "barriers", "count_words", "signals"), 0) for _ in range(ranks)
        ]
        self.combined: list[dict[int, np.ndarray]] = [{} for _ in plan.exchanges]
        self.combined_weights: list[dict[int, np.ndarray]] = [{} for _ in plan.exchanges]
        self.kept: list[dict[int, Received]] = [{} for _ in plan.exchanges]
        self.stages: dict[int, list[memoryview]] = {}
        """Stages that ended agents have left, by size."""
        self.ops = make_ops(self)
        self.texts: dict[tuple[str, Constants], Callable[..., None]] = {}
        self.bound: dict[int, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        """Text and arguments of the plan's launches, by identity: exchanges of one workload share them."""
        self.known_work: dict[tuple[int, int], dict[int, list[tuple[int, str]]]] = {}
        """Work of a launch (by identity) that handles so many rows."""
        self.unfinished = 0

    # ---- the whole run -----------------------------------------------------------------------------------------------

    def run(self) -> Run:
        skew = random.Random(self.seed)
        for rank in range(self.plan.topology.ranks):
            self.launch_after(skew.random() * self.profile.launch_skew_ns, self.build_stream(rank))
        self.engine.run()
        if self.unfinished:
            raise Deadlock("\n".join(self.stuck()))
        for rank, counters in enumerate(self.counters):
            counters["rows"] = self.fabric.rows_out[rank]
            counters["bytes_out"] = self.fabric.bytes_out[rank]
            counters["bytes_in"] = self.fabric.bytes_in[rank]
        events = self.events()
        words = [v[: WORKSPACE_BYTES // 8].copy() for v in self.memory.vectors]
        return Run(self.combined, self.kept, events, words, self.combined_weights, self.engine.events)

    def events(self) -> Events:
        """The raw events in canonical order: launches by (rank, stream position), agents by (launch, block, warp).

        Who was created first among equals at one time then leaves no trace.
        """
        launches = sorted(self.launches, key=lambda run: (run.launch.rank, run.position))
        place_of_launch = {run.index: place for place, run in enumerate(launches)}
        agents = self.agents
        for agent in agents:
            agent[0] = place_of_launch[agent[0]]
        # Launch, block and warp come first in the list and tell all agents apart.
        order = sorted(range(len(agents)), key=agents.__getitem__)
        place = [0] * (len(agents) + 1)
        for at, index in enumerate(order):
            place[index] = at
        place[-1] = -1
        # Not through the classes' constructors, which cost several times as much: there are thousands of these.
        new = tuple.__new__
        marks = [new(Mark, (place[a], p, t)) for a, p, t in self.marks]
        joins = [new(Join, (place[a], t, k, place[b], s)) for a, t, k, b, s in self.joins]
        marks.sort(key=itemgetter(0))
        joins.sort(key=itemgetter(0))
        return Events(
            launches=[
                LaunchEvent(
                    r.launch.rank, r.exchange, r.launch.kernel, r.launch.grid, r.launch.warps, r.start_ns, r.end_ns
                )
                for r in launches
            ],
            agents=[new(AgentEvent, agents[i]) for i in order],
            marks=marks,
            joins=joins,
            ends_ns=self.ends_ns,
            counters=self.counters,
        )

    def build_stream(self, rank: int) -> KernelRun:
        """Chain every launch of a rank's stream; returns the first."""
        runs: list[KernelRun] = []
        for number, exchange in enumerate(self.plan.exchanges):
            for launch in exchange.streams[rank]:
                runs.append(KernelRun(launch, number, len(runs), runs[-1] if runs else None))
                if len(runs) > 1:
                    runs[-2].next = runs[-1]
        self.unfinished += len(runs)
        return runs[0]

    def stuck(self) -> list[str]:
        """The deadlock table: one line per blocked wait, then what else has not finished."""
        lines = ["deadlock: nothing is left that could end these waits"]
        for rank, waiting in enumerate(self.memory.waiters):
            for waiter in waiting:
                words = list(self.memory.i64[rank][waiter.low : waiter.high])
                short = next((i for i, w in enumerate(words) if not waiter.holds(w)), 0)
                writer = self.memory.last_writer(rank, waiter.low + short)
                last = f"agent {self.describe(writer[0])} at {writer[1] / 1e3:.2f} us" if writer else "nobody"
                lines.append(
                    f"{self.describe_agent(waiter.task)} waits in {waiter.phase!r} for {waiter.wanted} at "
                    f"{self.word_name(waiter.low + short)}: value {words[short]}, last written by {last}"
                )
        lines.extend(
            f"rank {run.launch.rank} {run.launch.kernel} of exchange {run.exchange} has "
            f"{run.blocks_left} of {run.launch.grid} blocks left, {len(run.pending)} without an SM, "
            f"{len(run.grid_waiting)} agents in a grid synchronisation"
            for run in self.launches
            if not run.complete
        )
        return lines

    def describe_agent(self, agent: Agent) -> str:
        launch = agent.run.launch
        where = f"rank {agent.rank} {launch.kernel} of exchange {agent.run.exchange}"
        return f"{where} block {agent.block.id} warp {agent.warp}"

    def describe(self, index: int) -> str:
        if index < 0:
            return "an idle warp"
        launch, block, warp = self.agents[index][:3]
        run = self.launches[launch]
        return f"rank {run.launch.rank} {run.launch.kernel} of exchange {run.exchange} block {block} warp {warp}"

    @staticmethod
    def word_name(index: int) -> str:
        """'counts[3]' for a workspace word index."""
        name = max((o, n) for n, o in Constants.words.items() if o <= 8 * index)
        return f"{name[1]}[{index - name[0] // 8}]"

    # ---- streams -----------------------------------------------------------------------------------------------------

    def launch_after(self, wait_ns: float, run: KernelRun) -> None:
        late = self.delays.get((run.launch.rank, run.launch.kernel), 0.0)
        self.engine.at(self.engine.now + wait_ns + late, self.launch, run)

    def launch(self, run: KernelRun) -> None:
        """A launch reaches the GPU: its blocks may take SMs from now on."""
        rank = run.launch.rank
        if run.primary is None or run.primary.exchange != run.exchange:
            self.begin_exchange(rank, run.exchange)
        run.started = True
        run.index = len(self.launches)
        self.launches.append(run)
        self.counters[rank]["kernels"] += 1
        bound = self.bound.get(id(run.launch))
        if bound is None:
            bound = self.bound[id(run.launch)] = self.bind(run)
        run.function, run.arguments = bound
        run.start_ns = -1.0
        if not run.launch.programmatic:
            self.find_work(run)
        elif self.early_dependents:
            run.work = {b: [(w, "rows") for w in run.launch.agent_warps] for b in range(run.launch.grid)}
        self.place(run)

    def bind(self, run: KernelRun) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The text of a launch and what its agents call it with."""
        launch = run.launch
        key = (launch.kernel, launch.constants)
        text = self.texts.get(key)
        if text is None:
            text = self.texts[key] = self.factories[launch.kernel](self.ops, launch.constants)
        base = launch.rank << RANK_SHIFT
        tensors = self.plan.exchanges[run.exchange].window.tensors
        return text, tuple(
            base + tensors[a.name].offset
            if isinstance(a, Tensor)
            else base
            if isinstance(a, WindowBase)
            else launch.rank
            if isinstance(a, Context)
            else a
            for a in launch.arguments
        )

    def find_work(self, run: KernelRun) -> None:
        """Which warps have rows. For a programmatic dependent this waits for its primary: only then are they known."""
        launch = run.launch
        rows = launch.tokens
        if launch.kernel in ("copy_epilogue", "combine"):
            exchange = self.plan.exchanges[run.exchange]
            psum = exchange.window.tensors["psum_rank"].offset // 8
            rows = self.memory.i64[launch.rank][psum + self.plan.topology.ranks - 1]
        work = self.known_work.get((id(launch), rows))
        if work is None:
            work = self.known_work[id(launch), rows] = {}
            for block, warp, label in launch.working(rows):
                work.setdefault(block, []).append((warp, label))
        run.work = work

    def place(self, run: KernelRun) -> None:
        """Give SMs to as many pending blocks as fit now; a cooperative grid takes all or none."""
        launch = run.launch
        sms = self.occupancy[launch.rank].place(run.need, len(run.pending), launch.cooperative)
        if not sms:
            return
        blocks, run.pending = run.pending[: len(sms)], run.pending[len(sms) :]
        start = self.engine.now + self.profile.block_start_ns
        if run.start_ns < 0:
            run.start_ns = start
        if run.work is None:
            run.parked.append((blocks, sms, start))
        else:
            self.start_blocks(run, blocks, sms, start)

    def start_blocks(self, run: KernelRun, blocks: list[int], sms: list[int], start: float) -> None:
        """Create the agents of resident blocks.

        Those with work, one idle twin where the text could tell, and one agent for all idle blocks that start together.
        """
        work = run.work or {}
        started: list[Agent] = []
        warps = run.launch.agent_warps
        dependent = run.next is not None and run.next.launch.programmatic
        first = blocks[0]
        if self.collapse:
            busy_blocks: Iterable[int] = [b for b in (work if len(work) < len(blocks) else blocks) if b in work]
            if len(blocks) < run.launch.grid:
                busy_blocks = [b for b in busy_blocks if first <= b <= blocks[-1]]
        else:
            busy_blocks = blocks
        for block in busy_blocks:
            listed = work.get(block, [])
            state = BlockRun(run, block, [sms[block - first]], start)
            for warp, label in listed:
                started.append(self.start_agent(run, state, warp, label))
            if not self.collapse:
                busy = {warp for warp, _ in listed}
                started += [self.start_agent(run, state, warp, None) for warp in warps if warp not in busy]
            elif dependent and len(listed) < len(warps) and (block == 0 or not run.launch.constants.exit_all_ranks):
                # An idle warp may reach the trigger before the listed ones do. Not so in other blocks than 0 where
                # a grid synchronisation comes first and nobody but block 0's elected warp waits after it.
                busy = {warp for warp, _ in listed}
                started.append(self.start_agent(run, state, next(w for w in reversed(warps) if w not in busy), None))
        if self.collapse:
            taken = set(busy_blocks)
            idle = [block for block in blocks if block not in taken]
            if idle:
                state = BlockRun(run, idle[0], [sms[block - first] for block in idle], start)
                started.append(self.start_agent(run, state, warps[-1], None))
        # Clocks start with the blocks; the first turns may come later, when the primary's completion is known.
        self.engine.start_all(started, max(start, self.engine.now, run.ready_ns))

    def start_agent(self, run: KernelRun, block: BlockRun, warp: int, label: str | None) -> Agent:
        index = -1
        if label is not None:
            index = len(self.agents)
            self.agents.append([run.index, block.id, warp, label, block.start_ns, 0.0])
            primary = run.primary
            if primary is None:
                self.joins.append((index, block.start_ns, "stream", -1, 0.0))
            else:
                self.joins.append((index, block.start_ns, "stream", primary.last_agent, primary.last_agent_ns))
        agent = Agent(run, block, warp, index, block.start_ns)
        block.agents += 1
        block.left += 1
        run.live_agents += 1
        return agent

    # ---- ends --------------------------------------------------------------------------------------------------------

    def agent_ended(self, agent: Agent) -> None:
        block = agent.block
        end = agent.now if agent.now > agent.stores_done else agent.stores_done
        run = agent.run
        index = agent.index
        if index >= 0:
            self.agents[index][5] = end
            if end > run.last_agent_ns or (end == run.last_agent_ns and index < run.last_agent):
                run.last_agent_ns = end
                run.last_agent = index
        if end > block.end_ns:
            block.end_ns = end
        if agent.stage is not None and agent.stores_done <= agent.now:
            self.stages[len(agent.stage)].append(agent.stage)
        block.left -= 1
        if not block.left:
            self.engine.at(block.end_ns, self.block_ended, block)

    def block_ended(self, block: BlockRun) -> None:
        """A block (or the idle blocks it stands for) leaves its SM; the next blocks in stream order may take it."""
        run = block.run
        if not block.triggered:
            self.trigger(block)
        self.occupancy[run.launch.rank].release(block.sms, run.need)
        run.blocks_left -= len(block.sms)
        if not run.blocks_left:
            self.completed(run)
            return
        if run.pending:
            self.place(run)
        following = run.next
        if following is not None and following.started and following.pending:
            self.place(following)

    def trigger(self, block: BlockRun) -> None:
        """A block has triggered: at its first warp's `launch_dependents`, or at its exit."""
        if block.triggered:
            return
        block.triggered = True
        run = block.run
        run.triggered += len(block.sms)
        dependent = run.next
        if run.triggered == run.launch.grid and dependent is not None and dependent.launch.programmatic:
            self.launch_after(self.profile.programmatic_launch_ns, dependent)

    def completed(self, run: KernelRun) -> None:
        """Every block has left: completion. Wakes the programmatic dependent, or launches the next in the stream."""
        now = self.engine.now
        run.complete = True
        run.end_ns = now
        self.unfinished -= 1
        rank = run.launch.rank
        if run.launch.kernel == "copy_epilogue":
            self.experts(rank, run.exchange)
        following = run.next
        if following is None or following.exchange != run.exchange:
            self.end_exchange(rank, run.exchange)
        if following is None:
            return
        if not following.launch.programmatic:
            self.launch_after(self.profile.graph_edge_ns, following)
            return
        following.ready_ns = now + self.profile.programmatic_wake_ns
        for agent in following.waiting:
            self.joins_primary(agent)
            self.engine.wake(agent, following.ready_ns)
        following.waiting = []
        if following.work is None:
            self.find_work(following)
        for blocks, sms, start in following.parked:
            self.start_blocks(following, blocks, sms, start)
        following.parked = []
        if following.pending and following.started:
            self.place(following)

    def joins_primary(self, agent: Agent) -> None:
        primary = agent.run.primary
        if agent.index >= 0 and primary is not None:
            self.joins.append(
                (agent.index, agent.run.ready_ns, "primary", primary.last_agent, primary.last_agent_ns)
            )

    # ---- exchanges: what the host does, in no time -------------------------------------------------------------------

    def begin_exchange(self, rank: int, number: int) -> None:
        """Put the exchange's inputs into the rank's tensors and poison its output."""
        if self.plan.topology.role(rank) is not Role.ATTENTION:
            return
        tensors = self.plan.exchanges[number].window.tensors
        arena = self.memory.arrays[rank]
        for name, values in input_tensors(self.inputs[number][rank], self.data).items():
            at = tensors[name].offset
            arena[at : at + values.nbytes] = values.reshape(-1).view(np.uint8)
        if self.data:
            output(self.plan, number, rank, self.arenas[rank])[:] = BF16_NAN

    def end_exchange(self, rank: int, number: int) -> None:
        self.ends_ns[rank].append(self.engine.now)
        if not self.data or self.plan.topology.role(rank) is not Role.ATTENTION:
            return
        self.combined[number][rank] = output(self.plan, number, rank, self.arenas[rank]).copy()
        if self.plan.exchanges[number].workload.combine_weights:
            weights = combined_weights(self.plan, number, rank, self.arenas[rank])
            self.combined_weights[number][rank] = weights.copy()

    def experts(self, rank: int, number: int) -> None:
        """The stand-in for the experts, between the copy epilogue and combine."""
        if not self.data or self.plan.topology.role(rank) is not Role.FFN:
            return
        received = received_views(self.plan, number, self.arenas[rank])
        if self.on_received:
            self.on_received(number, rank, received)
        if self.keep_received:
            self.kept[number][rank] = copy.deepcopy(received)
        exchange = self.plan.exchanges[number]
        topology, workload = self.plan.topology, exchange.workload
        used = len(received.x)
        y = self.memory.view(rank, exchange.window.tensors["expert_y"].offset, (used, workload.hidden), np.uint16)
        if not workload.expanded:
            assert received.topk is not None
            expert = np.where(received.topk < 0, -1, received.topk + rank * workload.experts_per_rank(topology))
            y[:] = expert_partials(
                topology, workload, received.x, received.scales, expert, received.weights, number, self.plan.experts
            )
            return
        if self.plan.experts == "precomputed":
            precomputed_y(topology, workload, rank, self.inputs[number], out=y)
            return
        per_rank = workload.experts_per_rank(topology)
        ends = received.psum_expert[:per_rank]
        slots = received.metadata[:, 2:]
        slots = np.sort(slots[slots >= 0])
        if len(slots) and (slots[-1] >= used or slots[-1] >= ends[-1]):
            raise ProtocolError(
                f"rank {rank} has slot {int(slots[-1])} in exchange {number}, beyond the {int(min(used, ends[-1]))} "
                "that its counts make room for"
            )
        expert = rank * per_rank + np.searchsorted(ends, slots, side="right")
        x, weights, scales = received.x, received.weights, received.scales
        if len(slots) == used:
            expert_rows(x, expert, weights, number, scales, out=y)
        else:
            y[slots] = expert_rows(
                x[slots], expert, weights[slots], number, None if scales is None else scales[slots]
            )
