"""Threads of which exactly one runs: each belongs to a simulated rank, and gives up its turn only where it waits.

One run is one order: the next thread is the one that has been ready longest, or one that a seed draws. A wait is a
function that says whether it is over; it is asked where no thread is ready. Time is simulated too: where all wait, the
clock jumps to the first moment for which one waits. Where none does, no rank can go on, and that is an error at once.
"""

from __future__ import annotations

import functools
import math
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from distwrap import simulated
from distwrap.errors import DeadlockError
from distwrap.supervision import stacks
from distwrap.testing.simulation.process_state import Process

_MOMENTS = 5000  # of the clock, after which ranks that only look again and again count as stuck
_INTERRUPT_SECONDS = 5.0  # for the thread whose turn it is to come to a wait after Ctrl-C

_FILES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_PATHS = (str, bytes, os.PathLike)

Words = str | Callable[[], str]
# Takes a rank, the number of its event, from 1, and the event in words; returns "die", an exception that the event
# raises, a number of seconds by which the rank is late, or None.
FailAt = Callable[[int, int, str], Any]
Fail = tuple[int, int] | FailAt


class Cancelled(BaseException):
    """Raised in a rank where it waits, once the run has failed elsewhere."""


class Condition(threading.Condition):
    """Condition for which threads of one rank wait, without a lock: nothing changes within a turn."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler, self._told = scheduler, 0

    def wait(self, timeout: float | None = None) -> bool:
        before = self._told
        return self._scheduler.wait(lambda: self._told > before, "a thread of its own", timeout)

    def notify_all(self) -> None:
        self._told += 1

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None: ...


class Task(threading.Thread):
    """Thread of a simulated rank. Python's own begins with its first turn; a main thread may be one that runs already.

    Attributes:
        turn: a lock that is free while the thread may go on.
        thread_id: of the thread that it is, once that runs.
        is_over: returns whether what it waits for has come.
        waits_for: in words, or a function that returns them.
        until: at this moment of the clock its wait ends.
        has_ended: whether its body has returned or raised.
    """

    def __init__(self, scheduler: Scheduler, rank: Process, body: Callable[[], object], name: str = "") -> None:
        super().__init__(name=name or f"rank {rank.number}", daemon=True)
        self.scheduler, self.rank, self.body, self.is_main = scheduler, rank, body, not name
        self.turn: Any = threading.Lock()
        self.turn.acquire()
        self.thread_id: int | None = None
        self.is_over: Callable[[], bool] = bool
        self.waits_for: Words = ""
        self.until, self.has_ended = math.inf, False

    def start(self) -> None:
        self.scheduler.tasks.append(self)
        self.scheduler.ready.append(self)

    def run(self) -> None:
        scheduler = self.scheduler
        self.thread_id = threading.get_ident()
        scheduler.here.task = self
        scheduler.until(self.turn.acquire)
        try:
            if not scheduler.ends:
                self.body()
        except BaseException as error:  # noqa: BLE001 - of what ends a rank
            scheduler.fail(error, self)
        finally:
            self.has_ended = True
            scheduler.here.task = None
            scheduler.pass_on()

    def join(self, timeout: float | None = None) -> None:
        self.scheduler.wait(lambda: self.has_ended, "a thread of its own", timeout)

    def is_alive(self) -> bool:
        return self in self.scheduler.tasks and not self.has_ended

    def __str__(self) -> str:
        """For what a rank waits, and where it is."""
        name = f"rank {self.rank.number}"
        if self.rank.is_dead or self.has_ended:
            return f"{name} was killed" if self.rank.is_dead else f"{name} has returned"
        where = stacks.locate(stacks.of_thread(self.thread_id))[1] if self.thread_id else ""
        words = self.waits_for() if callable(self.waits_for) else self.waits_for
        return f"{name} {f'waits for {words}' if words else 'is'}{f' at {where}' if where else ''}"


class Scheduler:
    """Scheduler of the threads of one simulation.

    Args:
        seed: draws the order; ``None`` for the order in which threads became ready.
        fault: what fails; operations on files are events then too. See `simulate`.

    Attributes:
        tasks: all threads.
        ready: those that wait for nothing but their turn.
        here: each thread's own task.
        ends: whether each thread is told, where it waits, that it is to end.
        failure: why the run ends before all have returned.
        failed: the task that has raised it; ``None`` where no rank can go on.
        slept: simulated seconds in which all have waited for a moment.
    """

    def __init__(self, seed: int | None, fault: Fail | None) -> None:
        self.tasks: list[Task] = []
        self.ready: deque[Task] = deque()
        self.here = threading.local()
        self.ends = False
        self.failure: BaseException | None = None
        self.failed: Task | None = None
        self.slept = 0.0
        self.fault = fault
        if fault is not None:
            _watch_files()
        self._random = None if seed is None else random.Random(seed)
        self._waiting: dict[Task, None] = {}  # in the order in which they began
        self._passed = 0  # moments since a main thread was woken by another thread
        self._is_over = threading.Event()
        self._active: Process | None = None

    def current(self) -> Task | None:
        """Return the task of this thread; ``None`` in a thread of which the simulation knows nothing."""
        return getattr(self.here, "task", None)

    def run(self, *, first_here: bool) -> None:
        """Run all threads until the last has ended, or none can go on.

        Args:
            first_here: whether the first thread is this one, which gets signals.
        """
        if first_here:
            self.tasks[0].thread_id = threading.get_ident()
        self.pass_on()
        if first_here:
            self.tasks[0].run()
        self.until(self._is_over.wait)
        if self._active is not None:
            self._active.leave()
        for task in self.tasks:
            if task.ident is not None:  # it was started
                threading.Thread.join(task)

    def pass_on(self) -> None:
        """Give the turn to the next thread, this one's last act until its own; end the run if there is none."""
        task = self._next()
        if task is None:
            self._is_over.set()
            return
        if self._active is not task.rank:
            if self._active is not None:
                self._active.leave()
            self._active = task.rank
            task.rank.enter()
        if task.thread_id is None:
            threading.Thread.start(task)
        task.turn.release()

    def _give_up_turn(self, task: Task) -> None:
        self.pass_on()
        self.until(task.turn.acquire)
        self._refuse_at_end()

    def until(self, wait: Callable[..., bool]) -> None:
        """Wait; an error of a signal's handler meanwhile ends all threads where they wait next."""
        try:
            wait()
        except BaseException as error:
            self.fail(error)
            if not wait(timeout=_INTERRUPT_SECONDS):  # the other thread waits for what the simulation does not know
                raise

    def _next(self) -> Task | None:
        """Return the thread whose turn it is; ``None`` if all have ended."""
        while True:
            if self._random is not None or not self.ready:
                self._wake()
            if not self.ready:
                return None
            drawn = 0 if self._random is None else self._random.randrange(len(self.ready))
            task = self.ready[drawn]
            del self.ready[drawn]
            if self.ends or not task.rank.is_dead:
                return task
            self._waiting[task] = None

    def _wake(self) -> None:
        """Make ready whose waits are over; the clock's next if there are none; all, where nothing can help them."""
        live = [task for task in self._waiting if not task.rank.is_dead]
        woken: Iterable[Task] = [task for task in live if self.ends or task.is_over()]
        if any(task.is_main for task in woken):
            self._passed = 0
        elif not (woken or self.ready):
            woken = self._at_next_moment(live) or self._at_end(live)
        for task in woken:
            del self._waiting[task]
            self.ready.append(task)

    def _at_next_moment(self, live: list[Task]) -> list[Task]:
        """Move the clock to the next moment for which threads wait, and return these; none where that cannot help.

        It cannot where the main threads wait for what only another rank can do, or look for it for too long; nor after
        a rank's death, with which a launcher would end the others.
        """
        may_be_helped = any(task.is_main and task.until < math.inf for task in live)
        if not may_be_helped or self._passed > _MOMENTS or any(task.rank.is_dead for task in self.tasks):
            return []
        self.slept, self._passed = max(self.slept, min(task.until for task in live)), self._passed + 1
        return [task for task in live if task.until <= self.slept]

    def _at_end(self, live: list[Task]) -> Iterable[Task]:
        """Return the threads that have not ended, which are told that the run has; those of killed ranks come last."""
        if not self.ends and any(task.is_main for task in live):
            self.failure = DeadlockError(
                f"no rank can go on:\n{self.whereabouts()}\nEvery rank must call the same collectives in the same "
                "order: look for a branch, a break, a return or a loop that differs between ranks."
            )
        self.ends = True
        return live or list(self._waiting)

    # What a thread may do in its turn

    def wait(self, is_over: Callable[[], bool], words: Words, seconds: float | None = None) -> bool:
        """Give up this thread's turn until something has come, or some simulated seconds have passed.

        Args:
            is_over: returns whether it has come; asked in any thread.
            words: what the thread waits for, or a function that returns it.
            seconds: time limit; ``None`` for none.

        Returns:
            Whether it has come.

        Raises:
            Cancelled: the run has failed elsewhere.
        """
        task = self._task()
        task.is_over, task.waits_for = is_over, words
        task.until = math.inf if seconds is None else self.slept + max(seconds, 0.0)
        self._waiting[task] = None
        self._give_up_turn(task)
        task.waits_for = ""
        return is_over()

    def event(self, what: str) -> None:
        """Note that this thread's rank begins a collective, a message, or an operation on a store or a file.

        Under a seed, another thread may be drawn to go on first.

        Raises:
            Cancelled: the run has failed elsewhere.
        """
        task = self._task()
        task.rank.events += 1
        at = task.rank.number, task.rank.events
        how = self.fault(*at, what) if callable(self.fault) else "die" if at == self.fault else None
        if isinstance(how, BaseException):
            raise how
        if how == "die":
            self.kill()
        elif how is not None:
            self.sleep(float(how))
        if self._random is not None and self._random.random() < 0.5:
            self.ready.append(task)
            self._give_up_turn(task)

    def thread(self, target: Callable[[], object], name: str, daemon: bool = True) -> Task:
        """Return another thread of this thread's rank."""
        return Task(self, self._task().rank, target, name)

    def condition(self) -> Condition:
        """Return a condition for threads of this thread's rank."""
        return Condition(self)

    def sleep(self, seconds: float) -> None:
        """Let simulated seconds pass."""
        self.wait(bool, f"a sleep of {seconds:g} s", seconds)

    def kill(self) -> None:
        """Let no thread of this rank go on, as where its process is killed; its handlers have no effect at the end."""
        self._task().rank.is_dead = True
        self.wait(bool, "")

    def fail(self, error: BaseException, failed: Task | None = None) -> None:
        """End the run with an error: every thread ends where it waits."""
        if not self.ends:
            self.failure, self.failed, self.ends = error, failed, True

    def _task(self) -> Task:
        task = self.current()
        if task is None:
            error = RuntimeError(
                f"the thread {threading.current_thread().name!r} is none of a simulated rank: threads of your own, and "
                "workers of loaders, cannot take part in collectives of simulated ranks."
            )
            self.fail(error)  # which a thread that is joined would keep to itself
            raise error
        self._refuse_at_end()
        return task

    def _refuse_at_end(self) -> None:
        if self.ends:
            raise Cancelled

    def whereabouts(self) -> str:
        """Return in words where each rank is, a line for each."""
        return "\n".join(str(task) for task in self.tasks if task.is_main)


@functools.cache
def _watch_files() -> None:
    """Tell a simulation of its ranks' operations on files, from now on: the hook cannot be taken away."""

    def tell(event: str, args: tuple[Any, ...]) -> None:
        simulation = simulated.simulation() if event in _FILES else None
        if simulation is None or simulation.scheduler.fault is None or not isinstance(args[0], _PATHS):
            return
        if event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            simulation.scheduler.event(f"{event.removeprefix('os.')}({os.fsdecode(args[0])!r})")

    sys.addaudithook(tell)
