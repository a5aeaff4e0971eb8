"""The discrete-event engine: one heap of events, tasks as greenlets with local clocks, deterministic.

A task runs plain Python and may let its own clock (`task.now`) run ahead of the engine's (`engine.now`) for as long as
it touches nothing that others see; `sync()` brings the two together. There is no scheduler greenlet on the hot path:
a task that has to wait runs the event loop itself and hands over to the next task directly, so an event costs a
switch only if it resumes another task, and a task whose own turn comes next costs none.

All times are nanoseconds. Equal times run in the order in which they were scheduled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heappushpop
from typing import Any

from greenlet import getcurrent, greenlet


class Task:
    """A function with a clock. Subclasses add what their machine needs; `now` may lie ahead of the engine's."""

    __slots__ = ("arguments", "function", "greenlet", "now")

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...], now: float) -> None:
        self.function = function
        self.arguments = arguments
        self.now = now
        self.greenlet: greenlet | None = None


class Engine:
    """Runs events and tasks until nothing is left.

    `current` is the running task; `on_end(task)` is called when a task's function has returned.
    """

    __slots__ = ("_due", "_hub", "_made", "_pool", "current", "heap", "now", "on_end", "sequence", "sync")

    def __init__(self, on_end: Callable[[Any], None] | None = None) -> None:
        self.heap: list[tuple[float, int, Callable[[Any], None] | None, Any]] = []
        self.now = 0.0
        self.sequence = 0
        self.current: Any = None
        self.on_end = on_end or (lambda _: None)
        self._pool: list[greenlet] = []
        self._made: list[greenlet] = []
        self._due: deque[Any] = deque()
        """Tasks whose common turn has come, before anything that is left in the heap."""
        self._hub = getcurrent()
        self.sync = self._make_sync()

    @property
    def events(self) -> int:
        """Events that have run."""
        return self.sequence - len(self.heap)

    def at(self, time: float, function: Callable[[Any], None], argument: Any) -> None:
        """Call `function(argument)` at `time`; it must not block."""
        self.sequence += 1
        heappush(self.heap, (time, self.sequence, function, argument))

    def start(self, task: Task, time: float | None = None) -> None:
        """Give `task` its first turn at `time` (its own clock where None)."""
        self.sequence += 1
        heappush(self.heap, (task.now if time is None else time, self.sequence, None, task))

    def wake(self, task: Task, time: float) -> None:
        """Resume a blocked `task` at `time`, which becomes its clock."""
        task.now = time
        self.sequence += 1
        heappush(self.heap, (time, self.sequence, None, task))

    def start_all(self, tasks: Sequence[Task], time: float) -> None:
        """`start` each of `tasks` at `time`, in this order: one event of the heap."""
        if tasks:
            self.sequence += len(tasks)
            heappush(self.heap, (time, self.sequence, self._due.extend, tasks))

    def wake_all(self, tasks: Sequence[Task], time: float) -> None:
        """`wake` each of `tasks` at `time`, in this order: one event of the heap."""
        for task in tasks:
            task.now = time
        self.start_all(tasks, time)

    def _make_sync(self) -> Callable[[], Any]:
        heap, due = self.heap, self._due

        def sync() -> Any:
            """Let everything due before the current task's clock happen, then return the task."""
            me = self.current
            time = me.now
            if time <= self.now:
                return me
            if due:
                self.sequence += 1
                heappush(heap, (time, self.sequence, None, me))
                argument = due.popleft()
            elif not heap or heap[0][0] > time:
                self.now = time
                return me
            else:
                self.sequence += 1
                self.now, _, function, argument = heappushpop(heap, (time, self.sequence, None, me))
                while function is not None:
                    function(argument)
                    if due:
                        argument = due.popleft()
                        break
                    self.now, _, function, argument = heappop(heap)
            self.current = argument
            if argument is not me:
                target = argument.greenlet
                if target is None:
                    target = self._greenlet_for(argument)
                target.switch()
                # Back: whoever switched here has popped this task's turn and made it current.
            return me

        return sync

    def _greenlet_for(self, task: Any) -> greenlet:
        """A parked greenlet, or the hub, which makes one: a new greenlet starts at its maker's recursion depth."""
        task.greenlet = self._pool.pop() if self._pool else self._hub
        return task.greenlet

    def block(self) -> None:
        """Suspend the current task until it is woken: run what is due, hand over to whoever is next."""
        heap, due = self.heap, self._due
        me = self.current
        while heap or due:
            if due:
                argument = due.popleft()
            else:
                self.now, _, function, argument = heappop(heap)
                if function is not None:
                    function(argument)
                    continue
            self.current = argument
            if argument is not me:
                target = argument.greenlet
                if target is None:
                    target = self._greenlet_for(argument)
                target.switch()
            return
        self._hub.switch()

    def run(self) -> float:
        """Run until no event is left -> the time. Tasks still blocked then will never run: ask the machine why."""
        hub = self._hub = getcurrent()
        heap, due = self.heap, self._due
        while heap or due:
            if due:
                argument = due.popleft()
            else:
                self.now, _, function, argument = heappop(heap)
                if function is not None:
                    function(argument)
                    continue
            self.current = argument
            if argument.greenlet is None:
                argument.greenlet = self._pool.pop() if self._pool else self._new()
            argument.greenlet.switch()
            while self.current.greenlet is hub:
                # A blocked task handed over to one that needs a greenlet, and none was parked.
                self.current.greenlet = self._new()
                self.current.greenlet.switch()
        return self.now

    def close(self) -> None:
        """End every greenlet. A suspended one keeps all that it refers to, and no cycle collector looks inside."""
        for made in self._made:
            if made:
                made.throw()
        self._made.clear()
        self._pool.clear()

    def _new(self) -> greenlet:
        made = greenlet(self._work, self._hub)
        self._made.append(made)
        return made

    def _work(self) -> None:
        """Run the current task to its end, then the event loop until the next task without a greenlet of its own."""
        heap, due, pool, me = self.heap, self._due, self._pool, getcurrent()
        while True:
            task = self.current
            task.function(*task.arguments)
            self.on_end(task)
            while heap or due:
                if due:
                    argument = due.popleft()
                else:
                    self.now, _, function, argument = heappop(heap)
                    if function is not None:
                        function(argument)
                        continue
                self.current = argument
                target = argument.greenlet
                if target is None:
                    argument.greenlet = me
                else:
                    pool.append(me)
                    target.switch()
                break
            else:
                pool.append(me)
                self._hub.switch()
