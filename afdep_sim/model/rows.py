"""The vocabulary in the model, part two: counts (the notify group) and rows (stage, bulk copies, reduction)."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Any

import numpy as np

from afdep_sim.model.memory import OFFSET_MASK, RANK_SHIFT

ARRIVED = 1 << 32
"""High half of a reduction word: how many blocks have added to it (upstream section 3.1)."""
LOW_HALF = ARRIVED - 1


class ProtocolError(RuntimeError):
    """The text asked for something that cannot be: a row beyond the prefix sums, say. Names the agent."""


class RouteError(ProtocolError):
    """A source's own check has stopped at a route that names no expert, or one twice (record section 8)."""


def wrong_route(expert: list[int], experts: int) -> str | None:
    """What is wrong with a token's routes, as a clause, if anything is."""
    seen = set()
    for lane, e in enumerate(expert):
        if e < -1 or e >= experts:
            return f"lane {lane} has expert {e}, outside 0 to {experts - 1} (-1 is no route)"
        if e >= 0 and e in seen:
            return f"lane {lane} has expert {e}, which the token has already"
        seen.add(e)
    return None


def add_rows(sim: Any, ops: Any, sync: Any) -> None:
    """Add the count and row operations of one simulation to its `ops`."""
    for part in (_counts, _stage, _rows):
        part(sim, ops, sync)


def _set(ops: Any, *functions: Any) -> None:
    for function in functions:
        setattr(ops, function.__name__, function)


def _counts(sim: Any, ops: Any, sync: Any) -> None:
    engine, memory, fabric, profile = sim.engine, sim.memory, sim.fabric, sim.profile
    vectors, counters, observer = memory.vectors, sim.counters, sim.observer
    store_ns, load_ns, atomic_ns = profile.store_word_ns, profile.load_ns, profile.atomic_ns
    wait, changed = sim.wait, sim.changed
    blank: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    """Counters of a block without tokens, by size, and what it adds; shared and never written."""

    def check_routes(ctx: int, routes: int, topk: int, tokens: int, experts: int) -> None:
        agent = engine.current
        at = (routes & OFFSET_MASK) >> 3
        mine = range(agent.block.id, tokens, agent.run.launch.grid)
        if not mine:
            return
        agent.now += load_ns
        table = vectors[routes >> RANK_SHIFT][at : at + tokens * topk].reshape(tokens, topk)
        table = table[agent.block.id :: mine.step]
        ordered = np.sort(table, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if ((table < -1) | (table >= experts)).any() or twice.any():
            for token in mine:
                if wrong := wrong_route(table[token // mine.step].tolist(), experts):
                    raise RouteError(f"{sim.describe_agent(agent)}: token {token} {wrong}")

    def count_routes(routes: int, topk: int, tokens: int, receivers: int, experts: int) -> None:
        agent = engine.current
        block, grid = agent.block, agent.run.launch.grid
        size = receivers * (1 + experts)
        agent.now += load_ns
        mine = range(block.id, tokens, grid)
        if not mine:
            if size not in blank:
                blank[size] = np.zeros(size, np.int64), np.full(size, ARRIVED, np.int64)
            block.counters = blank[size][0]
            return
        histogram = block.counters = np.zeros(size, np.int64)
        at = (routes & OFFSET_MASK) >> 3
        words = memory.i64[routes >> RANK_SHIFT]
        if len(mine) <= 4:
            for token in mine:
                seen = set()
                for expert in words[at + topk * token : at + topk * (token + 1)]:
                    if expert >= 0:
                        histogram[receivers + expert] += 1
                        seen.add(expert // experts)
                for rank in seen:
                    histogram[rank] += 1
        else:
            table = vectors[routes >> RANK_SHIFT][at : at + tokens * topk].reshape(tokens, topk)
            all_routes = table[block.id :: grid]
            owner = np.where(all_routes >= 0, all_routes // experts, -1)
            histogram[receivers:] = np.bincount(all_routes[all_routes >= 0], minlength=receivers * experts)
            for rank in range(receivers):
                histogram[rank] = np.count_nonzero((owner == rank).any(axis=1))
        # Tokens go to the group's four warps in turn, each at the pace of its loads and shared atomics.
        agent.now += profile.count_token_ns * -(-len(mine) // 4)

    def added(event: tuple[int, int, np.ndarray, int, float]) -> None:
        rank, low, values, agent, posted_ns = event
        words = vectors[rank][low : low + len(values)]
        words += values
        changed(rank, low, len(values), agent, posted_ns)

    def counts_add(address: int, count: int) -> None:
        agent = engine.current
        rank, low = address >> RANK_SHIFT, (address & OFFSET_MASK) >> 3
        histogram = agent.block.counters
        shared = blank.get(count)
        values = shared[1] if shared and shared[0] is histogram else histogram[:count] + ARRIVED
        engine.at(max(agent.now, engine.now) + atomic_ns, added, (rank, low, values, agent.index, agent.now))
        agent.now += store_ns * -(-count // 128)

    def wait_counts_reduced(ctx: int, address: int, count: int, p: int) -> None:
        rank, low = address >> RANK_SHIFT, (address & OFFSET_MASK) >> 3
        words = vectors[rank][low : low + count]
        grid = engine.current.run.launch.grid
        # The last word first: it is the cheap half of the test.
        agent = wait(
            address,
            count,
            lambda w: w[-1] >> 32 == grid and bool((words >> 32 == grid).all()),
            p,
            f"{grid} blocks",
            lambda w: w >> 32 == grid,
        )
        agent.block.counters = words & LOW_HALF

    def counts_clear(address: int, count: int) -> None:
        agent = sync()
        agent.now += store_ns
        rank, low = address >> RANK_SHIFT, (address & OFFSET_MASK) >> 3
        vectors[rank][low : low + count] = 0
        if observer:
            observer("clear", rank, 8 * low, 8 * count, agent.index, engine.now, agent.run.exchange)

    def published(event: tuple[int, int, int, np.ndarray, int, float, int]) -> None:
        rank, rank_word, expert_word, values, agent, posted_ns, exchange = event
        vectors[rank][rank_word] = values[0]
        vectors[rank][expert_word : expert_word + len(values) - 1] = values[1:]
        changed(rank, rank_word, 1, agent, posted_ns)
        changed(rank, expert_word, len(values) - 1, agent, posted_ns)
        if observer:
            observer("set", rank, 8 * rank_word, 8, agent, engine.now, exchange)
            observer("set", rank, 8 * expert_word, 8 * len(values) - 8, agent, engine.now, exchange)

    def publish_counts(ctx: int, receivers: int, experts: int, rank_offset: int, expert_offset: int) -> None:
        agent = sync()
        encoded = -agent.block.counters - 1
        now = agent.now
        for time, peers in fabric.words(ctx, 0, receivers, now):
            for peer in peers:
                first = receivers + experts * peer
                values = np.concatenate((encoded[peer : peer + 1], encoded[first : first + experts]))
                event = (peer, rank_offset >> 3, expert_offset >> 3, values, agent.index, now, agent.run.exchange)
                engine.at(time, published, event)
        counters[ctx]["count_words"] += receivers * (1 + experts)
        agent.now += store_ns * -(-receivers * (1 + experts) // 128)

    def wait_counts(ctx: int, address: int, count: int, at: int, p: int) -> None:
        rank, low = address >> RANK_SHIFT, (address & OFFSET_MASK) >> 3
        words = vectors[rank][low : low + count]
        agent = wait(address, count, lambda _: bool(words.all()), p, "a count", lambda w: w != 0)
        decoded = -words - 1
        block = agent.block
        block.counters = decoded if at == 0 else np.concatenate((block.counters[:at], decoded))

    def prefix_counts(
        psum_rank: int, psum_expert: int, ranks: int, first: int, experts: int, alignment: int
    ) -> None:
        agent = sync()
        counters_ = agent.block.counters
        sources = ranks - first
        rows = np.concatenate((np.zeros(first, np.int64), counters_[:sources]))
        per_expert = counters_[sources:].reshape(sources, experts).sum(axis=0)
        aligned = (per_expert + alignment - 1) // alignment * alignment
        rank, at = psum_rank >> RANK_SHIFT, (psum_rank & OFFSET_MASK) >> 3
        vectors[rank][at : at + ranks] = np.cumsum(rows)
        at = (psum_expert & OFFSET_MASK) >> 3
        vectors[rank][at] = 0
        vectors[rank][at + 1 : at + 1 + experts] = np.cumsum(aligned)
        agent.now += profile.prefix_sum_ns

    def store_host_counts(host: int, ranks: int, first: int, experts: int, alignment: int) -> None:
        agent = sync()
        counts = agent.block.counters
        sources = ranks - first
        rows = np.concatenate((np.zeros(first, np.int64), counts[:sources]))
        per_expert = counts[sources:].reshape(sources, experts).sum(axis=0)
        aligned = (per_expert + alignment - 1) // alignment * alignment
        at = (host & OFFSET_MASK) >> 3
        vectors[host >> RANK_SHIFT][at : at + ranks + experts] = -np.concatenate((rows, aligned)) - 1
        agent.now += store_ns * -(-(ranks + experts) // 128)

    def find_row(psum_rank: int, ranks: int, bucket: int, row: int) -> int:
        agent = engine.current
        agent.now += load_ns
        at = (psum_rank & OFFSET_MASK) >> 3
        start = 0
        for source, end in enumerate(memory.i64[psum_rank >> RANK_SHIFT][at : at + ranks]):
            if row < end:
                return source * bucket + row - start
            start = end
        raise ProtocolError(f"{sim.describe_agent(agent)} looks for row {row} beyond the {start} rows received")

    _set(
        ops,
        check_routes,
        store_host_counts,
        count_routes,
        counts_add,
        wait_counts_reduced,
        counts_clear,
        publish_counts,
        wait_counts,
        prefix_counts,
        find_row,
    )


def _stage(sim: Any, ops: Any, sync: Any) -> None:
    engine, issue_ns, raw, i32 = sim.engine, sim.profile.issue_ns, sim.memory.bytes, sim.memory.i32
    lanes_format = {k: Struct(f"{k}i") for k in range(1, 33)}
    one = lanes_format[1].pack_into
    free: dict[int, list[Any]] = sim.stages

    def stage(index: int, row_bytes: int) -> Any:
        """A stage of its own until the agent ends: poisoned, or as an earlier agent left it, as shared memory is."""
        agent = engine.current
        pool = free.setdefault(row_bytes, [])
        row = agent.stage = pool.pop() if pool else memoryview(bytearray(b"\xff" * row_bytes))
        return row

    def stage_lanes(stage: Any, offset: int, lanes: list[int]) -> None:
        engine.current.now += issue_ns
        lanes_format[len(lanes)].pack_into(stage, offset, *lanes)

    def stage_i32(stage: Any, offset: int, value: int) -> None:
        engine.current.now += issue_ns
        one(stage, offset, value)

    def row_load_packs(stage: Any, offset: int, source: int, count: int) -> None:
        """Small beside the row: it arrives with it. Read at once, as nobody writes a source's own scales meanwhile."""
        engine.current.now += issue_ns
        at = source & OFFSET_MASK
        stage[offset : offset + 4 * count] = raw[source >> RANK_SHIFT][at : at + 4 * count]

    def packs_store(stage: Any, offset: int, count: int, destination: int, pack_stride: int) -> None:
        engine.current.now += issue_ns
        words, at = i32[destination >> RANK_SHIFT], (destination & OFFSET_MASK) >> 2
        packs = stage[offset : offset + 4 * count].cast("i")
        for p in range(count):
            words[at + p * pack_stride // 4] = packs[p]

    def packs_scatter(stage: Any, offset: int, count: int, base: int, slots: list[int], pack_stride: int) -> None:
        engine.current.now += issue_ns
        words, at = i32[base >> RANK_SHIFT], (base & OFFSET_MASK) >> 2
        packs = stage[offset : offset + 4 * count].cast("i")
        for slot in slots:
            if slot >= 0:
                for p in range(count):
                    words[at + slot + p * pack_stride // 4] = packs[p]

    def clear_row(address: int, size: int) -> None:
        sync()
        engine.current.now += issue_ns
        at = address & OFFSET_MASK
        raw[address >> RANK_SHIFT][at : at + size] = bytes(size)

    def stage_fence() -> None:
        engine.current.now += issue_ns

    _set(ops, stage, stage_lanes, stage_i32, stage_fence, row_load_packs, packs_store, packs_scatter, clear_row)


def _rows(sim: Any, ops: Any, sync: Any) -> None:
    engine, memory, fabric, profile = sim.engine, sim.memory, sim.fabric, sim.profile
    raw, arrays, data, observer = memory.bytes, memory.arrays, sim.data, sim.observer
    at_time, send, dram, sm_copy = engine.at, fabric.row, fabric.dram, fabric.sm_copy
    hidden = sim.plan.workload.hidden_bytes
    values = sim.plan.workload.dispatch_bytes
    issue_ns, load_latency, store_latency = profile.issue_ns, profile.bulk_load_ns, profile.bulk_store_local_ns
    copy_rate, reduce_rate = profile.sm_copy_bytes_per_ns, profile.sm_reduce_bytes_per_ns
    # A timing-only run moves what lies behind the values of a dispatched row, and nothing else: payload is told by
    # its size, unless a whole dispatch row happens to have that size.
    rows_with_metadata = {
        launch.constants.dispatch_row_bytes
        for exchange in sim.plan.exchanges
        for stream in exchange.streams
        for launch in stream
    }
    skipped = set() if data else {values, hidden} - rows_with_metadata
    skip = 0 if data else values

    def through_sm(agent: Any, size: int, now: float) -> float:
        """`size` bytes through the copy path of the agent's SM -> when the last has passed."""
        rates, sm = sm_copy[agent.rank], agent.block.sm
        free = rates[sm]
        done = (free if free > now else now) + size / copy_rate
        rates[sm] = done
        return done  # type: ignore[no-any-return]

    def row_load(stage: Any, source: int, size: int) -> None:
        agent = sync()
        now = agent.now
        done = dram(source >> RANK_SHIFT, size, now)
        rates, sm = sm_copy[agent.rank], agent.block.sm
        passed = rates[sm]
        passed = (passed if passed > now else now) + size / copy_rate
        rates[sm] = passed
        agent.load = (source, size, (done if done > passed else passed) + load_latency)
        agent.now = now + issue_ns

    def row_wait(stage: Any, parity: int) -> int:
        agent = engine.current
        source, size, done = agent.load
        if done > agent.now:
            agent.now = done
        sync()
        if size not in skipped:
            at = (source & OFFSET_MASK) + skip
            stage[skip:size] = raw[source >> RANK_SHIFT][at : at + size - skip]
        if observer:
            rank, offset = source >> RANK_SHIFT, source & OFFSET_MASK
            observer("read", rank, offset, size, agent.index, engine.now, agent.run.exchange)
        return parity ^ 1

    def landed(event: tuple[int, int, Any, int, int, int]) -> None:
        rank, offset, row, size, agent, exchange = event
        if size not in skipped:
            raw[rank][offset + skip : offset + size] = row[skip:size]
        if observer:
            observer("land", rank, offset, size, agent, engine.now, exchange)

    def store(agent: Any, row: Any, size: int, peer: int, offset: int) -> None:
        """One bulk store, posted now: the event at which it lands, and when the agent sees it complete."""
        rank = agent.rank
        now = agent.now
        passed = through_sm(agent, size, now)
        if peer == rank:
            written = dram(rank, size, now)
            lands = done = (written if written > passed else passed) + store_latency
        else:
            lands, done = send(rank, peer, size, passed, engine.now)
        if done > agent.stores_done:
            agent.stores_done = done
        agent.now += issue_ns
        if size not in skipped or observer:
            at_time(lands, landed, (peer, offset, row, size, agent.index, agent.run.exchange))

    def row_store(stage: Any, size: int, destination: int) -> None:
        store(sync(), stage, size, destination >> RANK_SHIFT, destination & OFFSET_MASK)

    def row_store_peers(ctx: int, stage: Any, size: int, ranks: list[int], offset: int, slots: list[int]) -> None:
        agent = sync()
        for lane, peer in enumerate(ranks):
            if peer >= 0:
                store(agent, stage, size, peer, offset + slots[lane] * size)

    def scattered(event: tuple[int, int, Any, int, list[int], int, int]) -> None:
        rank, offset, row, size, slots, agent, exchange = event
        memory_, bytes_ = raw[rank], row[:size]
        for slot in slots:
            if slot >= 0:
                at = offset + slot * size
                if data:
                    memory_[at : at + size] = bytes_
                if observer:
                    observer("land", rank, at, size, agent, engine.now, exchange)

    def row_scatter(stage: Any, size: int, base: int, slots: list[int]) -> None:
        agent = sync()
        rank = agent.rank
        total = (len(slots) - slots.count(-1)) * size
        written, passed = dram(rank, total, agent.now), through_sm(agent, total, agent.now)
        done = (written if written > passed else passed) + store_latency
        if done > agent.stores_done:
            agent.stores_done = done
        agent.now += issue_ns
        if data or observer:
            at_time(done, scattered, (rank, base & OFFSET_MASK, stage, size, slots, agent.index, agent.run.exchange))

    def stores_wait() -> None:
        agent = engine.current
        if agent.stores_done > agent.now:
            agent.now = agent.stores_done
            # The bulk engine reads the stage until then: no running ahead past it.
            sync()

    def lanes_landed(event: tuple[int, int, list[int], int, int]) -> None:
        rank, at, lanes, agent, exchange = event
        memory.i32[rank][at : at + len(lanes)] = array("i", lanes)
        if observer:
            observer("land", rank, 4 * at, 4 * len(lanes), agent, engine.now, exchange)

    def store_lanes_peer(address: int, lanes: list[int]) -> None:
        agent = sync()
        for time, peers in fabric.words(agent.rank, address >> RANK_SHIFT, 1, agent.now):
            at = (address & OFFSET_MASK) >> 2
            at_time(time, lanes_landed, (peers[0], at, lanes, agent.index, agent.run.exchange))
        agent.now += issue_ns

    halves = [array.view(np.uint16) for array in arrays]
    accumulator = np.empty(hidden // 2, np.float32)
    bits = accumulator.view(np.uint32)
    rounded = accumulator.view(np.uint16)[1::2]
    low_bit = np.empty(hidden // 2, np.uint32)
    # A BF16 value is the upper half of an FP32 one (the second half in little-endian order); the lower stays 0.
    addend, first_values = np.zeros(hidden // 2, np.float32), np.zeros(hidden // 2, np.float32)
    upper, first_upper = addend.view(np.uint16)[1::2], first_values.view(np.uint16)[1::2]
    shift, one, half = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
    add, right_shift, bitwise_and, frombuffer = np.add, np.right_shift, np.bitwise_and, np.frombuffer

    def reduce(row: Any, rank: int, starts: list[int], size: int) -> None:
        """Sum BF16 rows in FP32, in order, from the first (so one row is a copy and -0 stays -0); one rounding."""
        if not starts:
            row[:size] = bytes(size)
            return
        first = starts[0]
        if len(starts) == 1:
            row[:size] = raw[rank][first : first + size]
            return
        arena, n = halves[rank], size >> 1
        first, at = first >> 1, starts[1] >> 1
        first_upper[:] = arena[first : first + n]
        upper[:] = arena[at : at + n]
        add(first_values, addend, out=accumulator)
        for start in starts[2:]:
            at = start >> 1
            upper[:] = arena[at : at + n]
            add(accumulator, addend, out=accumulator)
        right_shift(bits, shift, out=low_bit)
        bitwise_and(low_bit, one, out=low_bit)
        add(low_bit, half, out=low_bit)
        add(bits, low_bit, out=bits)
        frombuffer(row, np.uint16, n)[:] = rounded

    in_flight, pass_bytes, gather_ns = profile.gather_in_flight_slots, profile.gather_pass_bytes, profile.gather_ns
    sm_reduce = fabric.sm_reduce

    def row_reduce(stage: Any, size: int, base: int, slots: list[int], stride: int, prefix: int) -> None:
        sum_rows(stage, size, base, slots, stride, prefix, [])

    def row_reduce_bias(
        stage: Any, size: int, base: int, slots: list[int], stride: int, prefix: int, bias0: int, bias1: int
    ) -> None:
        sum_rows(stage, size, base, slots, stride, prefix, [b & OFFSET_MASK for b in (bias0, bias1) if b])

    def sum_rows(
        row: Any, size: int, base: int, slots: list[int], stride: int, prefix: int, bias: list[int]
    ) -> None:
        agent = engine.current
        if agent.ready > agent.now:
            agent.now = agent.ready
        sync()
        now = agent.now
        rank, offset = base >> RANK_SHIFT, base & OFFSET_MASK
        starts = [offset + s * stride for s in slots if s >= 0]
        count = len(starts)
        if data:
            reduce(row, rank, bias + starts, size)
        if observer:
            for start in starts:
                observer("read", rank, start, size, agent.index, engine.now, agent.run.exchange)
        # The first `prefix` slots load without a branch, a few at a time; each later one waits for the one before.
        gathers = -(-min(count, prefix) // in_flight) + max(0, count - prefix)
        rates, sm = sm_reduce[agent.rank], agent.block.sm
        free = rates[sm]
        passed = (free if free > now else now) + count * size / reduce_rate
        rates[sm] = passed
        done = dram(rank, (count + len(bias)) * size, now)
        agent.now = (done if done > passed else passed) + gathers * gather_ns * -(-size // pass_bytes) + issue_ns

    _set(ops, row_load, row_wait, row_store, row_store_peers, row_scatter, stores_wait, store_lanes_peer)
    _set(ops, row_reduce, row_reduce_bias)
