"""The vocabulary in the model, part one: who, marks, synchronisation, words and lanes. `rows.py` has the rest.

Each operation charges time to its agent's clock, moves bytes, and may hand over to another agent. What others can
see (words that are ever cleared, counters that give out slots, queues) is touched in global time order: `sync()`.
"""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import Any

from afdep_sim.kernels import phases
from afdep_sim.model.memory import OFFSET_MASK, RANK_SHIFT, Waiter
from afdep_sim.model.rows import RouteError, add_rows, wrong_route
from afdep_sim.window import WORD_OFFSETS

BARRIER_WORDS_END = WORD_OFFSETS["barrier_signals"] + 16
"""Signals below this offset are calls of the all-rank barrier."""


def make_ops(sim: Any) -> ModuleType:
    """The operations bound to one simulation, as a module object: what kernel factories receive as `ops`."""
    ops = ModuleType("ops")
    sync = sim.engine.sync
    for part in (_who, _synchronisation, _words, _lanes):
        part(sim, ops, sync)
    add_rows(sim, ops, sync)
    return ops


def _who(sim: Any, ops: Any, sync: Any) -> None:
    engine, marks, at_time = sim.engine, sim.marks, sim.engine.at

    def device(function: Any) -> Any:
        return function

    def block_id() -> int:
        return engine.current.block.id  # type: ignore[no-any-return]

    def warp_id() -> int:
        return engine.current.warp  # type: ignore[no-any-return]

    def blocks() -> int:
        return engine.current.run.launch.grid  # type: ignore[no-any-return]

    def warps() -> int:
        return engine.current.run.launch.warps  # type: ignore[no-any-return]

    def phase(ctx: int, p: int) -> None:
        agent = engine.current
        if agent.index >= 0:
            marks.append((agent.index, p, agent.now))

    def launch_dependents() -> None:
        agent = engine.current
        following = agent.run.next
        if following is not None and following.launch.programmatic and not agent.block.triggered:
            if agent.now > engine.now:
                at_time(agent.now, sim.trigger, agent.block)
            else:
                sim.trigger(agent.block)

    def wait_dependencies(ctx: int) -> None:
        agent = sync()
        run = agent.run
        if not run.primary.complete:
            run.waiting.append(agent)
            engine.block()
        elif agent.now < run.ready_ns:
            sim.joins_primary(agent)
            agent.now = run.ready_ns
            sync()

    _add(ops, device, block_id, warp_id, blocks, warps, phase, launch_dependents, wait_dependencies)


def _synchronisation(sim: Any, ops: Any, sync: Any) -> None:
    engine, marks, joins, profile = sim.engine, sim.marks, sim.joins, sim.profile
    i64 = sim.memory.i64
    block_sync_ns, grid_sync_ns, group_sync_ns = profile.block_sync_ns, profile.grid_sync_ns, profile.group_sync_ns

    def earlier(index: int, other: int) -> bool:
        """Of agents that arrive together, the first traced one is called the last to arrive."""
        return index >= 0 and (other < 0 or index < other)

    def release(kind: str, waiting: list[Any], last: int, arrived_ns: float, time: float) -> None:
        """Let everyone out at `time`; the last to arrive (index `last`) is what they waited for."""
        current = engine.current
        for agent in waiting:
            if agent.index >= 0:
                joins.append((agent.index, time, kind, last, arrived_ns))
        if len(waiting) > 1:
            waiting.remove(current)
            engine.wake_all(waiting, time)
        current.now = time

    def block_sync(ctx: int, p: int) -> None:
        agent = engine.current
        block = agent.block
        if agent.index >= 0:
            marks.append((agent.index, p, agent.now))
        now, index = agent.now, agent.index
        if block.agents == 1:
            agent.now = now + block_sync_ns
            if index >= 0:
                joins.append((index, agent.now, "block", index, now))
            return
        if now > block.arrived_ns or (now == block.arrived_ns and earlier(index, block.last)):
            block.arrived_ns = now
            block.last = index
        block.waiting.append(agent)
        if len(block.waiting) < block.agents:
            engine.block()
            return
        waiting, block.waiting = block.waiting, []
        arrived_ns, last = block.arrived_ns, block.last
        block.arrived_ns, block.last = 0.0, -1
        release("block", waiting, last, arrived_ns, arrived_ns + block_sync_ns)

    def group_sync() -> None:
        engine.current.now += group_sync_ns

    def grid_sync(ctx: int, word: int, p: int) -> None:
        agent = engine.current
        run = agent.run
        if agent.index >= 0:
            marks.append((agent.index, p, agent.now))
        now, index = agent.now, agent.index
        if now > run.grid_arrived or (now == run.grid_arrived and earlier(index, run.grid_last)):
            run.grid_arrived = now
            run.grid_last = index
        run.grid_waiting.append(agent)
        if len(run.grid_waiting) < run.live_agents:
            engine.block()
            return
        i64[word >> RANK_SHIFT][(word & OFFSET_MASK) >> 3] += run.launch.grid
        waiting, run.grid_waiting = run.grid_waiting, []
        arrived_ns, last = run.grid_arrived, run.grid_last
        run.grid_arrived, run.grid_last = 0.0, -1
        release("grid", waiting, last, arrived_ns, arrived_ns + grid_sync_ns)

    _add(ops, block_sync, group_sync, grid_sync)


def _words(sim: Any, ops: Any, sync: Any) -> None:
    engine, memory, fabric, profile = sim.engine, sim.memory, sim.fabric, sim.profile
    marks, joins, counters, observer = sim.marks, sim.joins, sim.counters, sim.observer
    at_time = engine.at
    i64, i32, writers, waiters, satisfied = memory.i64, memory.i32, memory.writers, memory.waiters, memory.satisfied
    load_ns, store_ns, atomic_ns, poll_ns, issue_ns = (
        profile.load_ns,
        profile.store_word_ns,
        profile.atomic_ns,
        profile.poll_ns,
        profile.issue_ns,
    )

    def load_relaxed(address: int) -> int:
        agent = sync()
        agent.now += load_ns
        return i64[address >> RANK_SHIFT][(address & OFFSET_MASK) >> 3]  # type: ignore[no-any-return]

    def store_relaxed(address: int, value: int) -> None:
        agent = sync()
        agent.now += store_ns
        i64[address >> RANK_SHIFT][(address & OFFSET_MASK) >> 3] = value

    def clear_words(address: int, count: int) -> None:
        agent = sync()
        agent.now += store_ns
        rank, low = address >> RANK_SHIFT, (address & OFFSET_MASK) >> 3
        i64[rank][low : low + count] = array("q", bytes(8 * count))
        if observer:
            observer("clear", rank, 8 * low, 8 * count, agent.index, engine.now, agent.run.exchange)

    def fetch_add_acq_rel(address: int, value: int) -> int:
        agent = sync()
        agent.now += atomic_ns
        words, at = i64[address >> RANK_SHIFT], (address & OFFSET_MASK) >> 3
        before = words[at]
        words[at] = before + value
        return before  # type: ignore[no-any-return]

    def changed(rank: int, low: int, count: int, agent: int, posted_ns: float) -> None:
        """Words [low, low + count) of `rank` have just changed: note the writer, wake whom it satisfies."""
        writers[rank][low] = (count, agent, posted_ns)
        if waiters[rank]:
            for waiter in satisfied(rank, low, low + count):
                task = waiter.task
                # Its first look takes a load; only then does it poll.
                time = max(engine.now + poll_ns, task.now + load_ns)
                if task.index >= 0:
                    joins.append((task.index, time, "signal", agent, posted_ns))
                engine.wake(task, time)

    def added(event: tuple[list[int], int, int, int, float, int]) -> None:
        ranks, word, value, agent, posted_ns, exchange = event
        for rank in ranks:
            i64[rank][word] += value
            changed(rank, word, 1, agent, posted_ns)
            if observer:
                observer("set", rank, 8 * word, 8, agent, engine.now, exchange)

    def add_release_each(ctx: int, first: int, count: int, offset: int, value: int) -> None:
        agent = sync()
        now = agent.now
        for time, peers in fabric.words(ctx, first, count, now):
            at_time(time, added, (peers, offset >> 3, value, agent.index, now, agent.run.exchange))
        counters[ctx]["signals"] += count
        if offset < BARRIER_WORDS_END:
            counters[ctx]["barriers"] += 1
        agent.now += store_ns

    def wait(address: int, count: int, test: Any, p: int, wanted: Any, holds: Any) -> Any:
        """Block until `test(words)`; charges a load, or a poll after the write that ends it."""
        agent = sync()
        if agent.index >= 0:
            marks.append((agent.index, p, agent.now))
        rank, low = address >> RANK_SHIFT, (address & OFFSET_MASK) >> 3
        if test(i64[rank][low : low + count]):
            agent.now += load_ns
            return agent
        waiters[rank].append(Waiter(low, low + count, test, agent, phases.NAMES[p], wanted, holds))
        engine.block()
        return agent

    def wait_each_ge(ctx: int, address: int, count: int, value: int, p: int) -> None:
        wait(address, count, lambda words: min(words) >= value, p, f">= {value}", lambda w: w >= value)

    def wait_eq(ctx: int, address: int, value: int, p: int) -> None:
        wait(address, 1, lambda words: words[0] == value, p, f"== {value}", lambda w: w == value)

    def peer(ctx: int, rank: int) -> int:
        return rank << RANK_SHIFT

    def load_i32(address: int) -> int:
        agent = engine.current
        agent.ready = agent.now + load_ns
        agent.now += issue_ns
        return i32[address >> RANK_SHIFT][(address & OFFSET_MASK) >> 2]  # type: ignore[no-any-return]

    def store_i32(address: int, value: int) -> None:
        engine.current.now += issue_ns
        i32[address >> RANK_SHIFT][(address & OFFSET_MASK) >> 2] = value

    sim.wait, sim.changed = wait, changed
    _add(
        ops,
        load_relaxed,
        store_relaxed,
        clear_words,
        fetch_add_acq_rel,
        add_release_each,
        wait_each_ge,
        wait_eq,
        peer,
        load_i32,
        store_i32,
    )


def _lanes(sim: Any, ops: Any, sync: Any) -> None:
    engine, profile = sim.engine, sim.profile
    i64, i32 = sim.memory.i64, sim.memory.i32
    load_ns, atomic_ns, issue_ns = profile.load_ns, profile.atomic_ns, profile.issue_ns

    def load_lanes(address: int, count: int) -> list[int]:
        agent = engine.current
        agent.ready = agent.now + load_ns
        agent.now += issue_ns
        at = (address & OFFSET_MASK) >> 2
        return i32[address >> RANK_SHIFT][at : at + count].tolist()  # type: ignore[no-any-return]

    def load_ids(address: int, count: int) -> list[int]:
        agent = engine.current
        agent.ready = agent.now + load_ns
        agent.now += issue_ns
        at = (address & OFFSET_MASK) >> 3
        return i64[address >> RANK_SHIFT][at : at + count].tolist()  # type: ignore[no-any-return]

    def check_lanes(ctx: int, expert: list[int], token: int, experts: int) -> None:
        agent = engine.current
        if agent.ready > agent.now:
            agent.now = agent.ready
        agent.now += issue_ns
        if wrong := wrong_route(expert, experts):
            raise RouteError(f"{sim.describe_agent(agent)}: token {token} {wrong}")

    def store_lanes(address: int, lanes: list[int]) -> None:
        engine.current.now += issue_ns
        at = (address & OFFSET_MASK) >> 2
        i32[address >> RANK_SHIFT][at : at + len(lanes)] = array("i", lanes)

    def lanes_scatter(base: int, index: list[int], lanes: list[int]) -> None:
        engine.current.now += issue_ns
        words, at = i32[base >> RANK_SHIFT], (base & OFFSET_MASK) >> 2
        for lane, i in enumerate(index):
            if i >= 0:
                words[at + i] = lanes[lane]

    def lanes_owner(expert: list[int], experts: int) -> list[int]:
        owner, seen = [-1] * len(expert), 0
        for lane in range(len(expert) - 1, -1, -1):
            e = expert[lane]
            if e >= 0:
                rank = e // experts
                bit = 1 << rank
                if not seen & bit:
                    seen |= bit
                    owner[lane] = rank
        return owner

    def lanes_divide(lanes: list[int], divisor: int) -> list[int]:
        return [v // divisor if v >= 0 else -1 for v in lanes]

    def lanes_master(lanes: list[int]) -> list[int]:
        highest = {value: lane for lane, value in enumerate(lanes)}
        return [highest[v] if v >= 0 else -1 for v in lanes]

    def lanes_index(lanes: list[int]) -> list[int]:
        return [lane if v >= 0 else -1 for lane, v in enumerate(lanes)]

    def lanes_gather(base: int, index: list[int], stride: int) -> list[int]:
        agent = engine.current
        agent.ready = agent.now + load_ns
        agent.now += issue_ns
        words, offset = i32[base >> RANK_SHIFT], base & OFFSET_MASK
        return [words[(offset + i * stride >> 2) + lane] if i >= 0 else 0 for lane, i in enumerate(index)]

    def lanes_in_range(lanes: list[int], low: int, count: int) -> list[int]:
        return [v - low if low <= v < low + count else -1 for v in lanes]

    def lanes_offset(lanes: list[int], offset: int) -> list[int]:
        return [v + offset if v >= 0 else -1 for v in lanes]

    def lanes_highest(lanes: list[int]) -> int:
        for lane in range(len(lanes) - 1, -1, -1):
            if lanes[lane] >= 0:
                return lane
        return -1

    def lanes_count(lanes: list[int]) -> int:
        agent = engine.current
        if agent.ready > agent.now:
            agent.now = agent.ready
        return len(lanes) - lanes.count(-1)

    def lanes_max(lanes: list[int]) -> int:
        return max(lanes)

    def lanes_fetch_add(address: int, index: list[int]) -> list[int]:
        agent = engine.current
        if agent.ready > agent.now:
            agent.now = agent.ready
        sync()
        agent.now += atomic_ns
        words, at = i64[address >> RANK_SHIFT], (address & OFFSET_MASK) >> 3
        taken = []
        for i in index:
            if i < 0:
                taken.append(-1)
            else:
                value = words[at + i]
                words[at + i] = value + 1
                taken.append(value)
        return taken

    _add(
        ops,
        load_lanes,
        load_ids,
        check_lanes,
        store_lanes,
        lanes_scatter,
        lanes_owner,
        lanes_divide,
        lanes_master,
        lanes_index,
        lanes_gather,
        lanes_in_range,
        lanes_offset,
        lanes_highest,
        lanes_count,
        lanes_max,
        lanes_fetch_add,
    )


def _add(ops: Any, *functions: Any) -> None:
    for function in functions:
        setattr(ops, function.__name__, function)
