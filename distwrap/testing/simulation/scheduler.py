"""Threads of which exactly one runs: each belongs to a simulated rank, and gives up its turn only where it waits.

One run is one order: the next thread is the one that has been ready longest, or one that a seed draws. A wait is a
function that says whether it is over; it is asked where no thread is ready. Time is simulated too: where all wait, the
clock jumps to the first moment for which one waits. Where none does, no rank can go on, and that is an error at once.

What a process has of its own, and threads of one process share, is put away while another rank has its turn.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any

import torch

from distwrap import simulated
from distwrap._internals.python import module_locks, table_of_variables
from distwrap._internals.torch_simulation import group_tables, hook_tables
from distwrap.errors import DeadlockError, WorkerDiedError
from distwrap.group import signing, world
from distwrap.network import rendezvous
from distwrap.seeding import RandomState
from distwrap.supervision import stacks

_MOMENTS = 5000  # of the clock, after which ranks that only look again and again count as stuck

_FILES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_PATHS = (str, bytes, os.PathLike)

_ALSO_OWN = ("__main__", "hydra", "omegaconf")  # libraries that refuse to begin twice in a process
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # a user's too
_ENVIRON: Any = os.environb if os.supports_bytes_environ else os.environ

Words = str | Callable[[], str]
# Takes a rank, the number of its event, from 1, and the event in words; returns "die", an exception that the event
# raises, a number of seconds by which the rank is late, or None.
Fail = tuple[int, int] | Callable[[int, int, str], Any]


def _set_variables(wanted: dict[Any, Any]) -> None:
    now = table_of_variables()
    for name in now.keys() - wanted.keys():
        del _ENVIRON[name]
    _ENVIRON.update(wanted.items() - now.items())


def _set_level(level: int) -> None:
    if logging.root.level != level:
        logging.root.setLevel(level)


_GROUPS = group_tables()
_NAMES: list[tuple[Any, str]] = [(sys, name) for name in ("stdout", "stderr", "excepthook", "argv")]
_NAMES += [(warnings, "filters"), (warnings, "showwarning"), (logging.root, "handlers")]
_NAMES += [(world, "_current"), (world, "_ambient"), (rendezvous, "_generation"), (signing, "_agreements")]
# Ways to read and to set what each rank has of its own.
_PARTS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    *(
        (functools.partial(getattr, *each), functools.partial(setattr, *each))
        for each in [*_GROUPS, *_NAMES, *hook_tables(), *module_locks()]
    ),
    (lambda: dict(table_of_variables()), _set_variables),
    (RandomState.capture, RandomState.restore),
    (os.getcwd, os.chdir),
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: logging.root.level, _set_level),
)


class Cancelled(BaseException):
    """Raised in a rank where it waits, once the run has failed elsewhere."""


class Process:
    """What would be a process of its own: of a simulated rank, or of the caller. It is kept here while it has no turn.

    Args:
        number: of the rank.
        has_modules: whether ``__main__``, which begins empty, and all modules but those of libraries are its own.

    Attributes:
        events: the number of collectives, messages, and operations on stores and files that the rank has begun.
        is_dead: whether it was killed.
    """

    def __init__(self, number: int, *, has_modules: bool) -> None:
        self.number, self.events, self.is_dead = number, 0, False
        values = [get() for get, _ in _PARTS]
        new = [type(value)() for value in values[: len(_GROUPS)]]
        self._values = new + [each.copy() if isinstance(each, (dict, list)) else each for each in values[len(new) :]]
        self._modules, self._count = {"__main__": ModuleType("__main__")} if has_modules else None, 0

    def enter(self) -> None:
        """Make this the state of the process."""
        for (_, set_part), value in zip(_PARTS, self._values, strict=True):
            set_part(value)
        if self._modules is not None:
            sys.modules.update(self._modules)
            self._count = len(sys.modules)

    def leave(self) -> None:
        """Keep what is now the state of the process."""
        self._values = [get() for get, _ in _PARTS]
        if self._modules is not None:
            names = self._modules if len(sys.modules) == self._count else filter(_is_own, list(sys.modules))
            self._modules = {name: sys.modules.pop(name) for name in names if name in sys.modules}


@functools.cache
def _is_own(name: str) -> bool:
    """Return whether a module is a rank's own."""
    file = getattr(sys.modules[name], "__file__", None) or next(iter(getattr(sys.modules[name], "__path__", ())), "")
    is_library = not stacks.is_users(file) or any(each in file for each in _INSTALLED)
    own = bool(file) and not is_library and not file.endswith(tuple(EXTENSION_SUFFIXES))
    return own or name.partition(".")[0] in _ALSO_OWN


class Condition(nullcontext[Any]):
    """Condition for which threads of one rank wait, without a lock: nothing changes within a turn."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler, self._told = scheduler, 0

    def wait(self, timeout: float | None = None) -> bool:
        before = self._told
        return self._scheduler.wait(lambda: self._told > before, "a thread of its own", timeout)

    def notify_all(self) -> None:
        self._told += 1


class Task(threading.Thread):
    """Thread of a simulated rank, which begins with its first turn.

    Attributes:
        turn: is released as the thread may go on.
        is_over: returns whether what it waits for has come.
        waits_for: in words, or a function that returns them.
        until: at this moment of the clock its wait ends.
        has_ended: whether its body has returned or raised.
    """

    def __init__(self, scheduler: Scheduler, rank: Process, body: Callable[[], object], name: str = "") -> None:
        super().__init__(name=name or f"rank {rank.number}", daemon=True)
        self.scheduler, self.rank, self.body, self.is_main = scheduler, rank, body, not name
        self.turn, self.until, self.has_ended = threading.Semaphore(0), math.inf, False
        self.is_over: Callable[[], bool] = bool
        self.waits_for: Words = ""

    def start(self, *, here: bool = False) -> None:
        """Begin; `here` leaves it to the caller to run it."""
        self.scheduler.tasks.append(self)
        self.scheduler.ready.append(self)
        if not here:
            super().start()

    def run(self) -> None:
        scheduler = self.scheduler
        scheduler.here.task = self
        try:
            scheduler.await_turn(self)
            self.body()
        except BaseException as error:  # noqa: BLE001 - of what ends a rank
            scheduler.fail(error, self)
        finally:
            self.has_ended, scheduler.here.task = True, None
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
        where = stacks.locate(stacks.of_thread(self.ident))[1]
        words = self.waits_for() if callable(self.waits_for) else self.waits_for
        return f"{name} {f'waits for {words}' if words else 'is'} at {where}"


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
        self.failure: BaseException | None = None
        self.failed: Task | None = None
        self.ends, self.slept, self.fault = False, 0.0, fault
        self._random = None if seed is None else random.Random(seed)
        self._waiting: dict[Task, None] = {}  # in the order in which they began
        self._passed = 0  # moments since a main thread was woken by another thread
        self._is_over = threading.Event()
        if fault is not None:
            _watch_files()

    def current(self) -> Task | None:
        """Return the task of this thread; ``None`` in a thread of which the simulation knows nothing."""
        return getattr(self.here, "task", None)

    def run(self, caller: Process, *, first_here: bool) -> None:
        """Run all threads until the last has ended, or none can go on.

        Args:
            caller: gets the state of this process back.
            first_here: whether the first thread is this one, which gets signals.
        """
        self._active = caller
        self.pass_on()
        if first_here:
            self.tasks[0].run()
        try:
            self._until(self._is_over.wait)
        finally:
            self._switch_to(caller)
        for task in self.tasks[int(first_here) :]:
            threading.Thread.join(task)

    def pass_on(self) -> None:
        """Give the turn to the next thread, this one's last act until its own; end the run if there is none."""
        if self._random is not None or not self.ready:
            self._wake()
        if not self.ready:
            self._is_over.set()
            return
        drawn = 0 if self._random is None else self._random.randrange(len(self.ready))
        task = self.ready[drawn]
        del self.ready[drawn]
        self._switch_to(task.rank)
        task.turn.release()

    def _switch_to(self, rank: Process) -> None:
        if rank is not self._active:
            self._active.leave()
            self._active = rank
            rank.enter()

    def await_turn(self, task: Task) -> None:
        """Wait for a thread's turn.

        Raises:
            Cancelled: the run has failed elsewhere.
        """
        self._until(task.turn.acquire)
        if self.ends:
            raise Cancelled

    def _until(self, wait: Callable[..., bool]) -> None:
        """Wait; an error of a signal's handler meanwhile ends all threads where they wait next, a second one this."""
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 - as Ctrl-C
            self.fail(error)
            wait()

    def _wake(self) -> None:
        """Make ready whose waits are over; where there are none, the clock's next; where these cannot help, all."""
        live = [task for task in self._waiting if self.ends or not task.rank.is_dead]
        woken = [task for task in live if self.ends or task.is_over()]
        if any(task.is_main for task in woken):
            self._passed = 0
        elif not (woken or self.ready):
            killed = next((task.rank for task in self.tasks if task.rank.is_dead), None)  # a launcher ends the others
            helps = any(task.is_main and task.until < math.inf for task in live) and self._passed < _MOMENTS
            if helps and killed is None:
                self.slept, self._passed = max(self.slept, min(task.until for task in live)), self._passed + 1
                woken = [task for task in live if task.until <= self.slept]
            else:
                if killed or any(task.is_main for task in self._waiting):
                    self.fail(self._stuck(killed))
                self.ends, woken = True, list(self._waiting)
        for task in woken:
            del self._waiting[task]
            self.ready.append(task)

    def _stuck(self, killed: Process | None) -> BaseException:
        if killed is not None:
            words = f"rank {killed.number} was killed at its event {killed.events}:\n{self.whereabouts()}"
            return WorkerDiedError(words, rank=killed.number)
        return DeadlockError(
            f"no rank can go on:\n{self.whereabouts()}\nEvery rank must call the same collectives in the same order: "
            "look for a branch, a break, a return or a loop that differs between ranks."
        )

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
        self.pass_on()
        self.await_turn(task)
        task.waits_for = ""
        return is_over()

    def event(self, what: str) -> None:
        """Note that this thread's rank begins a collective, a message, or an operation on a store or a file.

        Under a seed, another thread may be drawn to go on first.

        Raises:
            Cancelled: the run has failed elsewhere.
        """
        rank = self._task().rank
        rank.events += 1
        at = rank.number, rank.events
        how = self.fault(*at, what) if callable(self.fault) else "die" if at == self.fault else None
        if isinstance(how, BaseException):
            raise how
        if how == "die":
            self.kill()
        elif how is not None:
            self.sleep(float(how))
        if self._random is not None and self._random.random() < 0.5:
            self.wait(lambda: True, "")

    def thread(self, target: Callable[[], object], name: str, daemon: bool = True) -> Task:
        """Return another thread of this thread's rank."""
        return Task(self, self._task().rank, target, name)

    def sleep(self, seconds: float) -> None:
        """Let simulated seconds pass."""
        self.wait(bool, f"a sleep of {seconds:g} s", seconds)

    def kill(self) -> None:
        """Let no thread of this rank go on, as where its process is killed; its handlers have no effect at the end."""
        rank = self._task().rank
        rank.is_dead = True
        for task in [each for each in self.ready if each.rank is rank]:
            self.ready.remove(task)
            self._waiting[task] = None
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
        if self.ends:
            raise Cancelled
        return task

    def whereabouts(self) -> str:
        """Return in words where each rank is, a line for each."""
        return "\n".join(str(task) for task in self.tasks if task.is_main)


@functools.cache
def _watch_files() -> None:
    """Tell a simulation of its ranks' operations on files, from now on: the hook cannot be taken away."""

    def tell(event: str, args: tuple[Any, ...]) -> None:
        running = simulated.simulation() if event in _FILES else None
        if running is None or running.scheduler.fault is None or not isinstance(args[0], _PATHS):
            return
        if event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            running.scheduler.event(f"{event.removeprefix('os.')}({os.fsdecode(args[0])!r})")

    sys.addaudithook(tell)
