"""What bytes pass through: NVLink ports, HBM, and the copy and reduction rates of SMs. First come, first served.

Every resource is one number, the time at which it is free again; contention and queueing come out of it. The ports
are cut-through: a row occupies egress and ingress for bytes over bandwidth each, but pays its latency once.
"""

from __future__ import annotations

from afdep_sim.model.profiles import Profile


class Fabric:
    """The resources of `ranks` GPUs with `sms` SMs each, under a profile. Times ns, rates bytes per ns."""

    def __init__(self, profile: Profile, ranks: int, sms: int) -> None:
        self.profile = profile
        self.egress = [0.0] * ranks
        self.ingress = [0.0] * ranks
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

    def row(self, rank: int, peer: int, size: int, now: float) -> tuple[float, float]:
        """A bulk store of `size` bytes to a peer, issued at `now` -> (lands, acknowledged at the sender)."""
        busy = size / self._port
        free = self.egress[rank]
        sent = (free if free > now else now) + busy
        self.egress[rank] = sent
        arrived = self.ingress[peer] + busy
        if sent > arrived:
            arrived = sent
        self.ingress[peer] = arrived
        self.bytes_out[rank] += size
        self.bytes_in[peer] += size
        self.rows_out[rank] += 1
        lands = arrived + self._latency
        return lands, lands + self._acknowledge

    def words(self, rank: int, first: int, count: int, now: float) -> list[tuple[float, list[int]]]:
        """A word written to each of `count` ranks from `first` at `now` -> (lands, ranks), together where they can.

        Behind the rows queued at both ports or past them, as the profile says.
        """
        sent = self.egress[rank] if self._shared_queue else now
        if sent < now:
            sent = now
        together: list[tuple[float, list[int]]] = []
        last = -1.0
        for peer in range(first, first + count):
            if peer == rank:
                lands = now + self._local
            else:
                lands = sent
                if self._shared_queue and self.ingress[peer] > lands:
                    lands = self.ingress[peer]
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
