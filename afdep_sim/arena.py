"""What the host puts into and reads out of a rank's arena around an exchange: places and typed views, for any machine.

Places are bytes of the arena, so a machine whose arenas lie on a GPU copies a place and views the copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from afdep_sim.plan import Plan, shows_view
from afdep_sim.run import Received
from afdep_sim.workload import Source

BF16_NAN = 0x7FC0
"""The BF16 bit pattern that outputs are poisoned with."""


class Rows(NamedTuple):
    """`tokens` rows of `row_bytes`, `stride` apart, from `offset` of the arena; sizes in bytes."""

    offset: int
    tokens: int
    row_bytes: int
    stride: int

    @property
    def place(self) -> Place:
        return Place(self.offset, self.tokens * self.stride)


class Place(NamedTuple):
    """`size` bytes at `offset` of the arena."""

    offset: int
    size: int


class Arena:
    """The bytes of one rank's arena from byte `start` on: uint8 [n], contiguous."""

    def __init__(self, data: np.ndarray, start: int = 0) -> None:
        self.data = data
        self.start = start

    def view(self, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A typed view of the bytes from `offset` of the arena."""
        at = offset - self.start
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if at < 0 or at + size > len(self.data):
            raise IndexError(f"bytes {offset} to {offset + size} are outside the {len(self.data)} from {self.start}")
        view: np.ndarray = self.data[at : at + size].view(dtype).reshape(shape)
        return view


def input_tensors(source: Source, data: bool = True) -> dict[str, np.ndarray]:
    """The tensors of the window that a source fills, by name; rows, scales and bias only with `data`."""
    found: dict[str, np.ndarray | None] = {"topk": source.topk, "weights": source.weights}
    if data:
        found |= {"x": source.x, "scales": source.scales}
        found |= {f"bias{i}": tensor for i, tensor in enumerate(() if source.bias is None else source.bias)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def output_rows(plan: Plan, number: int, rank: int) -> Rows:
    """Where the combined rows of an Attention rank lie after exchange `number`; the collect view is strided."""
    exchange = plan.exchanges[number]
    workload, window = exchange.workload, exchange.window
    tokens = workload.tokens_of(plan.topology, rank)
    if shows_view(plan.topology, workload, plan.resolved):
        inbox = window.combine_inbox
        return Rows(inbox.offset, tokens, workload.hidden_bytes, inbox.row_bytes)
    return Rows(window.tensors["combined_x"].offset, tokens, workload.hidden_bytes, workload.hidden_bytes)


def output(plan: Plan, number: int, rank: int, arena: Arena) -> np.ndarray:
    """uint16 [T, H]: the combined rows of an Attention rank."""
    rows = output_rows(plan, number, rank)
    table = arena.view(rows.offset, (rows.tokens, rows.stride // 2), np.uint16)
    return table[:, : rows.row_bytes // 2]


def weights_place(plan: Plan, number: int, rank: int) -> Place:
    """Where the combined weights of an Attention rank lie; empty where none travel back."""
    exchange = plan.exchanges[number]
    tokens = exchange.workload.tokens_of(plan.topology, rank) if exchange.workload.combine_weights else 0
    return Place(exchange.window.tensors["combined_weights"].offset, 4 * tokens * exchange.workload.topk)


def combined_weights(plan: Plan, number: int, rank: int, arena: Arena) -> np.ndarray:
    """float32 [T, k]: the weights that came back to an Attention rank."""
    shape = (plan.exchanges[number].workload.tokens_of(plan.topology, rank), plan.exchanges[number].workload.topk)
    return arena.view(weights_place(plan, number, rank).offset, shape, np.float32)


def received_place(plan: Plan, number: int) -> Place:
    """The bytes that `received` looks at."""
    window = plan.exchanges[number].window
    first = window.tensors["psum_rank"].offset
    last = window.tensors["host_counts" if plan.exchanges[number].workload.host_counts else "received_x"]
    return Place(first, last.end - first)


def received(plan: Plan, number: int, arena: Arena) -> Received:
    """Views of what a rank holds after the copy epilogue of exchange `number`; the caller copies what it keeps."""
    exchange = plan.exchanges[number]
    window, workload, ranks = exchange.window, exchange.workload, plan.topology.ranks
    tensors, topk = window.tensors, workload.topk
    experts = workload.experts_per_rank(plan.topology)

    def view(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return arena.view(tensors[name].offset, shape, dtype)

    psum_rank = view("psum_rank", (ranks,), np.int64)
    psum_expert = view("psum_expert", (experts + 1,), np.int64)
    rows = int(psum_rank[-1])
    used = int(psum_expert[-1]) if workload.expanded else rows
    scales = None
    if workload.packs:
        scales = view("received_scales", (workload.packs, tensors["received_scales"].rows), np.int32)[:, :used].T
    return Received(
        psum_rank,
        psum_expert,
        view("metadata", (rows, 2 + topk), np.int32),
        view("received_x", (used, workload.hidden), np.uint8 if workload.packs else np.uint16),
        view("received_weights", (used,) if workload.expanded else (used, topk), np.float32),
        scales,
        None if workload.expanded else view("received_topk", (rows, topk), np.int32),
        view("host_counts", (ranks + experts,), np.int64) if workload.host_counts else None,
    )
