"""topology x workload x protocol -> what each rank launches. The only place that decides what runs.

A plan is data: kernels by name, the constants their text closes over, grids, warps, shared memory, arguments, stream
order and programmatic edges. Both machines read it and neither adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from afdep_sim.errors import Refusal, whole
from afdep_sim.protocol import Exit, Protocol, Resolved
from afdep_sim.topology import Role, Topology
from afdep_sim.window import (
    WORD_OFFSETS,
    WORKSPACE_BYTES,
    Window,
    align,
    combine_row_bytes,
    dispatch_metadata_offset,
    dispatch_row_bytes,
    rank_layout,
)
from afdep_sim.workload import Source, Workload

Experts = Literal["stand_in", "precomputed"]
NOTIFY_WARPS = 4
"""Upstream section 3: four warps of every dispatch block count routes; they act as one agent."""
MBARRIER_BYTES = 32
"""Shared memory behind each staged row for its mbarrier (upstream section 2.3)."""


@dataclass(frozen=True)
class Device:
    """What a block scheduler needs to know of a GPU. Sizes in bytes."""

    sms: int = 132
    shared_per_sm_bytes: int = 233_472
    shared_per_block_bytes: int = 232_448
    threads_per_sm: int = 2048
    registers_per_sm: int = 65_536
    blocks_per_sm: int = 32


HOPPER = Device()
"""H100 SXM and H200: the same SM count and limits (CUDA programming guide, compute capability 9.0)."""


@dataclass(frozen=True)
class Constants:
    """What a kernel's text closes over: everything that prunes code. One value, one cubin.

    Offsets of workspace words and the inbox base are the same for every configuration.
    """

    topk: int
    hidden_bytes: int
    data_bytes: int
    """Bytes of a row's values in dispatch: hidden_bytes, or half of them in FP8."""
    packs: int
    """Scale packs of a dispatch row; 0 in BF16."""
    metadata_offset: int
    dispatch_row_bytes: int
    combine_row_bytes: int
    expert_alignment: int
    expanded: bool
    rank_layout: bool
    combine_weights: bool
    bias: int
    host_counts: bool
    sends: bool
    """This rank's role sends payload in the kernel's phase."""
    receives: bool
    """This rank's role receives payload in the kernel's phase."""
    sends_counts: bool
    receives_counts: bool
    union_counts: bool
    entry_barrier: bool
    exit_all_ranks: bool
    exit_grid: bool
    check_routes: bool
    """Sources check their own routes before they index, store or put anything by them (record section 8)."""
    zero_view: bool
    """Sources zero the inbox rows of tokens without a route: the collect view shows them (record section 13)."""
    reduce_prefix: int
    """Row slots of a reduction that are loaded without a branch (upstream section 5.1)."""

    words: ClassVar[Mapping[str, int]] = WORD_OFFSETS
    inbox: ClassVar[int] = WORKSPACE_BYTES
    notify_warps: ClassVar[int] = NOTIFY_WARPS


class Tensor(NamedTuple):
    """An argument that is the address of a private tensor of the rank's arena."""

    name: str


class Context(NamedTuple):
    """The machine's own context argument (peer bases, watchdog, trace buffer)."""


class WindowBase(NamedTuple):
    """The address of the rank's window: workspace words first, the inboxes behind them."""


Argument = int | Tensor | Context | WindowBase


@dataclass(frozen=True)
class Launch:
    """One kernel launch of one rank. `experts` launches are the stand-in step between dispatch and combine.

    `programmatic`: a programmatic edge on the launch before it (its blocks may become resident once every block of
    that one has triggered). `cooperative`: its blocks are placed all or none.
    """

    rank: int
    kernel: str
    constants: Constants
    grid: int
    warps: int
    shared_bytes: int
    cooperative: bool
    programmatic: bool
    arguments: tuple[Argument, ...]
    tokens: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def registers(self) -> int:
        """Registers per thread the block scheduler reckons with: the most this block size can have."""
        return min(255, 65_536 // self.threads // 8 * 8)

    @property
    def agent_warps(self) -> Sequence[int]:
        """The warps that run the text on their own; dispatch's notify group is one agent, warp 0."""
        if self.kernel == "dispatch":
            return (0, *range(NOTIFY_WARPS, self.warps))
        return range(self.warps)

    def working(self, rows: int) -> Iterator[tuple[int, int, str]]:
        """(block, warp, label) of every agent that has something to do, given the rows this launch handles.

        Everything not listed runs no turn of a row loop and elects nobody. `rows`: tokens for dispatch and the
        reduce epilogue, received rows for the copy epilogue and combine. In block order, warps ascending.
        """
        c = self.constants
        every_block = c.sends or c.sends_counts or c.entry_barrier or c.exit_all_ranks
        if self.kernel == "dispatch":
            payload = self.warps - NOTIFY_WARPS
            for block in range(self.grid if every_block else 1):
                yield block, 0, "notify"
                for i in range(block, min(rows, payload * self.grid) if c.sends else 0, self.grid):
                    yield block, NOTIFY_WARPS + i // self.grid, "payload"
        elif self.kernel == "combine":
            per_warp = -(-rows // (self.grid * self.warps)) if c.sends else 0
            busy: list[list[int]] = [[] for _ in range(self.grid)]
            for i in range(-(-rows // per_warp) if per_warp else 0):
                busy[i % self.grid].append((i // self.grid - self.rank) % self.warps)
            for block in range(self.grid if every_block else 1):
                for warp in sorted({0, *busy[block]}):
                    yield block, warp, "rows" if c.sends else "collect"
        else:
            for block in range(min(self.grid, max(rows, 1))):
                for warp in range(max(1, -(-(min(rows, self.warps * self.grid) - block) // self.grid))):
                    yield block, warp, "rows"


@dataclass(frozen=True)
class Exchange:
    """One exchange: its workload, where everything lies, and each rank's launches in stream order."""

    workload: Workload
    window: Window
    streams: tuple[tuple[Launch, ...], ...]


@dataclass(frozen=True)
class Plan:
    """What every rank launches, exchange after exchange.

    experts: 'stand_in' computes bf16(w * (x * s(e) + b(n))) between dispatch and combine, 'precomputed' hands combine
    a tensor whose rows depend on the expert only (timed runs).
    """

    topology: Topology
    protocol: Protocol
    resolved: Resolved
    device: Device
    experts: Experts
    exchanges: tuple[Exchange, ...]

    @cached_property
    def arena_bytes(self) -> int:
        return max(exchange.window.arena_bytes for exchange in self.exchanges)

    @property
    def workload(self) -> Workload:
        """The first exchange's workload."""
        return self.exchanges[0].workload

    def inputs(self, data: bool = True, repeated: bool = False) -> list[dict[int, Source]]:
        """What each Attention rank brings to each exchange, drawn from the exchanges' workloads.

        repeated: the first exchange's rows and routes again and again, as a replayed graph has them.
        """
        if repeated:
            return [self._sources(0, data)] * len(self.exchanges)
        return [self._sources(n, data) for n in range(len(self.exchanges))]

    def check_inputs(self, inputs: Sequence[Mapping[int, Source]], data: bool = True) -> None:
        """Refuse inputs that do not bring every Attention rank's arrays to every exchange, in shape and dtype."""
        if len(inputs) != len(self.exchanges):
            raise Refusal(f"inputs for {len(inputs)} exchanges, not for the plan's {len(self.exchanges)}")
        for number, (exchange, sources) in enumerate(zip(self.exchanges, inputs, strict=True)):
            for rank in self.topology.attention:
                if rank not in sources:
                    raise Refusal(f"inputs of exchange {number} lack Attention rank {rank}")
                sources[rank].check(exchange.workload, exchange.workload.tokens_of(self.topology, rank), rank, data)

    def _sources(self, number: int, data: bool) -> dict[int, Source]:
        workload = self.exchanges[number].workload
        return {rank: workload.source(self.topology, rank, number, data) for rank in self.topology.attention}


class Epilogues(NamedTuple):
    """How the epilogues of a plan are launched: blocks of their grids, and whether early (a programmatic edge)."""

    grid: int
    programmatic: bool


def build_plan(
    topology: Topology,
    workload: Workload | Sequence[Workload],
    protocol: Protocol,
    exchanges: int = 1,
    experts: Experts = "stand_in",
    device: Device = HOPPER,
    epilogue_sms: int = 0,
    programmatic: bool = True,
) -> Plan:
    """A plan of `exchanges` back-to-back exchanges, or of one per workload where a sequence is given.

    epilogue_sms: blocks of an epilogue's grid; 0 takes every SM. programmatic: whether epilogues have a programmatic
    edge on the kernel before them. Raises `Refusal` for what no kernel text exists for.
    """
    if experts not in ("stand_in", "precomputed"):
        raise Refusal(f"experts {experts!r} is not 'stand_in' or 'precomputed'")
    exchanges = whole("exchanges", exchanges)
    if exchanges < 1:
        raise Refusal(f"exchanges {exchanges} is below 1")
    resolved = protocol.resolve(topology)
    workloads = [workload] * exchanges if isinstance(workload, Workload) else list(workload)
    if not workloads:
        raise Refusal("a plan of no workload has no exchange, and needs at least 1")
    if resolved.transport_sms > device.sms:
        raise Refusal(f"transport SMs {resolved.transport_sms} is over the device's {device.sms}")
    if not 0 <= epilogue_sms <= device.sms:
        raise Refusal(f"epilogue SMs {epilogue_sms} is outside 0 to the device's {device.sms}")
    edges = Epilogues(epilogue_sms or device.sms, programmatic)
    shapes = {(w.hidden, w.dtype) for w in workloads}
    if len(shapes) > 1:
        raise Refusal(f"exchanges of one plan have {len(shapes)} row shapes (hidden and dtype), more than 1")
    built = {w: _exchange(topology, w, resolved, device, edges) for w in dict.fromkeys(workloads)}
    return Plan(topology, protocol, resolved, device, experts, tuple(built[w] for w in workloads))


def shows_view(topology: Topology, workload: Workload, protocol: Resolved) -> bool:
    """Whether the combined rows are a view of inbox region 0 instead of a copy (record section 13).

    With weights, bias, more than one FFN rank or the top-k layout the ordinary result is returned.
    """
    plain = not workload.bias and not workload.combine_weights
    return protocol.collect_view and plain and rank_layout(topology, workload, protocol)


def _exchange(
    topology: Topology, workload: Workload, protocol: Resolved, device: Device, edges: Epilogues
) -> Exchange:
    workload.real_experts(topology)
    window = Window.build(topology, workload, protocol)
    streams = tuple(
        tuple(_stream(topology, workload, protocol, device, edges, window.received_rows, rank))
        for rank in range(topology.ranks)
    )
    return Exchange(workload, window, streams)


def _warps(device: Device, row_bytes: int, most: int, reserved_bytes: int = 0) -> int:
    """Warps of a block that hold one staged row each (upstream sections 3 to 6)."""
    fit = (device.shared_per_block_bytes - reserved_bytes) // (row_bytes + MBARRIER_BYTES)
    if fit < 1:
        raise Refusal(f"a row of {row_bytes} bytes does not fit the {device.shared_per_block_bytes} bytes of a block")
    return min(most, fit)


def _stream(
    topology: Topology,
    workload: Workload,
    protocol: Resolved,
    device: Device,
    edges: Epilogues,
    received_rows: int,
    rank: int,
) -> Iterator[Launch]:
    attention = topology.role(rank) is Role.ATTENTION
    union, experts = not protocol.role_aware, workload.experts_per_rank(topology)
    hidden, topk, bucket = workload.hidden_bytes, workload.topk, workload.bucket
    data, packs = workload.dispatch_bytes, workload.packs
    dispatch_row, combine_row = dispatch_row_bytes(data, topk, packs), combine_row_bytes(hidden, topk)
    ranks_in_regions = rank_layout(topology, workload, protocol)
    view = shows_view(topology, workload, protocol)
    pack_stride = 4 * align(received_rows, 4)
    first_region = 0 if protocol.union_buffers else topology.ffn_ranks
    tokens = workload.tokens_of(topology, rank)
    grid = protocol.transport_sms
    base = Constants(
        topk=topk,
        hidden_bytes=hidden,
        data_bytes=data,
        packs=packs,
        metadata_offset=dispatch_metadata_offset(data, packs),
        dispatch_row_bytes=dispatch_row,
        combine_row_bytes=combine_row,
        expert_alignment=workload.expert_alignment,
        expanded=workload.expanded,
        rank_layout=ranks_in_regions,
        combine_weights=workload.combine_weights,
        bias=0,
        host_counts=workload.host_counts,
        sends=union,
        receives=union,
        sends_counts=False,
        receives_counts=False,
        union_counts=False,
        entry_barrier=protocol.entry_barriers,
        exit_all_ranks=protocol.exit is Exit.ALL_RANKS,
        exit_grid=protocol.exit is Exit.GRID,
        check_routes=False,
        zero_view=False,
        reduce_prefix=0,
    )
    epilogue = replace(base, sends=False, receives=False, entry_barrier=False, exit_all_ranks=False, exit_grid=False)
    histogram_bytes = 4 * align(topology.ranks * (1 + experts), 128)
    most_payload = min(28, -(-512 // grid))
    yield Launch(
        rank,
        "dispatch",
        replace(
            base,
            sends=union or attention,
            receives=union or not attention,
            sends_counts=attention or protocol.union_counts,
            receives_counts=not attention or protocol.union_counts,
            union_counts=protocol.union_counts,
            check_routes=protocol.role_aware and attention,
            zero_view=view and attention,
        ),
        grid,
        NOTIFY_WARPS + _warps(device, dispatch_row, most_payload, histogram_bytes),
        device.shared_per_block_bytes,
        cooperative=True,
        programmatic=False,
        arguments=(
            Context(),
            WindowBase(),
            rank,
            topology.ranks,
            topology.ffn_ranks,
            experts,
            bucket,
            first_region,
            tokens,
            workload.real_experts(topology),
            Tensor("x"),
            Tensor("scales"),
            Tensor("topk"),
            Tensor("weights"),
            Tensor("slot_of_lane"),
            Tensor("psum_rank"),
            Tensor("psum_expert"),
            Tensor("host_counts"),
        ),
        tokens=tokens,
    )
    if union or not attention:
        yield Launch(
            rank,
            "copy_epilogue",
            epilogue,
            edges.grid,
            _warps(device, dispatch_row, 32),
            device.shared_per_block_bytes,
            cooperative=False,
            programmatic=edges.programmatic,
            arguments=(
                Context(),
                WindowBase(),
                rank,
                topology.ranks,
                experts,
                bucket,
                first_region,
                Tensor("psum_rank"),
                Tensor("psum_expert"),
                Tensor("metadata"),
                Tensor("received_x"),
                Tensor("received_scales"),
                pack_stride,
                Tensor("received_topk"),
                Tensor("received_weights"),
            ),
        )
    # Upstream's prefix is the expected number of local rows with experts on every rank; with one FFN rank every
    # row is local, so the whole reduction is free of branches (record section 10).
    prefix = topk if protocol.single_ffn_prefix else -(-topk // topology.ranks)
    yield Launch(
        rank,
        "combine",
        replace(base, sends=union or not attention, receives=union or attention, reduce_prefix=prefix),
        grid,
        _warps(device, combine_row, 32),
        device.shared_per_block_bytes,
        cooperative=True,
        programmatic=False,
        arguments=(
            Context(),
            WindowBase(),
            rank,
            topology.ranks,
            topology.ffn_ranks,
            bucket,
            Tensor("psum_rank"),
            Tensor("metadata"),
            Tensor("expert_y"),
            Tensor("received_weights"),
        ),
    )
    if union or (attention and not view):
        yield Launch(
            rank,
            "reduce_epilogue",
            replace(epilogue, reduce_prefix=topk, bias=workload.bias),
            edges.grid,
            _warps(device, align(hidden, 32), 32),
            device.shared_per_block_bytes,
            cooperative=False,
            programmatic=edges.programmatic,
            arguments=(
                Context(),
                WindowBase(),
                experts,
                bucket,
                tokens,
                Tensor("topk"),
                Tensor("combined_x"),
                Tensor("combined_weights"),
                Tensor("bias0"),
                Tensor("bias1"),
            ),
            tokens=tokens,
        )
