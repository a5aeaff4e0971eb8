"""Which SM holds which block: shared memory, threads, registers and block slots of one GPU."""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from afdep_sim.plan import Device, Launch

RESERVED_SHARED_BYTES = 2048
"""1 KiB the system keeps of every block's shared memory (CUDA programming guide), for this block and another."""


class Need(NamedTuple):
    """What one block takes of an SM: shared memory in bytes, threads, registers."""

    shared_bytes: int
    threads: int
    registers: int

    @classmethod
    def of(cls, launch: Launch) -> Need:
        return cls(launch.shared_bytes, launch.threads, launch.threads * launch.registers)


class Occupancy:
    """The SMs of one GPU. Blocks go to empty SMs first, lowest number first, then to SMs that still have room."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._empty = list(range(device.sms))
        self._held: dict[int, list[Need]] = {}
        """SM -> its blocks; SMs filled by one exclusive block are in neither."""

    def place(self, need: Need, blocks: int, all_or_none: bool = False) -> list[int]:
        """SM of each block that fits now, at most `blocks` of them; with all_or_none an empty list unless all fit."""
        chosen = self._empty[:blocks]
        fresh = len(chosen)
        exclusive = self._exclusive(need)
        if fresh < blocks and not exclusive:
            self._add_shared(need, blocks, chosen)
        if all_or_none and len(chosen) < blocks:
            return []
        del self._empty[:fresh]
        if exclusive:
            return chosen
        for sm in chosen:
            if sm in self._held:
                self._held[sm].append(need)
            else:
                self._held[sm] = [need]
        return chosen

    def release(self, sms: list[int], need: Need) -> None:
        """Give back what one block held on each of `sms`."""
        if self._exclusive(need):
            if len(sms) == 1:
                insort(self._empty, sms[0])
                return
            self._empty += sms
        else:
            for sm in sms:
                held = self._held[sm]
                held.remove(need)
                if not held:
                    del self._held[sm]
                    self._empty.append(sm)
        self._empty.sort()

    def _exclusive(self, need: Need) -> bool:
        """Whether one such block leaves no room for any other: every block needs at least 1 KiB of shared memory."""
        return self._device.shared_per_sm_bytes - need.shared_bytes < RESERVED_SHARED_BYTES

    def _add_shared(self, need: Need, blocks: int, chosen: list[int]) -> None:
        """Extend `chosen` by SMs that hold a block already, or were chosen just now: breadth first."""
        planned = dict.fromkeys(chosen, 1)
        candidates = chosen + sorted(self._held)
        progress = True
        while progress and len(chosen) < blocks:
            progress = False
            for sm in candidates:
                together = [*self._held.get(sm, ()), *[need] * (planned.get(sm, 0) + 1)]
                if len(chosen) < blocks and self._fit_together(together):
                    planned[sm] = planned.get(sm, 0) + 1
                    chosen.append(sm)
                    progress = True

    def _fit_together(self, held: list[Need]) -> bool:
        device = self._device
        return (
            len(held) <= device.blocks_per_sm
            and sum(n.shared_bytes for n in held) <= device.shared_per_sm_bytes
            and sum(n.threads for n in held) <= device.threads_per_sm
            and sum(n.registers for n in held) <= device.registers_per_sm
        )
