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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from distwrap.errors import DeadlockError
from distwrap.supervision import stacks
from distwrap.testing.simulation.process_state import ProcessState

_ROUNDS = 3  # in which threads beside the ranks' main threads may still wake one of these
# Wake-ups by the clock, and simulated seconds, after which ranks that only look again and again count as stuck.
_POLLS, _PATIENCE = 2000, 1800.0
_POLLS_FOR_THE_DEAD = 100  # nobody is to be waited for then
_INTERRUPT_SECONDS = 5.0  # for the thread whose turn it is to come to a wait after Ctrl-C
_REFUSALS = 100  # errors that a thread which is to end may swallow


Words = str | Callable[[], str]


class Cancelled(BaseException):
    """Raised in a rank where it waits, once the run has failed elsewhere."""


@dataclass(eq=False)
class Signal:
    """What threads wait for, with the threads that do."""

    waiting: list[Task] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """Thread of a simulated rank.

    Attributes:
        rank: the rank.
        body: what it runs.
        is_main: whether it is the rank's main thread; the others belong to distwrap.
        thread: Python's thread, once it runs.
        turn: a lock that is free while the thread may go on.
        waits_for: in words, or a function that returns them, while it waits; empty while it is ready.
        signal: what it waits for.
        turns: how often it has gone on, to tell an old moment of the clock from the one for which it waits now.
        timed_out: whether the clock has ended the wait.
        has_ended: whether its body has returned or raised.
        ended: told when it has.
        refusals: how often it was told that it is to end.
    """

    rank: Rank
    body: Callable[[], object]
    is_main: bool
    thread: threading.Thread | None = None
    turn: Any = field(default_factory=threading.Lock)
    waits_for: Words = ""
    signal: Signal | None = None
    turns: int = 0
    timed_out: bool = False
    has_ended: bool = False
    ended: Signal = field(default_factory=Signal)
    refusals: int = 0

    def __post_init__(self) -> None:
        self.turn.acquire()


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


class Scheduler:
    """Scheduler of the threads of one simulation.

    Args:
        seed: draws the order; ``None`` for the order in which threads became ready.

    Attributes:
        is_unwinding: whether all threads end after one was killed, and their handlers may have no effect any more.
        failure: why the run ends; ``None`` while it goes on.
        fails: called before each event of a rank; see `simulate`.
        slept: simulated seconds in which all have waited for a moment.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._ready: deque[Task] = deque()
        self._moments: list[tuple[float, int, int, Task]] = []
        self._numbers = itertools.count()
        self._tasks: dict[int, Task] = {}
        self._all: list[Task] = []
        self.slept = 0.0
        self._polls, self._rounds, self._woken_at = 0, 0, 0.0
        self._is_over = threading.Event()
        self._active: Rank | None = None
        self._interrupt: BaseException | None = None  # of a signal's handler
        self._ends = False  # each thread is told, where it waits, that it is to end
        self.is_unwinding = False
        self.failure: BaseException | None = None
        self.fails: Callable[[Rank, str], None] = lambda rank, what: None

    # The threads

    def add(self, rank: Rank, body: Callable[[], object], *, is_main: bool) -> Task:
        """Let a function run in a thread of a rank."""
        task = Task(rank, body, is_main)
        self._all.append(task)
        self._ready.append(task)
        return task

    def current(self) -> Task | None:
        """Return the task of this thread; ``None`` in a thread of which the simulation knows nothing."""
        return self._tasks.get(threading.get_ident())

    def run(self, *, first_here: bool) -> None:
        """Run all threads until the last has ended, or none can go on.

        Args:
            first_here: whether the first thread is this one, which gets signals.
        """
        first = self._all[0]
        if first_here:
            self._ready.remove(first)
            first.thread = threading.current_thread()
            self._hand_over(first)
            self._run(first)
        elif (task := self._next()) is not None:
            self._hand_over(task)
        self._wait_for_all()
        if self._active is not None:
            self._active.state.leave()
        for task in self._all:
            if task.thread not in (None, threading.current_thread()) and task.has_ended:
                assert task.thread is not None
                task.thread.join()

    def _wait_for_all(self) -> None:
        try:
            self._is_over.wait()
        except BaseException as error:
            self._interrupt = error
            if not self._is_over.wait(_INTERRUPT_SECONDS):
                raise

    def _run(self, task: Task) -> None:
        ident = threading.get_ident()
        self._tasks[ident] = task
        self._await_turn(task)
        try:
            if not self._ends:
                task.body()
        except Cancelled:
            pass
        except BaseException as error:  # noqa: BLE001 - of what ends a rank
            self.fail(error)
        finally:
            task.has_ended = True
            self.notify(task.ended)
            del self._tasks[ident]
            self._pass_on(task)

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

    def _pass_on(self, task: Task) -> None:
        following = self._next()
        if following is None:
            self._is_over.set()
        elif following is task:
            task.turn.release()
        else:
            self._hand_over(following)

    def _await_turn(self, task: Task) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                if task.turn.acquire(timeout=-1 if interrupt is None else _INTERRUPT_SECONDS):
                    return
            except BaseException as error:  # noqa: BLE001 - of a signal's handler, while another thread has its turn
                interrupt = self._interrupt = error
            else:
                assert interrupt is not None
                raise interrupt  # the other thread waits for something of which the simulation knows nothing

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
        """Move the clock to the next moment for which a thread waits; return whether one does, or may be helped."""
        if self._may_be_stuck():
            return False
        while self._moments:
            moment, _, turns, task = heapq.heappop(self._moments)
            if task.turns != turns or not task.waits_for or not self._may_go_on(task):
                continue
            self.slept = max(self.slept, moment)
            self._polls += 1
            task.timed_out = True
            self._make_ready(task)
            return True
        return False

    def _may_be_stuck(self) -> bool:
        """Return whether the main threads wait for what only another rank can do, or look for it for too long."""
        live = list(filter(self._may_go_on, self._all))
        timed = {id(task) for _, _, turns, task in self._moments if task.turns == turns}
        if any(task.is_main and id(task) in timed for task in live):
            if any(task.rank.is_dead for task in self._all):
                return self._polls > _POLLS_FOR_THE_DEAD
            return self._polls > _POLLS and self.slept - self._woken_at > _PATIENCE
        self._rounds += 1
        return self._rounds > _ROUNDS * sum(not task.is_main for task in live)

    def _end_stuck(self) -> bool:
        """Let all that have not ended go on, to learn that the run has failed; return whether there are any."""
        if self.failure is None and any(task.is_main and self._may_go_on(task) for task in self._all):
            self.failure = self.stuck()
        self.is_unwinding = any(task.rank.is_dead for task in self._all)
        self._ends = True  # also threads beside the ranks, which nobody has ended
        left = list(filter(self._may_go_on, self._all))
        for task in left:
            self._make_ready(task)
        return bool(left)

    def _may_go_on(self, task: Task) -> bool:
        if self._ends and task.thread is None:  # it has not begun
            task.has_ended = True
        is_dead = task.rank.is_dead and not self.is_unwinding
        return not (task.has_ended or is_dead or task.refusals > _REFUSALS)

    def _make_ready(self, task: Task) -> None:
        if task.signal is not None:
            task.signal.waiting = [each for each in task.signal.waiting if each is not task]
        task.signal, task.waits_for = None, ""
        self._ready.append(task)

    # What a thread may do in its turn

    def wait(self, signal: Signal, words: Words, seconds: float | None = None) -> bool:
        """Give up this thread's turn until a signal is told, or some time has passed.

        Args:
            signal: what it waits for.
            words: the same in words, or a function that returns them.
            seconds: of the simulated clock; ``None`` for no limit.

        Returns:
            Whether the signal was told.

        Raises:
            Cancelled: the run has failed elsewhere.
            DeadlockError: no rank can go on.
        """
        task = self._task()
        self._refuse_after_failure(task)
        task.signal, task.waits_for, task.timed_out = signal, words, False
        signal.waiting.append(task)
        task.turns += 1
        if seconds is not None:
            heapq.heappush(self._moments, (self.slept + max(seconds, 0.0), next(self._numbers), task.turns, task))
        self._pass_on(task)
        self._await_turn(task)
        self._refuse_after_failure(task)
        return not task.timed_out

    def notify(self, signal: Signal) -> None:
        """Make ready whoever waits for a signal."""
        for task in list(signal.waiting):
            if task.is_main:
                self._polls, self._rounds, self._woken_at = 0, 0, self.slept
            self._make_ready(task)

    def event(self, what: str) -> None:
        """Note that this thread's rank begins a collective, a message, or an operation on a store or a file.

        Under a seed, another thread may be drawn to go on first.

        Raises:
            Cancelled: the run has failed elsewhere.
        """
        task = self._task()
        self._refuse_after_failure(task)
        task.rank.events += 1
        self.fails(task.rank, what)
        if self._random is not None and self._random.random() < 0.5:
            self._ready.append(task)
            self._pass_on(task)
            self._await_turn(task)
            self._refuse_after_failure(task)

    def sleep(self, seconds: float) -> None:
        """Let simulated seconds pass."""
        self.wait(Signal(), f"a sleep of {seconds:g} s", seconds)

    def fail(self, error: BaseException) -> None:
        """End the run with an error: every other thread ends where it waits."""
        if self.failure is None:
            self.failure, self._ends = error, True
        for task in self._all:
            if task.waits_for and not task.has_ended:
                self._make_ready(task)

    def kill(self) -> None:
        """Let no thread of this rank go on, as where its process is killed; its handlers have no effect at the end."""
        task = self._task()
        task.rank.is_dead = True
        self._pass_on(task)
        self._await_turn(task)  # when no other can go on any more
        raise Cancelled

    def _task(self) -> Task:
        task = self.current()
        if task is None:
            raise RuntimeError(
                f"the thread {threading.current_thread().name!r} is none of a simulated rank: threads of your own, and "
                "workers of loaders, cannot take part in collectives of simulated ranks."
            )
        return task

    def _refuse_after_failure(self, task: Task) -> None:
        if self._interrupt is not None:
            self.fail(self._interrupt)
        if not self._ends:
            return
        task.refusals += 1
        if task.refusals > _REFUSALS:  # it goes on all the same
            self._pass_on(task)  # the others end without it
            threading.Event().wait()
        raise Cancelled

    # Words

    def stuck(self) -> BaseException:
        """Return the error of a run in which no rank can go on: for what each waits, and where."""
        return DeadlockError(
            f"no rank can go on:\n{self.whereabouts()}\nEvery rank must call the same collectives in the same order: "
            "look for a branch, a break, a return or a loop that differs between ranks."
        )

    def whereabouts(self) -> str:
        """Return in words where each rank is, a line for each."""
        return "\n".join(map(self._where, self.main_tasks))

    def _where(self, task: Task) -> str:
        name = f"rank {task.rank.number}"
        if task.rank.is_dead:
            return f"{name} was killed"
        if task.has_ended:
            return f"{name} has returned"
        where = stacks.locate(stacks.of_thread(task.thread.ident))[1] if task.thread and task.thread.ident else ""
        at = f" at {where}" if where else ""
        words = task.waits_for() if callable(task.waits_for) else task.waits_for
        return f"{name} waits for {words}{at}" if words else f"{name} is{at or ' ready'}"

    @property
    def main_tasks(self) -> Iterator[Task]:
        """The ranks' main threads, in the order of the ranks."""
        return (task for task in self._all if task.is_main)
