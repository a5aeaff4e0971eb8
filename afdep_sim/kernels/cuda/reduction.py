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
WIDE_REGISTERS = 112
"""From this many registers per thread on a turn may hold four vectors per row instead of two."""


@cache
def make_reduction(row_bytes: int, prefix: int, registers: int) -> dict[str, Any]:
    """row_reduce and row_reduce_bias for rows of `row_bytes`, with `registers` per thread to do it in."""
    units = row_bytes // PASS_BYTES
    widest = 4 if registers >= WIDE_REGISTERS else 2
    wide = next(n for n in (4, 2, 1) if n <= widest and units % n == 0)
    vectors = ptx.Vectors(wide)
    load, start, add, store_rounded = vectors.load, vectors.start, vectors.add, vectors.store_rounded
    turn = PASS_BYTES * wide
    add_rows = _make_add_rows(vectors, 4 if prefix > 2 else 2)
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

    @device
    def row_reduce_bias(stage, size, base, slots, stride, prefix, bias0, bias1):
        rows = rows_named(slots)
        mine = 16 * lane()
        for at in range(0, size, turn):
            first = load(bias0 + mine + at, 1)
            second = load(bias1 + mine + at, 1 if bias1 != 0 else 0)
            sums = add(add(start(0), first), second)
            store_rounded(stage + mine + at, add_rows(sums, base + mine + at, slots, stride, rows, prefix))

    return {"row_reduce": row_reduce, "row_reduce_bias": row_reduce_bias}


def _make_add_rows(vectors: ptx.Vectors, batch: int) -> Any:
    """-> add_rows(sums, base, slots, stride, rows, prefix): sums plus a turn's part of every named row, lane by lane."""
    load, add = vectors.load, vectors.add

    if batch == 4:

        @device
        def add_batch(sums, base, slots, stride, left):
            left1 = ptx.without_lowest_bit(left)
            left2 = ptx.without_lowest_bit(left1)
            left3 = ptx.without_lowest_bit(left2)
            row0 = load(row_address(base, slots, stride, left), left)
            row1 = load(row_address(base, slots, stride, left1), left1)
            row2 = load(row_address(base, slots, stride, left2), left2)
            row3 = load(row_address(base, slots, stride, left3), left3)
            return add(add(add(add(sums, row0), row1), row2), row3), ptx.without_lowest_bit(left3)

    else:

        @device
        def add_batch(sums, base, slots, stride, left):
            left1 = ptx.without_lowest_bit(left)
            row0 = load(row_address(base, slots, stride, left), left)
            row1 = load(row_address(base, slots, stride, left1), left1)
            return add(add(sums, row0), row1), ptx.without_lowest_bit(left1)

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
