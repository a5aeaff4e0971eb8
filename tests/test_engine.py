"""The discrete-event engine alone: order, clocks, blocking, handing over, exceptions, depth, determinism."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from afdep_sim.model.engine import Engine, Task


def start(engine: Engine, function: Callable[..., None], *arguments: Any, at: float = 0.0) -> Task:
    task = Task(function, arguments, at)
    engine.start(task)
    return task


# ---- order -----------------------------------------------------------------------------------------------------------


def test_events_run_by_time_and_equal_times_in_the_order_of_scheduling() -> None:
    engine, log = Engine(), []
    for time, name in ((5.0, "a"), (1.0, "b"), (5.0, "c"), (1.0, "d"), (0.0, "e"), (5.0, "f")):
        engine.at(time, log.append, (time, name))
    assert engine.run() == 5.0
    assert log == [(0.0, "e"), (1.0, "b"), (1.0, "d"), (5.0, "a"), (5.0, "c"), (5.0, "f")]
    assert engine.events == 6


def test_events_and_tasks_of_one_time_run_in_the_order_of_scheduling() -> None:
    engine, log = Engine(), []
    engine.at(3.0, log.append, "event 1")
    start(engine, log.append, "task 1", at=3.0)
    engine.at(3.0, log.append, "event 2")
    start(engine, log.append, "task 2", at=3.0)
    engine.run()
    assert log == ["event 1", "task 1", "event 2", "task 2"]


def test_an_event_may_schedule_more_for_the_time_it_runs_at() -> None:
    engine, log = Engine(), []

    def first(name: str) -> None:
        log.append(name)
        engine.at(engine.now, log.append, "second")

    engine.at(2.0, first, "first")
    engine.at(2.0, log.append, "beside")
    engine.at(2.5, log.append, "later")
    engine.run()
    assert log == ["first", "beside", "second", "later"]


def test_a_first_turn_may_come_later_than_the_tasks_own_clock() -> None:
    engine, seen = Engine(), []
    task = Task(lambda: seen.append((engine.now, engine.current.now)), (), 4.0)
    engine.start(task, 9.0)
    assert engine.run() == 9.0
    assert seen == [(9.0, 4.0)]


def test_nothing_to_run_takes_no_time() -> None:
    engine = Engine()
    assert engine.run() == 0.0
    assert engine.events == 0


# ---- local clocks ----------------------------------------------------------------------------------------------------


def test_a_local_clock_runs_ahead_until_sync() -> None:
    engine, log = Engine(), []

    def task() -> None:
        engine.current.now += 10.0
        log.append(("ahead", engine.now))
        engine.sync()
        log.append(("synced", engine.now))

    start(engine, task)
    engine.at(5.0, log.append, "event at 5")
    engine.at(10.0, log.append, "event at 10")
    engine.at(10.5, log.append, "event at 10.5")
    engine.run()
    assert log == [("ahead", 0.0), "event at 5", "event at 10", ("synced", 10.0), "event at 10.5"]


def test_sync_returns_the_running_task_and_does_nothing_behind_the_engine() -> None:
    engine, log = Engine(), []

    def task() -> None:
        engine.at(engine.now, log.append, "due now")
        assert engine.sync() is mine
        log.append("not behind")
        mine.now = 1.0
        assert engine.sync() is mine
        assert engine.now == 1.0

    mine = start(engine, task)
    engine.run()
    assert log == ["not behind", "due now"]


def test_synced_tasks_touch_shared_things_in_global_time_order() -> None:
    engine, log = Engine(), []

    def task(name: str, *steps: float) -> None:
        for step in steps:
            engine.current.now += step
            engine.sync()
            log.append((engine.now, name))

    start(engine, task, "a", 2.0, 2.0, 2.0)
    start(engine, task, "b", 3.0, 1.0, 5.0)
    start(engine, task, "c", 0.5, 8.0)
    engine.run()
    assert log == [
        (0.5, "c"), (2.0, "a"), (3.0, "b"), (4.0, "a"), (4.0, "b"), (6.0, "a"), (8.5, "c"), (9.0, "b"),
    ]  # fmt: skip


# ---- blocking and waking ---------------------------------------------------------------------------------------------


def test_a_blocked_task_resumes_at_the_time_it_is_woken_for() -> None:
    engine, log = Engine(), []

    def sleeper() -> None:
        engine.current.now = 1.0
        engine.block()
        log.append((engine.now, engine.current.now, engine.current is task))

    task = start(engine, sleeper)
    engine.at(4.0, lambda _: engine.wake(task, 7.5), None)
    assert engine.run() == 7.5
    assert log == [(7.5, 7.5, True)]


def test_the_baton_goes_round_in_order() -> None:
    engine, log = Engine(), []
    rounds, size = 5, 4
    ring: list[Task] = []

    def runner(place: int) -> None:
        for lap in range(rounds):
            if lap or place:
                engine.block()
            log.append((lap, place))
            if (lap, place) != (rounds - 1, size - 1):
                engine.wake(ring[(place + 1) % size], engine.now + 1.0)

    ring += [start(engine, runner, place) for place in range(size)]
    assert engine.run() == rounds * size - 1
    assert log == [(lap, place) for lap in range(rounds) for place in range(size)]


def test_tasks_that_start_others_go_on_before_those_run() -> None:
    engine, log = Engine(), []

    def task(name: str, depth: int) -> None:
        log.append(f"{name} begins")
        if depth:
            for child in "lr":
                start(engine, task, name + child, depth - 1, at=engine.now)
        log.append(f"{name} ends")

    start(engine, task, "t", 2)
    engine.run()
    names = ["t", "tl", "tr", "tll", "tlr", "trl", "trr"]
    assert log == [f"{name} {what}" for name in names for what in ("begins", "ends")]


def test_a_task_can_start_another_and_wait_for_it() -> None:
    engine, log = Engine(), []

    def child(parent: Task, depth: int) -> None:
        engine.current.now += 1.0
        engine.sync()
        if depth:
            start(engine, child, engine.current, depth - 1, at=engine.now)
            engine.block()
        log.append((depth, engine.now))
        engine.wake(parent, engine.now)

    def root() -> None:
        start(engine, child, engine.current, 3)
        engine.block()
        log.append(("root", engine.now))

    start(engine, root)
    engine.run()
    assert log == [(0, 4.0), (1, 4.0), (2, 4.0), (3, 4.0), ("root", 4.0)]


def test_tasks_that_nobody_wakes_are_left_and_do_not_end() -> None:
    ended: list[Task] = []
    engine = Engine(ended.append)
    blocked = start(engine, engine.block)
    done = start(engine, lambda: None)
    assert engine.run() == 0.0
    assert ended == [done]
    engine.wake(blocked, 3.0)
    assert engine.run() == 3.0
    assert ended == [done, blocked]


def test_on_end_sees_every_task_once_in_the_order_of_its_end() -> None:
    ended: list[tuple[float, Task]] = []
    engine = Engine(lambda task: ended.append((engine.now, task)))

    def work(time: float) -> None:
        engine.current.now = time
        engine.sync()

    tasks = {time: start(engine, work, time) for time in (3.0, 1.0, 2.0)}
    engine.run()
    assert ended == [(time, tasks[time]) for time in (1.0, 2.0, 3.0)]


# ---- exceptions ------------------------------------------------------------------------------------------------------


class Planned(Exception):
    """What the tests raise."""


def raise_planned(*_: Any) -> None:
    raise Planned("as planned")


def raise_after_sync(engine: Engine) -> None:
    engine.current.now += 5.0
    engine.sync()
    raise_planned()


def raise_after_block(engine: Engine) -> None:
    engine.at(engine.now + 5.0, lambda task: engine.wake(task, engine.now), engine.current)
    engine.block()
    raise_planned()


def raise_in_child(engine: Engine) -> None:
    start(engine, raise_after_block, engine, at=engine.now)
    engine.block()


def raise_in_event(engine: Engine) -> None:
    engine.at(engine.now + 1.0, raise_planned, None)
    engine.block()


@pytest.mark.parametrize(
    "culprit", [raise_planned, raise_after_sync, raise_after_block, raise_in_child, raise_in_event]
)
@pytest.mark.parametrize("others", [0, 3])
def test_an_exception_in_a_task_surfaces_in_run(culprit: Callable[[Engine], None], others: int) -> None:
    engine, ended = Engine(), []
    engine.on_end = ended.append
    for _ in range(others):
        start(engine, engine.block)
    start(engine, culprit, engine)
    start(engine, lambda: None)
    with pytest.raises(Planned, match="as planned"):
        engine.run()
    assert len(ended) <= 1
    after = Engine()
    log: list[str] = []
    start(after, log.append, "a fresh engine runs")
    after.run()
    assert log


# ---- thousands of tasks ----------------------------------------------------------------------------------------------

MANY = 5000


def test_thousands_of_tasks_block_at_once() -> None:
    engine, ended = Engine(), []
    engine.on_end = ended.append
    tasks = [start(engine, engine.block) for _ in range(MANY)]
    start(engine, lambda: [engine.wake(task, 2.0) for task in reversed(tasks)])
    assert engine.run() == 2.0
    assert ended[1:] == tasks[::-1]


def test_thousands_of_tasks_start_one_another_without_deep_recursion() -> None:
    engine, log = Engine(), []
    assert sys.getrecursionlimit() < MANY, "the test would prove nothing"

    def task(number: int, parent: Task | None) -> None:
        if number < MANY:
            start(engine, task, number + 1, engine.current, at=engine.now + 1.0)
            engine.block()
        log.append(number)
        if parent is not None:
            engine.wake(parent, engine.now)

    start(engine, task, 1, None)
    assert engine.run() == MANY - 1
    assert log == list(range(MANY, 0, -1))


def test_thousands_of_tasks_hand_over_at_their_end_without_deep_recursion() -> None:
    engine, ended = Engine(), []
    engine.on_end = ended.append

    def task(number: int) -> None:
        engine.current.now += number % 3
        engine.sync()
        if number < MANY:
            start(engine, task, number + 1, at=engine.now)

    start(engine, task, 1)
    engine.run()
    assert len(ended) == MANY


# ---- determinism -----------------------------------------------------------------------------------------------------


def random_program(seed: int) -> tuple[list[tuple[float, int, str]], float, int]:
    """Tasks that advance, sync, block, wake one another and start more, as a seed says; what each did when."""
    rng, engine, log = random.Random(seed), Engine(), []
    blocked: list[Task] = []

    def note(number: int, what: str) -> None:
        log.append((engine.now, number, what))

    def task(number: int) -> None:
        for _ in range(rng.randrange(1, 8)):
            engine.current.now += rng.choice((0.0, 0.5, 1.0, 1.0, 7.25))
            me = engine.sync()
            assert engine.now == me.now, f"seed {seed}: the clocks differ after sync"
            note(number, "sync")
            choice = rng.random()
            if choice < 0.25:
                blocked.append(me)
                engine.block()
                assert engine.current is me, f"seed {seed}: another task is current after block"
                note(number, "woken")
            elif choice < 0.6 and blocked:
                engine.wake(blocked.pop(rng.randrange(len(blocked))), engine.now + rng.choice((0.0, 1.0, 2.0)))
            elif choice < 0.7 and len(started) < 200:
                started.append(len(started))
                start(engine, task, started[-1], at=engine.now + rng.choice((0.0, 3.0)))

    started = list(range(20))
    for number in started[:]:
        start(engine, task, number)
    return log, engine.run(), engine.events


@pytest.mark.parametrize("seed", range(8))
def test_a_program_runs_the_same_twice_and_in_order_of_time(seed: int) -> None:
    log, end, events = random_program(seed)
    assert random_program(seed) == (log, end, events), f"seed {seed}: the second run differs"
    times = [time for time, _, _ in log]
    assert times == sorted(times), f"seed {seed}: time goes back"
    assert len(log) > 40
