"""Arenas as bytes, words as integers, and the tasks that wait for words.

An address is `rank << 40 | offset`. Every rank's arena starts as zeros; a store changes it when it lands, so a race
corrupts data as it would on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

RANK_SHIFT = 40
OFFSET_MASK = (1 << RANK_SHIFT) - 1


class Waiter(NamedTuple):
    """A task blocked on the words [low, high) of a rank until `test(words)` holds.

    `phase` is the phase it is charged to; `wanted` says what it waits for, and `holds(word)` whether one word has it.
    """

    low: int
    high: int
    test: Callable[[Any], bool]
    task: Any
    phase: str
    wanted: str
    holds: Callable[[int], bool]


class Memory:
    """`ranks` arenas of `arena_bytes`, with typed views: bytes (numpy), and memoryviews of bytes, int32 and int64.

    The memoryviews read and write single integers several times faster than NumPy scalars do.
    """

    def __init__(self, ranks: int, arena_bytes: int) -> None:
        self.arrays = [np.zeros(arena_bytes, np.uint8) for _ in range(ranks)]
        self.bytes = [memoryview(a).cast("B") for a in self.arrays]
        self.i32 = [m.cast("i") for m in self.bytes]
        self.i64 = [m.cast("q") for m in self.bytes]
        self.vectors = [a.view(np.int64) for a in self.arrays]
        self.waiters: list[list[Waiter]] = [[] for _ in range(ranks)]
        self.writers: list[dict[int, tuple[int, int, float]]] = [{} for _ in range(ranks)]
        """Per rank: first word of a write -> (words, agent index, time posted), the last of its kind."""

    def view(self, rank: int, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A typed view of the arena; offset in bytes."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        view: np.ndarray = self.arrays[rank][offset : offset + size].view(dtype).reshape(shape)
        return view

    def satisfied(self, rank: int, low: int, high: int) -> list[Waiter]:
        """Take out and return the waiters of `rank` that a change of words [low, high) satisfies."""
        waiting = self.waiters[rank]
        words = self.i64[rank]
        done = [w for w in waiting if w.low < high and low < w.high and w.test(words[w.low : w.high])]
        for waiter in done:
            waiting.remove(waiter)
        return done

    def last_writer(self, rank: int, word: int) -> tuple[int, float] | None:
        """(agent index, time posted) of the last remote or atomic write that covered `word`, if any."""
        covering = [
            (time, agent) for low, (n, agent, time) in self.writers[rank].items() if low <= word < low + n
        ]
        return (max(covering)[1], max(covering)[0]) if covering else None
