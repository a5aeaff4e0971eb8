"""Row reductions on a GPU: a warp adds the rows its lanes name into its stage, 16 bytes per lane and load.

Each turn handles `Vectors.count` x 512 bytes of every row. Loads of a batch are in flight together; a batch of the
prefix is predicated, so it needs no branch (upstream section 5.1); rows beyond the prefix come one at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from afdep_sim.kernels.cuda import intrinsics as ptx
from afdep_sim.kernels.cuda.rows import row_address, rows_named
from afdep_sim.kernels.cuda.words import device, lane

PASS_BYTES = 512
"""A warp's 32 lanes x 16 bytes; every row is a multiple of it (`workload.HIDDEN_STEP`)."""
RESERVED_REGISTERS = 20
"""What the rest of a kernel keeps alive around a reduction; with fewer some of them spill."""
BIAS_ROWS = 2
"""Rows that are in flight beside a batch where a bias is added."""


def shape(units: int, prefix: int, registers: int, more: int = 0) -> tuple[int, int]:
    """-> (vectors per row and turn, rows in flight): the most loads in flight that the registers hold.

    A vector in flight takes 4 registers, a row's address 2, the FP32 sums of one vector position 8. `more` rows are in
    flight beside the batch. Of equals the one with the fewest registers.
    """
    fits = [
        (wide * batch, -wide, wide, batch)
        for wide in (4, 2, 1)
        for batch in (2, 4, 8)
        if units % wide == 0
        and (batch == 2 or batch < 2 * prefix)
        and (4 * wide + 2) * (batch + more) + 8 * wide <= registers - RESERVED_REGISTERS
    ]
    return max(fits)[2:]


@cache
def make_reduction(row_bytes: int, prefix: int, registers: int) -> dict[str, Any]:
    """row_reduce and row_reduce_bias for rows of `row_bytes`, with `registers` per thread to do it in."""
    units = row_bytes // PASS_BYTES
    row_reduce = _make_row_reduce(units, *shape(units, prefix, registers))
    row_reduce_bias = _make_row_reduce_bias(*shape(units, prefix, registers, more=BIAS_ROWS))
    return {"row_reduce": row_reduce, "row_reduce_bias": row_reduce_bias}


def _make_row_reduce(units: int, wide: int, batch: int) -> Any:
    vectors = ptx.Vectors(wide)
    start, store_rounded = vectors.start, vectors.store_rounded
    turn = PASS_BYTES * wide
    add_rows = _make_add_rows(vectors, batch)
    pairs = ptx.Vectors(next(n for n in (4, 2, 1) if units % n == 0))
    load_pairs, add_pairs, store_pairs = pairs.load, pairs.add_pairs, pairs.store
    pair_turn = PASS_BYTES * pairs.count

    @device
    def row_reduce(stage, size, base, slots, stride, prefix):
        rows = rows_named(slots)
        count = ptx.population(rows)
        mine = 16 * lane()
        if count == 1 or count == 2:
            second = ptx.without_lowest_bit(rows)
            first_row = row_address(base, slots, stride, rows) + mine
            second_row = row_address(base, slots, stride, second) + mine
            for at in range(0, size, pair_turn):
                one = load_pairs(first_row + at, 1)
                two = load_pairs(second_row + at, second)
                store_pairs(stage + mine + at, add_pairs(one, two, second))
        else:
            for at in range(0, size, turn):
                sums = add_rows(start(0 if count > 0 else 1), base + mine + at, slots, stride, rows, prefix)
                store_rounded(stage + mine + at, sums)

    return row_reduce


def _make_row_reduce_bias(wide: int, batch: int) -> Any:
    vectors = ptx.Vectors(wide)
    load, start, add, store_rounded = vectors.load, vectors.start, vectors.add, vectors.store_rounded
    turn = PASS_BYTES * wide
    add_rows = _make_add_rows(vectors, batch)

    @device
    def row_reduce_bias(stage, size, base, slots, stride, prefix, bias0, bias1):
        rows = rows_named(slots)
        mine = 16 * lane()
        for at in range(0, size, turn):
            first = load(bias0 + mine + at, 1)
            second = load(bias1 + mine + at, 1 if bias1 != 0 else 0)
            sums = add(add(start(0), first), second)
            store_rounded(stage + mine + at, add_rows(sums, base + mine + at, slots, stride, rows, prefix))

    return row_reduce_bias


def _make_add_rows(vectors: ptx.Vectors, batch: int) -> Any:
    """-> add_rows(sums, base, slots, stride, rows, prefix): plus a turn's part of every named row, in lane order."""
    load, add = vectors.load, vectors.add

    @device
    def load_two(base, slots, stride, left):
        after = ptx.without_lowest_bit(left)
        first = load(row_address(base, slots, stride, left), left)
        second = load(row_address(base, slots, stride, after), after)
        return first, second, ptx.without_lowest_bit(after)

    @device
    def add_two(sums, base, slots, stride, left):
        a, b, left = load_two(base, slots, stride, left)
        return add(add(sums, a), b), left

    @device
    def add_four(sums, base, slots, stride, left):
        a, b, left = load_two(base, slots, stride, left)
        c, d, left = load_two(base, slots, stride, left)
        return add(add(add(add(sums, a), b), c), d), left

    @device
    def add_eight(sums, base, slots, stride, left):
        a, b, left = load_two(base, slots, stride, left)
        c, d, left = load_two(base, slots, stride, left)
        e, f, left = load_two(base, slots, stride, left)
        g, h, left = load_two(base, slots, stride, left)
        sums = add(add(add(add(sums, a), b), c), d)
        return add(add(add(add(sums, e), f), g), h), left

    add_batch = {2: add_two, 4: add_four, 8: add_eight}[batch]

    @device
    def add_rows(sums, base, slots, stride, rows, prefix):
        left = rows
        for _ in range(0, prefix, batch):
            sums, left = add_batch(sums, base, slots, stride, left)
        while left != 0:
            sums = add(sums, load(row_address(base, slots, stride, left), 1))
            left = ptx.without_lowest_bit(left)
        return sums

    return add_rows
