"""R virtual ranks in one process on one GPU: an arena, a context block and a stream each, peers at plain addresses.

`LoopbackMachine().run(plan, inputs) -> Run` launches every exchange on the ranks' streams; `time_round_trips` replays
one graph with a branch per rank. Four ranks on one chip are not four GPUs: say "loopback" beside every number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from afdep_sim.arena import (
    BF16_NAN,
    Arena,
    Place,
    combined_weights,
    input_tensors,
    output,
    output_rows,
    received,
    received_place,
    weights_place,
)
from afdep_sim.errors import Refusal
from afdep_sim.kernels import phases as ph
from afdep_sim.kernels.cuda.context import RECORD, TRACE_NEVER, TRACE_WARPS, context_words
from afdep_sim.plan import Context, Exchange, Launch, Plan, Tensor, WindowBase
from afdep_sim.reference import check_combined, exchange_bias, expert_scale, precomputed_y
from afdep_sim.run import Events, Received, Run
from afdep_sim.runtime.gpu import prepare_environment
from afdep_sim.runtime.residency import check_residency
from afdep_sim.runtime.watchdog import explain
from afdep_sim.window import WORKSPACE_BYTES
from afdep_sim.workload import MAX_EXPERTS, Source

Inputs = Sequence[Mapping[int, Source]]
Clock = Literal["events", "timer"]
EXPERT_BLOCKS = 64
MEETING_NS = 50_000_000
"""How long the two cooperative launches of the test wait for each other."""


class Copy(NamedTuple):
    """A piece of an arena, kept on the device until the run is over."""

    place: Place
    address: int


@dataclass(frozen=True)
class RoundTrips:
    """Replays of one graph.

    us[replay, i]: mean round trip on the i-th Attention rank, (end of the last exchange - end of the first) /
    (exchanges - 1). whole_us[replay]: time of the graph per exchange. exchanges: per graph.
    """

    us: np.ndarray
    whole_us: np.ndarray
    exchanges: int
    rows_checked: int

    @property
    def slowest_us(self) -> np.ndarray:
        """float64 [replays]: the maximum over Attention ranks."""
        slowest: np.ndarray = self.us.max(axis=1)
        return slowest


class LoopbackMachine:
    """One GPU that plays every rank of a plan.

    limit_ms: how long a wait in a kernel may last. received: keep what FFN ranks received; on_received: called as
    on_received(exchange, rank, views) for it, after the run. trace: kernels with marks; the times of each exchange are
    in `traces` afterwards. cooperative: whether transport kernels are launched so; None asks the GPU whether two such
    launches run side by side, and without that leaves it to the residency check.
    """

    def __init__(
        self,
        *,
        device: int = 0,
        limit_ms: float = 2000.0,
        received: bool = False,
        on_received: Callable[[int, int, Received], None] | None = None,
        trace: bool = False,
        cooperative: bool | None = None,
        workers: int = 0,
    ) -> None:
        prepare_environment()
        self.number = device
        self.limit_ns = int(limit_ms * 1e6)
        self.received = received
        self.on_received = on_received
        self.trace = trace
        self.cooperative = cooperative
        self.workers = workers
        self.traces: list[dict[int, np.ndarray]] = []
        """Per exchange and rank: int64 [blocks, warps, phases], the time (ns) of each mark, TRACE_NEVER where none."""
        self._gpu: Any = None
        self._extra: dict[str, Any] = {}
        self._loaded: dict[Any, Any] = {}

    def run(self, plan: Plan, inputs: Inputs | None = None) -> Run:
        """Run every exchange of `plan`, launch by launch; inputs[n][rank] (drawn from the workloads if None).

        Raises `Refusal` for what cannot run, a `GpuError` for what a kernel reported.
        """
        if inputs is None:
            inputs = plan.inputs()
        _refuse_untold_experts(plan)
        with self._ranks(plan) as ranks:
            keep = self.received or self.on_received is not None
            steps = [
                [ranks.prepare(number, rank, sources, keep) for rank in range(plan.topology.ranks)]
                for number, sources in enumerate(inputs[: len(plan.exchanges)])
            ]
            ranks.gpu.synchronize()
            for of_exchange in steps:
                # Rank by rank: nothing here waits for the GPU, so no rank waits for another's launch.
                for step in of_exchange:
                    step.enqueue()
            ranks.finish()
            return self._collect(plan, ranks, steps)

    def time_round_trips(
        self,
        plan: Plan,
        exchanges_per_graph: int = 17,
        replays: int = 50,
        inputs: Mapping[int, Source] | None = None,
        warm_up: int = 3,
        clock: Clock = "events",
    ) -> RoundTrips:
        """Replay a graph of `exchanges_per_graph` back-to-back exchanges of the plan's first workload.

        The plan's experts are precomputed and no kernel stands for them. Outputs are poisoned before each replay; those
        of the first and the last are checked against the reference. clock: 'events' in the graph, or 'timer' kernels.
        """
        if plan.experts != "precomputed" or not plan.workload.expanded:
            raise Refusal("timed runs need precomputed experts and the expanded layout")
        if exchanges_per_graph < 2:
            raise Refusal(f"exchanges per graph {exchanges_per_graph} is below 2, which a round trip needs")
        if replays < 1:
            raise Refusal(f"replays {replays} is below 1")
        sources = plan.inputs(repeated=True)[0] if inputs is None else inputs
        with self._ranks(plan) as ranks:
            ranks.place(sources)
            times = _Times(ranks, clock)
            graph = ranks.graph(exchanges_per_graph, times)
            for _ in range(warm_up):
                ranks.poison()
                graph.launch(ranks.main)
                ranks.finish()
            us, whole, checked = [], [], 0
            first, last = ranks.gpu.event(), ranks.gpu.event()
            for replay in range(replays):
                ranks.poison()
                ranks.gpu.record(first, ranks.main)
                graph.launch(ranks.main)
                ranks.gpu.record(last, ranks.main)
                ranks.finish()
                us.append([t / (exchanges_per_graph - 1) for t in times.read_us()])
                whole.append(ranks.gpu.elapsed_us(first, last) / exchanges_per_graph)
                if replay in (0, replays - 1):
                    checked += ranks.check(sources)
            return RoundTrips(np.array(us), np.array(whole), exchanges_per_graph, checked)

    # ---- the GPU -----------------------------------------------------------------------------------------------------

    @property
    def gpu(self) -> Any:
        """The device, opened at first use."""
        if self._gpu is None:
            from afdep_sim.runtime.device_code import NAMES, compile_device_code
            from afdep_sim.runtime.gpu import Gpu

            self._gpu = Gpu(self.number)
            code = compile_device_code()
            self._extra = {name: self._gpu.load(code, name) for name in NAMES}
            if self.cooperative is None:
                self.cooperative = self._cooperative_launches_meet()
        return self._gpu

    def _cooperative_launches_meet(self) -> bool:
        """Whether two cooperative launches on two streams run side by side."""
        gpu = self._gpu
        with gpu.pool() as pool:
            words = pool.allocate(32)
            streams = [gpu.stream(), gpu.stream()]
            gpu.synchronize()
            for me, stream in enumerate(streams):
                gpu.launch(stream, self._extra["meet"], 1, 32, (words, me, MEETING_NS), cooperative=True)
            gpu.synchronize()
            met = gpu.download(words, 32).view(np.int64)[2:]
            return bool(met.all())

    @contextmanager
    def _ranks(self, plan: Plan) -> Iterator[_Ranks]:
        """The plan's kernels and memory on the GPU, zeroed; the residency check comes before anything else."""
        from afdep_sim.kernels.cuda.compile import Variant
        from afdep_sim.runtime.kernels import prepare_kernels

        check_residency(plan)
        built = prepare_kernels([plan], self.trace, self.workers)
        gpu = self.gpu
        check_residency(plan, gpu.sms)
        launches = [launch for exchange in plan.exchanges for stream in exchange.streams for launch in stream]
        kernels = {}
        for launch in launches:
            variant = Variant.of(launch, self.trace)
            key = (variant, launch.shared_bytes)
            if key not in self._loaded:
                kernel = gpu.load(built[variant].cubin, built[variant].entry, launch.shared_bytes)
                if gpu.blocks_per_sm(kernel, launch.threads, launch.shared_bytes) < 1:
                    raise Refusal(
                        f"{launch.kernel} of {launch.threads} threads, {built[variant].registers} registers each and "
                        f"{launch.shared_bytes} bytes of shared memory does not fit an SM"
                    )
                self._loaded[key] = kernel
            kernels[variant] = self._loaded[key]
        with gpu.pool() as pool:
            yield _Ranks(self, plan, pool, kernels)

    def _collect(self, plan: Plan, ranks: _Ranks, steps: list[list[_Step]]) -> Run:
        count = len(plan.exchanges)
        run = Run(
            [{} for _ in range(count)],
            [{} for _ in range(count)],
            Events(ends_ns=[[] for _ in steps[0]], counters=[{} for _ in steps[0]]),
            [ranks.gpu.download(arena, WORKSPACE_BYTES).view(np.int64) for arena in ranks.arenas],
            [{} for _ in range(count)],
        )
        self.traces = [{} for _ in range(count)]
        for number, of_exchange in enumerate(steps):
            for rank, step in enumerate(of_exchange):
                if step.output is not None:
                    run.combined[number][rank] = output(plan, number, rank, ranks.fetch(step.output)).copy()
                if step.weights is not None:
                    arena = ranks.fetch(step.weights)
                    run.combined_weights[number][rank] = combined_weights(plan, number, rank, arena)
                if step.received is not None:
                    views = received(plan, number, ranks.fetch(step.received))
                    if self.on_received is not None:
                        self.on_received(number, rank, views)
                    if self.received:
                        run.received[number][rank] = views
                if step.trace is not None:
                    words = ranks.gpu.download(step.trace, ranks.trace_bytes).view(np.int64)
                    self.traces[number][rank] = words.reshape(-1, TRACE_WARPS, len(ph.NAMES))
        return run


def _refuse_untold_experts(plan: Plan) -> None:
    if plan.experts == "precomputed" and not all(exchange.workload.expanded for exchange in plan.exchanges):
        raise Refusal("precomputed experts need the expanded layout: received rows lie in racing order otherwise")


class _Ranks:
    """A plan's virtual ranks: what lies where on the GPU, and how a launch of the plan becomes one on a stream."""

    def __init__(self, machine: LoopbackMachine, plan: Plan, pool: Any, kernels: Mapping[Any, Any]) -> None:
        self.machine, self.plan, self.pool, self.kernels = machine, plan, pool, kernels
        self.gpu = machine.gpu
        self.extra = machine._extra
        count = plan.topology.ranks
        launches = [launch for exchange in plan.exchanges for stream in exchange.streams for launch in stream]
        self.arenas = [pool.allocate(plan.arena_bytes) for _ in range(count)]
        self.record = pool.allocate(8 * len(RECORD))
        self.trace_bytes = 8 * max(launch.grid for launch in launches) * TRACE_WARPS * len(ph.NAMES)
        self.traces, self.never = [0] * count, 0
        if machine.trace:
            self.never = pool.store(np.full(self.trace_bytes // 8, TRACE_NEVER, np.int64))
            self.traces = [pool.allocate(self.trace_bytes) for _ in range(count)]
        self.contexts = [
            pool.store(np.array(context_words(self.record, machine.limit_ns, trace, self.arenas), np.int64))
            for trace in self.traces
        ]
        self.scale_table = pool.store(expert_scale(MAX_EXPERTS))
        self.streams = [self.gpu.stream() for _ in range(count)]
        self.main = self.gpu.stream()
        self._staged: dict[int, tuple[Any, int]] = {}
        self.gpu.synchronize()

    # ---- launches ----------------------------------------------------------------------------------------------------

    def start(self, launch: Launch, exchange: Exchange, stream: Any) -> None:
        from afdep_sim.kernels.cuda.compile import Variant

        base, tensors = self.arenas[launch.rank], exchange.window.tensors
        arguments = [
            base + tensors[a.name].offset
            if isinstance(a, Tensor)
            else base
            if isinstance(a, WindowBase)
            else self.contexts[launch.rank]
            if isinstance(a, Context)
            else a
            for a in launch.arguments
        ]
        self.gpu.launch(
            stream,
            self.kernels[Variant.of(launch, self.machine.trace)],
            launch.grid,
            launch.threads,
            arguments,
            launch.shared_bytes,
            launch.cooperative and bool(self.machine.cooperative),
            launch.programmatic,
        )

    def start_experts(self, number: int, rank: int, stream: Any) -> None:
        """The stand-in for the experts of an FFN rank, in stream order."""
        exchange = self.plan.exchanges[number]
        workload, tensors = exchange.workload, exchange.window.tensors
        topology, base = self.plan.topology, self.arenas[rank]
        per_rank = workload.experts_per_rank(topology)

        def at(name: str, there: bool = True) -> int:
            return base + tensors[name].offset if there else 0

        arguments = (
            at("psum_rank") + 8 * (topology.ranks - 1),
            topology.ranks * workload.bucket,
            exchange.window.received_rows,
            at("psum_expert"),
            per_rank,
            rank * per_rank,
            at("metadata"),
            workload.topk,
            at("received_x"),
            at("received_scales", workload.packs > 0),
            tensors["received_scales"].rows,
            at("received_weights"),
            at("received_topk", not workload.expanded),
            at("expert_y"),
            workload.hidden,
            self.scale_table,
            int(exchange_bias(number).view(np.uint32)),
        )
        from afdep_sim.runtime.device_code import THREADS

        self.gpu.launch(stream, self.extra["experts"], EXPERT_BLOCKS, THREADS, arguments)

    def finish(self) -> None:
        """Wait for everything; raises what a kernel reported."""
        self.gpu.synchronize()
        words = self.gpu.download(self.record, 8 * len(RECORD)).view(np.int64).tolist()
        plan = self.plan
        error = explain(words, self.contexts, self.arenas, plan.arena_bytes, self.machine.limit_ns)
        if error is not None:
            raise error

    # ---- data --------------------------------------------------------------------------------------------------------

    def staged(self, values: np.ndarray) -> int:
        """The device address of a copy of `values`, one for each array."""
        key = id(values)
        if key not in self._staged:
            self._staged[key] = (values, self.pool.store(values))
        return self._staged[key][1]

    def prepare(self, number: int, rank: int, sources: Mapping[int, Source], keep_received: bool) -> _Step:
        """One exchange of one rank, with everything allocated and uploaded that it needs."""
        plan = self.plan
        step = _Step(self, number, rank)
        tensors = plan.exchanges[number].window.tensors
        if rank in plan.topology.attention:
            step.inputs = [
                (tensors[name].offset, self.staged(values), values.nbytes)
                for name, values in input_tensors(sources[rank]).items()
            ]
            rows = output_rows(plan, number, rank)
            step.output = self.copy_of(rows.place)
            weights = weights_place(plan, number, rank)
            if plan.exchanges[number].workload.combine_weights:
                step.weights = self.copy_of(weights)
        else:
            if keep_received:
                step.received = self.copy_of(received_place(plan, number))
            if plan.experts == "precomputed":
                y = precomputed_y(plan.topology, plan.exchanges[number].workload, rank, sources)
                step.inputs = [(tensors["expert_y"].offset, self.staged(y), y.nbytes)]
        if self.machine.trace:
            step.trace = self.pool.allocate(self.trace_bytes)
        return step

    def copy_of(self, place: Place) -> Copy:
        return Copy(place, self.pool.allocate(place.size))

    def fetch(self, copy: Copy) -> Arena:
        return Arena(self.gpu.download(copy.address, copy.place.size), copy.place.offset)

    # ---- timed replays of the first exchange -------------------------------------------------------------------------

    def place(self, sources: Mapping[int, Source]) -> None:
        """Put the first exchange's inputs and precomputed expert rows where they stay."""
        plan, exchange = self.plan, self.plan.exchanges[0]
        tensors = exchange.window.tensors
        for rank in plan.topology.attention:
            for name, values in input_tensors(sources[rank]).items():
                self.gpu.upload(self.arenas[rank] + tensors[name].offset, values)
        for rank in plan.topology.ffn:
            y = precomputed_y(plan.topology, exchange.workload, rank, sources)
            self.gpu.upload(self.arenas[rank] + tensors["expert_y"].offset, y)
        self.gpu.synchronize()

    def poison(self) -> None:
        """Fill the combined rows with NaN, on the main stream."""
        for rank in self.plan.topology.attention:
            self.poison_output(0, rank, self.main)

    def poison_output(self, number: int, rank: int, stream: Any) -> None:
        rows = output_rows(self.plan, number, rank)
        self.gpu.fill(stream, self.arenas[rank] + rows.offset, BF16_NAN, rows.tokens, rows.row_bytes, rows.stride)

    def check(self, sources: Mapping[int, Source]) -> int:
        """Compare the combined rows with the reference; -> how many."""
        checked = 0
        for rank in self.plan.topology.attention:
            place = output_rows(self.plan, 0, rank).place
            data = self.gpu.download(self.arenas[rank] + place.offset, place.size)
            got = output(self.plan, 0, rank, Arena(data, place.offset))
            check_combined(self.plan.topology, self.plan.workload, sources[rank], 0, got, "precomputed")
            checked += len(got)
        return checked

    def graph(self, exchanges: int, times: _Times) -> Any:
        """One graph, a branch per rank, `exchanges` times the first exchange's launches in each."""
        builder = self.gpu.graph()
        branches = builder.split(self.plan.topology.ranks)
        exchange = self.plan.exchanges[0]
        for rank, branch in enumerate(branches):
            for number in range(exchanges):
                for launch in exchange.streams[rank]:
                    self.start(launch, exchange, branch)
                if rank in self.plan.topology.attention and number in (0, exchanges - 1):
                    times.mark(rank, number > 0, branch)
        return type(builder).join(*branches).end_building().complete()


class _Step:
    """One exchange of one rank: what surrounds its launches, all in the order of the rank's stream."""

    def __init__(self, ranks: _Ranks, number: int, rank: int) -> None:
        self.ranks, self.number, self.rank = ranks, number, rank
        self.inputs: list[tuple[int, int, int]] = []
        """(offset in the arena, address of the values, bytes)"""
        self.output: Copy | None = None
        self.weights: Copy | None = None
        self.received: Copy | None = None
        self.trace: int | None = None

    def enqueue(self) -> None:
        ranks, gpu, plan = self.ranks, self.ranks.gpu, self.ranks.plan
        stream, base = ranks.streams[self.rank], ranks.arenas[self.rank]
        exchange = plan.exchanges[self.number]
        self.poison(stream)
        for offset, address, size in self.inputs:
            gpu.copy(stream, base + offset, address, size)
        if self.trace is not None:
            gpu.copy(stream, ranks.traces[self.rank], ranks.never, ranks.trace_bytes)
        for launch in exchange.streams[self.rank]:
            ranks.start(launch, exchange, stream)
            if launch.kernel == "copy_epilogue" and self.rank in plan.topology.ffn:
                self.keep(stream, self.received)
                if plan.experts == "stand_in":
                    ranks.start_experts(self.number, self.rank, stream)
        self.keep(stream, self.output)
        self.keep(stream, self.weights)
        if self.trace is not None:
            gpu.copy(stream, self.trace, ranks.traces[self.rank], ranks.trace_bytes)

    def poison(self, stream: Any) -> None:
        """NaN into what this exchange must write before anybody reads it."""
        ranks, plan = self.ranks, self.ranks.plan
        base, tensors = ranks.arenas[self.rank], plan.exchanges[self.number].window.tensors
        if self.rank in plan.topology.attention:
            ranks.poison_output(self.number, self.rank, stream)
            names = ["combined_weights"]
        else:
            names = ["received_x", "received_weights", "expert_y"]
        for name in names:
            region = tensors[name]
            ranks.gpu.fill(stream, base + region.offset, BF16_NAN, region.rows, region.row_bytes, region.row_bytes)

    def keep(self, stream: Any, copy: Copy | None) -> None:
        if copy is not None:
            base = self.ranks.arenas[self.rank]
            self.ranks.gpu.copy(stream, copy.address, base + copy.place.offset, copy.place.size)


class _Times:
    """When the first and the last exchange of a graph ended, on each Attention rank's branch."""

    def __init__(self, ranks: _Ranks, clock: Clock) -> None:
        self.ranks, self.clock = ranks, clock
        attention = ranks.plan.topology.attention
        gpu = ranks.gpu
        self.events = {(rank, last): gpu.event() for rank in attention for last in (False, True)}
        self.words = ranks.pool.allocate(16 * len(attention))
        gpu.synchronize()

    def mark(self, rank: int, last: bool, stream: Any) -> None:
        gpu = self.ranks.gpu
        if self.clock == "events":
            gpu.record(self.events[rank, last], stream, external=True)
            return
        word = 2 * (rank - self.ranks.plan.topology.ffn_ranks) + int(last)
        gpu.launch(stream, self.ranks.extra["stamp"], 1, 1, (self.words + 8 * word,))

    def read_us(self) -> list[float]:
        """Per Attention rank, from the end of the first exchange to the end of the last."""
        gpu, attention = self.ranks.gpu, self.ranks.plan.topology.attention
        if self.clock == "events":
            return [gpu.elapsed_us(self.events[rank, False], self.events[rank, True]) for rank in attention]
        words = gpu.download(self.words, 16 * len(attention)).view(np.int64).reshape(-1, 2)
        return [float(us) for us in (words[:, 1] - words[:, 0]) / 1e3]
