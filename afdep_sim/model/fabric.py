"""What bytes pass through: NVLink ports, HBM, and the copy and reduction rates of SMs. First come, first served.

HBM and SM rates are one number each, the time at which the resource is free again; contention and queueing come out
of it. The ports are cut-through: a row occupies egress and ingress for bytes over bandwidth each, but pays its latency
once. A row is posted long before it reaches a busy port, so a port also remembers the times it left unused: a row that
is posted later but gets there earlier takes one of those.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from afdep_sim.model.profiles import Profile

REMEMBERED = 256
"""Unused times a port keeps before it looks for those that have passed."""
SLIVER_NS = 1e-3
"""Unused times shorter than this come from rounding."""


class Port:
    """One direction of a GPU's NVLink port: a row at a time, in order of arrival. Times in ns.

    `free` is when the last row has passed; `begins` and `ends` are the unused times before it, in order.
    """

    __slots__ = ("begins", "ends", "free")

    def __init__(self) -> None:
        self.free = 0.0
        self.begins: list[float] = []
        self.ends: list[float] = []

    def take(self, start: float, busy: float, now: float) -> float:
        """Occupy the port for `busy` from `start` or as soon after as it can be -> when the row has passed.

        `now` is the time of the call, before which no later call can want the port.
        """
        free = self.free
        if start >= free:
            if start > free:
                self.begins.append(free)
                self.ends.append(start)
                if len(self.ends) > REMEMBERED:
                    self._forget(now)
            self.free = start + busy
            return self.free
        begins, ends = self.begins, self.ends
        for at in range(bisect_left(ends, start + busy - SLIVER_NS), len(ends)):
            begin = begins[at] if begins[at] > start else start
            passed = begin + busy
            if passed <= ends[at] + SLIVER_NS:
                self._split(at, begin, passed)
                return passed
        self.free = free + busy
        return self.free

    def _forget(self, now: float) -> None:
        """Drop the unused times that have passed."""
        over = bisect_right(self.ends, now)
        del self.begins[:over], self.ends[:over]

    def _split(self, at: int, begin: float, passed: float) -> None:
        """Take [begin, passed) out of the unused time number `at`; what is too short for anything is forgotten."""
        before = begin - self.begins[at] > SLIVER_NS
        after = self.ends[at] - passed > SLIVER_NS
        if before and after:
            self.begins.insert(at + 1, passed)
            self.ends.insert(at, begin)
        elif before:
            self.ends[at] = begin
        elif after:
            self.begins[at] = passed
        else:
            del self.begins[at], self.ends[at]


class Fabric:
    """The resources of `ranks` GPUs with `sms` SMs each, under a profile. Times ns, rates bytes per ns."""

    def __init__(self, profile: Profile, ranks: int, sms: int) -> None:
        self.profile = profile
        self.egress = [Port() for _ in range(ranks)]
        self.ingress = [Port() for _ in range(ranks)]
        self.hbm = [0.0] * ranks
        self.sm_copy = [[0.0] * sms for _ in range(ranks)]
        self.sm_reduce = [[0.0] * sms for _ in range(ranks)]
        self.bytes_out = [0] * ranks
        self.bytes_in = [0] * ranks
        self.rows_out = [0] * ranks
        self._port = profile.port_bytes_per_ns
        self._latency = profile.row_latency_ns
        self._acknowledge = profile.row_acknowledge_ns
        self._hbm = profile.hbm_bytes_per_ns
        self._signal = profile.signal_ns
        self._local = profile.local_word_ns
        self._shared_queue = profile.words_queue_behind_rows

    def row(self, rank: int, peer: int, size: int, start: float, now: float) -> tuple[float, float]:
        """A bulk store of `size` bytes to a peer, posted at `now` and out of its SM at `start`.

        -> (lands, acknowledged at the sender).
        """
        busy = size / self._port
        sent = self.egress[rank].take(start, busy, now)
        arrived = self.ingress[peer].take(sent - busy, busy, now)
        self.bytes_out[rank] += size
        self.bytes_in[peer] += size
        self.rows_out[rank] += 1
        lands = arrived + self._latency
        return lands, lands + self._acknowledge

    def words(self, rank: int, first: int, count: int, now: float) -> list[tuple[float, list[int]]]:
        """A word written to each of `count` ranks from `first` at `now` -> (lands, ranks), together where they can.

        Behind the rows queued at both ports or past them, as the profile says.
        """
        sent = self.egress[rank].free if self._shared_queue else now
        if sent < now:
            sent = now
        together: list[tuple[float, list[int]]] = []
        last = -1.0
        for peer in range(first, first + count):
            if peer == rank:
                lands = now + self._local
            else:
                lands = sent
                if self._shared_queue and self.ingress[peer].free > lands:
                    lands = self.ingress[peer].free
                lands += self._signal
            if lands == last:
                together[-1][1].append(peer)
            else:
                together.append((lands, [peer]))
                last = lands
        return together

    def dram(self, rank: int, size: int, now: float) -> float:
        """`size` bytes through this GPU's HBM -> when the last has passed."""
        free = self.hbm[rank]
        done = (free if free > now else now) + size / self._hbm
        self.hbm[rank] = done
        return done
