"""Threads of which exactly one runs: each belongs to a simulated rank, and gives up its turn only where it waits.

One run is one order: the next thread is the one that has been ready longest, or one that a seed draws. Time is
simulated too: where all wait, the clock jumps to the first of them that waits for a moment. Where none does, no rank
can go on, and that is an error at once.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distwrap.errors import DeadlockError
from distwrap.supervision import stacks
from distwrap.testing.simulation.process_state import ProcessState

_MOMENTS = 5000  # of the clock, after which ranks that only look again and again count as stuck
_INTERRUPT_SECONDS = 5.0  # for the thread whose turn it is to come to a wait after Ctrl-C

Words = str | Callable[[], str]


class Cancelled(BaseException):
    """Raised in a rank where it waits, once the run has failed elsewhere."""


class Signal:
    """What threads wait for, with the threads that do; for one rank's threads it is a condition."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.waiting = scheduler, list[Task]()

    def wait(self, timeout: float | None = None, words: Words = "a thread of its own") -> bool:
        """Give up this thread's turn until the signal is told, or some simulated seconds have passed.

        Args:
            timeout: ``None`` for no limit.
            words: what the thread waits for, or a function that returns it.

        Returns:
            Whether the signal was told.

        Raises:
            Cancelled: the run has failed elsewhere.
        """
        return self.scheduler.wait(self, words, timeout)

    def notify_all(self) -> None:
        """Let whoever waits go on."""
        self.scheduler.notify(self.waiting)

    def __enter__(self) -> Signal:  # nothing changes within a turn
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass(eq=False)
class Rank:
    """Simulated rank.

    Attributes:
        number: the rank.
        state: what a process has of its own, while another rank has its turn.
        events: the number of collectives, messages, and operations on stores and files that it has begun.
        is_dead: whether it was killed.
    """

    number: int
    state: ProcessState
    events: int = 0
    is_dead: bool = False


class Task:
    """Thread of a simulated rank, with the methods of `threading.Thread`.

    Attributes:
        thread: Python's thread, once it runs.
        turn: a lock that is free while the thread may go on.
        waits_for: in words, or a function that returns them, while it waits; empty while it is ready.
        signal: what it waits for.
        moment: number of the moment of the clock at which its wait ends; ``None`` where it has no limit.
        timed_out: whether the clock has ended the wait.
        has_ended: whether its body has returned or raised.
        ended: told when it has.
    """

    def __init__(self, scheduler: Scheduler, rank: Rank, body: Callable[[], object], *, is_main: bool) -> None:
        self.scheduler, self.rank, self.body, self.is_main = scheduler, rank, body, is_main
        self.thread: threading.Thread | None = None
        self.turn: Any = threading.Lock()
        self.turn.acquire()
        self.waits_for: Words = ""
        self.signal: Signal | None = None
        self.moment: int | None = None
        self.timed_out = self.has_ended = False
        self.ended = Signal(scheduler)

    def start(self) -> None:
        self.scheduler.tasks.append(self)
        self.scheduler.make_ready(self)

    def join(self, timeout: float | None = None) -> None:
        while self in self.scheduler.tasks and not self.has_ended and self.ended.wait(timeout):
            pass

    def is_alive(self) -> bool:
        return self in self.scheduler.tasks and not self.has_ended

    def __str__(self) -> str:
        """For what a rank waits, and where it is."""
        name = f"rank {self.rank.number}"
        if self.rank.is_dead or self.has_ended:
            return f"{name} was killed" if self.rank.is_dead else f"{name} has returned"
        ident = self.thread.ident if self.thread else None
        where = stacks.locate(stacks.of_thread(ident))[1] if ident else ""
        words = self.waits_for() if callable(self.waits_for) else self.waits_for
        return f"{name} {f'waits for {words}' if words else 'is'}{f' at {where}' if where else ''}"


class Scheduler:
    """Scheduler of the threads of one simulation.

    Args:
        seed: draws the order; ``None`` for the order in which threads became ready.

    Attributes:
        tasks: all threads.
        failure: why the run ends; ``None`` while it goes on.
        failed: the task that has raised it; ``None`` where no rank can go on.
        fails: called before each event of a rank, if any of them may fail; see `simulate`.
        slept: simulated seconds in which all have waited for a moment.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.tasks: list[Task] = []
        self.failure: BaseException | None = None
        self.failed: Task | None = None
        self.fails: Callable[[Rank, str], None] | None = None
        self.slept = 0.0
        self._random = None if seed is None else random.Random(seed)
        self._ready: deque[Task] = deque()
        self._moments: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._passed = 0  # moments since a main thread was woken by another thread
        self._here = threading.local()
        self._is_over = threading.Event()
        self._active: Rank | None = None
        self._interrupt: BaseException | None = None  # of a signal's handler
        self._ends = False  # each thread is told, where it waits, that it is to end
        self._also_the_dead = False  # which end last

    def current(self) -> Task | None:
        """Return the task of this thread; ``None`` in a thread of which the simulation knows nothing."""
        return getattr(self._here, "task", None)

    def run(self, *, first_here: bool) -> None:
        """Run all threads until the last has ended, or none can go on.

        Args:
            first_here: whether the first thread is this one, which gets signals.
        """
        first = self.tasks[0]
        if first_here:
            self._ready.remove(first)
            first.thread = threading.current_thread()
            self._hand_over(first)
            self._run(first)
        else:
            self._pass_on()
        self._until(self._is_over.wait)
        if self._active is not None:
            self._active.state.leave()
        for task in self.tasks:
            if task.has_ended and task.thread not in (None, threading.current_thread()):
                assert task.thread is not None
                task.thread.join()

    def _run(self, task: Task) -> None:
        self._here.task = task
        self._until(task.turn.acquire)
        try:
            if not self._ends:
                task.body()
        except Cancelled:
            pass
        except BaseException as error:  # noqa: BLE001 - of what ends a rank
            self.fail(error, task)
        finally:
            task.has_ended = True
            task.ended.notify_all()
            self._here.task = None
            self._pass_on()

    def _hand_over(self, task: Task) -> None:
        """Let a thread go on, which is this one's last act until its own turn."""
        if self._active is not task.rank:
            if self._active is not None:
                self._active.state.leave()
            self._active = task.rank
            task.rank.state.enter()
        if task.thread is None:
            task.thread = threading.Thread(target=self._run, args=(task,), name=f"rank {task.rank.number}", daemon=True)
            task.thread.start()
        task.turn.release()

    def _pass_on(self) -> None:
        following = self._next()
        self._is_over.set() if following is None else self._hand_over(following)

    def _give_up_turn(self, task: Task) -> None:
        self._pass_on()
        self._until(task.turn.acquire)
        self._refuse_after_failure()

    def _until(self, wait: Callable[..., bool]) -> None:
        """Wait; an error of a signal's handler meanwhile is raised where the thread whose turn it is waits next."""
        limit: dict[str, float] = {}
        while True:
            try:
                if wait(**limit):
                    return
            except BaseException as error:  # noqa: BLE001 - raised below, or in the other thread
                self._interrupt, limit = error, {"timeout": _INTERRUPT_SECONDS}
            else:
                assert self._interrupt is not None
                raise self._interrupt  # the other thread waits for something of which the simulation knows nothing

    def _next(self) -> Task | None:
        """Return the thread whose turn it is; ``None`` if all have ended."""
        while True:
            while self._ready:
                drawn = 0 if self._random is None else self._random.randrange(len(self._ready))
                task = self._ready[drawn]
                del self._ready[drawn]
                if self._may_go_on(task):
                    return task
            if not self._pass_time() and not self._end_stuck():
                return None

    def _pass_time(self) -> bool:
        """Move the clock to the next moment for which a thread waits; return whether one does.

        None does where the main threads wait for what only another rank can do, or look for it for too long; nor after
        a rank's death, with which a launcher would end the others.
        """
        live = list(filter(self._may_go_on, self.tasks))
        may_be_helped = any(task.is_main and task.moment is not None for task in live)
        if not may_be_helped or self._passed > _MOMENTS or any(task.rank.is_dead for task in self.tasks):
            return False
        while self._moments:
            moment, number, task = heapq.heappop(self._moments)
            if task.moment == number and self._may_go_on(task):
                self.slept, self._passed = max(self.slept, moment), self._passed + 1
                self.make_ready(task)
                task.timed_out = True
                return True
        return False

    def _end_stuck(self) -> bool:
        """Let all that have not ended go on, to learn that the run has failed; return whether there are any."""
        if self.failure is None and any(task.is_main and self._may_go_on(task) for task in self.tasks):
            self.failure = DeadlockError(
                f"no rank can go on:\n{self.whereabouts()}\nEvery rank must call the same collectives in the same "
                "order: look for a branch, a break, a return or a loop that differs between ranks."
            )
        self._also_the_dead = self._ends = True
        left = list(filter(self._may_go_on, self.tasks))
        for task in left:
            self.make_ready(task)
        return bool(left)

    def _may_go_on(self, task: Task) -> bool:
        if self._ends and task.thread is None:  # it has not begun
            task.has_ended = True
        is_dead = task.rank.is_dead and not self._also_the_dead
        return not (task.has_ended or is_dead)

    def make_ready(self, task: Task) -> None:
        """Let a thread have a turn."""
        if task.signal is not None:
            task.signal.waiting.remove(task)
        task.signal, task.waits_for, task.moment = None, "", None
        self._ready.append(task)

    # What a thread may do in its turn

    def wait(self, signal: Signal, words: Words, seconds: float | None = None) -> bool:
        """See `Signal.wait`."""
        task = self._task()
        task.signal, task.waits_for, task.timed_out = signal, words, False
        signal.waiting.append(task)
        if seconds is not None:
            task.moment = next(self._numbers)
            heapq.heappush(self._moments, (self.slept + max(seconds, 0.0), task.moment, task))
        self._give_up_turn(task)
        return not task.timed_out

    def notify(self, tasks: list[Task]) -> None:
        """Let threads that wait go on."""
        for task in list(tasks):
            if task.is_main:
                self._passed = 0
            self.make_ready(task)

    def event(self, what: str) -> None:
        """Note that this thread's rank begins a collective, a message, or an operation on a store or a file.

        Under a seed, another thread may be drawn to go on first.

        Raises:
            Cancelled: the run has failed elsewhere.
        """
        task = self._task()
        task.rank.events += 1
        if self.fails is not None:
            self.fails(task.rank, what)
        if self._random is not None and self._random.random() < 0.5:
            self._ready.append(task)
            self._give_up_turn(task)

    def sleep(self, seconds: float) -> None:
        """Let simulated seconds pass."""
        self.wait(Signal(self), f"a sleep of {seconds:g} s", seconds)

    def fail(self, error: BaseException, failed: Task | None = None) -> None:
        """End the run with an error: every thread ends where it waits."""
        if self.failure is None:
            self.failure, self.failed, self._ends = error, failed, True
        for task in self.tasks:
            if task.waits_for and not task.has_ended:
                self.make_ready(task)

    def kill(self) -> None:
        """Let no thread of this rank go on, as where its process is killed; its handlers have no effect at the end."""
        task = self._task()
        task.rank.is_dead = True
        self._give_up_turn(task)  # until no other can go on any more

    def _task(self) -> Task:
        task = self.current()
        if task is None:
            raise RuntimeError(
                f"the thread {threading.current_thread().name!r} is none of a simulated rank: threads of your own, and "
                "workers of loaders, cannot take part in collectives of simulated ranks."
            )
        self._refuse_after_failure()
        return task

    def _refuse_after_failure(self) -> None:
        if self._interrupt is not None:
            self.fail(self._interrupt)
        if self._ends:
            raise Cancelled

    def whereabouts(self) -> str:
        """Return in words where each rank is, a line for each."""
        return "\n".join(str(task) for task in self.tasks if task.is_main)
