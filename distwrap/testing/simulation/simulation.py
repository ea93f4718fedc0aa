"""A simulation: ranks as threads of this process, which take turns; and ``launcher="simulate"``, which begins one."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distwrap import simulated
from distwrap._internals.torch import default_device
from distwrap._internals.torch_simulation import BACKEND, simulated_torch
from distwrap.devices.selection import visible_devices
from distwrap.environments import Placement, distwrap_environment
from distwrap.errors import LaunchError, OptionError, WorkerDiedError
from distwrap.group import failures, setup
from distwrap.group.world import active_world, deactivate
from distwrap.launch import transport, worker
from distwrap.launch.base import Job, Launcher
from distwrap.launch.callers_models import given_models, say_what_stays
from distwrap.launch.outcome import Outcome, failure, success
from distwrap.launch.task import Assignment
from distwrap.network import rendezvous
from distwrap.options import QUIET, switched_on
from distwrap.strategies.base import Strategy
from distwrap.supervision.channel import Channel
from distwrap.testing.simulation.groups import SimulatedGroup, SimulatedStore
from distwrap.testing.simulation.process_state import Process
from distwrap.testing.simulation.scheduler import Cancelled, Fail, Scheduler, Task
from distwrap.wording import print_notice


class Simulation:
    """Ranks in this process.

    Args:
        ranks: their number.
        seed: draws the order of their turns; ``None`` for the order in which they became ready.
        fault: what fails; see `distwrap.testing.simulate`.

    Attributes:
        device: of all ranks: the only one that there is, or the CPU.
        scheduler: of their threads.
    """

    def __init__(self, ranks: int, seed: int | None, fault: Fail | None = None) -> None:
        self.scheduler = Scheduler(seed, fault)
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._ranks, self._store = ranks, SimulatedStore(self.scheduler, ranks)
        self._groups: Counter[Any] = Counter()
        self._makers: dict[int, int] = {}  # of modules, by their ids
        self._process = os.getpid()

    def run(
        self,
        body: Callable[[Placement], object],
        variables: Callable[[Placement], dict[str, str]],
        modules: Callable[[], dict[str, ModuleType]] | None,
        more: str,
        *,
        first_here: bool,
    ) -> None:
        """Run a function for each rank, until all have returned or none can go on; the scheduler knows of failures.

        Args:
            body: what each rank runs, given its place.
            variables: returns a rank's environment variables, besides those of this process.
            modules: returns those with which a rank begins, where it has modules of its own.
            more: for the start line, which says that ranks are simulated.
            first_here: whether rank 0 runs in this thread, which gets signals.

        Raises:
            LaunchError: ranks are simulated in this process already.
        """
        if simulated.running is not None:
            raise LaunchError("ranks are simulated in this process already: one simulation runs at a time.")
        if not switched_on(os.environ, QUIET):
            print_notice(f"{self._ranks} simulated ranks: threads of this process, which take turns{more}")
        default, threads, scheduler = default_device(), torch.get_num_threads(), self.scheduler

        def run(place: Placement) -> None:
            torch.set_num_threads(threads)  # which OpenMP keeps for each thread
            missing = default if default_device() != default else None  # the caller's is that of its thread alone
            with torch.autograd.set_multithreading_enabled(False), missing or nullcontext():
                try:
                    body(place)
                except BaseException as error:
                    scheduler.fail(error, scheduler.current())  # before the rank leaves, which may lead to others
                    raise
                finally:
                    _leave()

        for number in range(self._ranks):
            place = distwrap_environment.on_one_node(number, self._ranks)
            Task(scheduler, Process(number, variables(place), modules and modules()), partial(run, place)).start()
        here = Process(-1, {}, modules and {})
        here.leave()
        with simulated_torch(self, self._store):
            simulated.running = self
            try:
                scheduler.run(first_here=first_here)
            finally:
                simulated.running = None
                here.enter()

    def make_group(self, options: Any) -> SimulatedGroup:
        """Return a process group of the rank whose turn it is."""
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        key = (options.group_id, *ranks)
        self._groups[self.rank(), key] += 1  # torch begins to count names anew where all groups were destroyed
        return SimulatedGroup(self._store, options.group_rank, ranks, (key, self._groups[self.rank(), key]))

    def rank(self) -> int:
        """Return the rank whose thread this is; 0 in any other thread."""
        task = self.scheduler.current()
        return 0 if task is None else task.rank.number

    # What torch, and `distwrap.simulated`, ask

    def is_rank(self) -> bool:
        # A process that a rank forks, as a loader's worker, is no rank.
        return simulated.running is self and self.scheduler.current() is not None and os.getpid() == self._process

    def note_maker(self, module: Any) -> None:
        self._makers[id(module)] = self.rank()

    def has_made(self, module: Any) -> bool:
        return self._makers.get(id(module)) == self.rank()

    def meet(self, placement: Placement) -> Store:
        store: Store = PrefixStore(f"distwrap/{rendezvous.begin_meeting()}", self._store)
        said = {**rendezvous.registration(self.device), "gpu": None, "address": None}
        store.set(f"here/{placement.rank}", json.dumps(said))
        return store

    def channel(self, *args: Any) -> Channel:
        return _SimulatedChannel(self.scheduler, *args)


def _leave() -> None:
    """Leave what the rank has joined and not left, as where it has failed."""
    world = active_world()
    if world is not None:
        deactivate()
        for close in (world.close, world.cleanup.close):
            with suppress(Cancelled):
                close()
    if dist.is_initialized():  # torch knows a thread's groups by their names
        dist.destroy_process_group()


def _make_group(options: Any, _: Any = None) -> SimulatedGroup:
    if not isinstance(simulated.running, Simulation):
        raise LaunchError(f"the backend {BACKEND!r} is that of simulated ranks, and no ranks are simulated.")
    return simulated.running.make_group(options)


dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])


class _SimulatedChannel(Channel):
    """Side channel of a simulated rank: it serves what others ask. Who is stuck, or gone, the scheduler knows."""

    def __init__(self, scheduler: Scheduler, *args: Any) -> None:
        super().__init__(*args)
        self._scheduler, self._thread = scheduler, scheduler.thread(self._run, "distwrap-channel")

    def _halt(self) -> None:
        self._stopped.set()
        self._notifier.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._scheduler.wait(lambda: self._stopped.is_set() or self._is_rung(), "news of other ranks")
            self._heard = self._notifier.wakeups()
            self.work.look(True)

    def _is_rung(self) -> bool:
        return self._notifier.wakeups() != self._heard


class SimulateLauncher(Launcher):
    """Threads of this process, of which exactly one runs, and which take turns where they wait for each other.

    Args:
        schedule: a number that draws the order of the turns; ``None`` for the order in which ranks became ready.
        fail: what fails at which rank and event; see `distwrap.testing.simulate`.
    """

    name = "simulate"
    runs_one_rank = True

    def __init__(self, schedule: int | None = None, fail: Fail | None = None) -> None:
        self.schedule, self.fail = schedule, fail

    def count(self, nprocs: int | Literal["auto"]) -> int:
        return max(1, visible_devices().count) if nprocs == "auto" else nprocs

    def check(self, job: Job) -> None:
        strategy = job.task.options.strategy
        if isinstance(strategy, Strategy) and not strategy.is_simulated:
            raise OptionError(
                f"{type(strategy).__name__} meets in a way of its own, which cannot be simulated: leave "
                "launcher='simulate' out, or run the function on real ranks by distwrap.testing.run_ranks()."
            )

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        simulation, outcomes = Simulation(job.nprocs, self.schedule, self.fail), list[Outcome]()
        # In a notebook, and under pytest, the ranks share all modules.
        main = sys.modules["__main__"]
        is_script = os.path.isfile(getattr(main, "__file__", None) or "") and "pytest" not in sys.modules

        def variables(place: Placement) -> dict[str, str]:
            return distwrap_environment.variables(place, self.name, "simulated")

        def modules() -> dict[str, ModuleType]:
            own = ModuleType("__main__")
            own.__dict__.update(vars(main))
            return {"__main__": own}

        def body(place: Placement) -> None:
            assignment = replace(plan, placement=place)
            assert assignment.payload is not None
            task = transport.unpack(assignment.payload)
            try:
                given = given_models(task)
                value, trained = worker.take_part(assignment, task, lambda report: None)
                say_what_stays(task, given, value)
                packed = worker.packed(assignment, task, value, trained)
                setup.teardown_process_group()
                outcomes.append(success(place.rank, packed))
            except BaseException as error:
                if not simulation.scheduler.ends:  # else this only follows from it
                    outcomes.append(failure(place.rank, failures.explained(error)))
                raise

        more = "" if is_script else ", and share all modules"
        # Rank 0 too has a thread of its own: what torch keeps for a thread would last into the next simulation.
        simulation.run(body, variables, modules if is_script else None, more, first_here=False)
        if any(outcome.failed for outcome in outcomes):
            return outcomes
        for task in simulation.scheduler.tasks:
            if task.rank.is_dead:
                number, event = task.rank.number, task.rank.events
                raise WorkerDiedError(f"rank {number} was killed at its event {event}.", rank=number)
        if simulation.scheduler.failure is not None:
            raise simulation.scheduler.failure
        return outcomes
