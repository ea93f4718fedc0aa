"""A simulation: ranks as threads of this process, which take turns; and the two that begin one.

These are ``launcher="simulate"``, and `failure_of`, which runs a script that torchrun could start.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distwrap import simulated, tracebacks
from distwrap._internals.torch import default_device
from distwrap._internals.torch_simulation import BACKEND, OneDevice, answered_for_ranks, simulated_torch
from distwrap.devices.selection import visible_devices
from distwrap.environments import Placement, distwrap_environment, torchrun
from distwrap.errors import LaunchError, OptionError
from distwrap.group import failures, setup, world
from distwrap.launch import base, callers_models, outcome, transport, worker
from distwrap.launch.task import Assignment
from distwrap.network import rendezvous
from distwrap.options import QUIET, switched_on
from distwrap.seeding import seed_generators
from distwrap.strategies.base import Strategy
from distwrap.supervision.channel import Channel
from distwrap.supervision.stacks import is_users
from distwrap.testing.simulation.groups import SimulatedGroup, SimulatedStore
from distwrap.testing.simulation.scheduler import Cancelled, Condition, Fail, Process, Scheduler, Task
from distwrap.wording import print_notice


class Simulation:
    """Ranks in this process.

    Args:
        ranks: their number.
        seed: draws the order of their turns; ``None`` for the order in which they became ready.
        fault: what fails; see `distwrap.testing.simulate`.

    Attributes:
        device: of all ranks: the only one that there is, or the CPU.
        scheduler: of their threads, with their clock.
        makers: the ranks that have made, copied or unpickled modules, by the modules' ids.
    """

    def __init__(self, ranks: int, seed: int | None, fault: Fail | None = None) -> None:
        self.scheduler = Scheduler(seed, fault)
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.makers: dict[int, int] = {}
        self._ranks, self._store = ranks, SimulatedStore(self.scheduler, ranks)
        self._groups: Counter[Any] = Counter()
        self._process = os.getpid()

    def run(self, body: Callable[[Placement], object], more: str, *, has_modules: bool, first_here: bool) -> None:
        """Run a function for each rank, until all have returned or none can go on; the scheduler knows of failures.

        Args:
            body: what each rank runs, given its place.
            more: for the start line, which says that ranks are simulated.
            has_modules: whether each rank has modules of its own.
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
                except BaseException as error:  # noqa: BLE001 - before the rank leaves, which may lead to others
                    scheduler.fail(error, scheduler.current())
                finally:
                    _leave()

        for rank in range(self._ranks):
            place = distwrap_environment.on_one_node(rank, self._ranks)
            task = Task(scheduler, Process(rank, has_modules=has_modules), partial(run, place))
            task.start(here=first_here and rank == 0)
        with simulated_torch(self, self._store), mock.patch.object(simulated, "running", self):
            scheduler.run(Process(-1, has_modules=has_modules), first_here=first_here)

    def make_group(self, options: Any, _: Any = None) -> SimulatedGroup:
        """Return a process group of the rank whose turn it is."""
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        key = (options.group_id, *ranks)
        self._groups[self.rank(), key] += 1  # torch begins to count names anew where all groups were destroyed
        return SimulatedGroup(self._store, options.group_rank, ranks, (key, self._groups[self.rank(), key]))

    def rank(self) -> int:
        """Return the rank whose thread this is; 0 in any other thread."""
        task = self.scheduler.current()
        return 0 if task is None else task.rank.number

    def is_rank(self) -> bool:
        """Return whether this thread is one of a simulated rank: a process that a rank forks is none."""
        return simulated.running is self and self.scheduler.current() is not None and os.getpid() == self._process

    def has_made(self, module: Any) -> bool:
        """Return whether this rank has made, copied or unpickled a module."""
        return self.makers.get(id(module)) == self.rank()

    def meet(self, placement: Placement) -> Store:
        """Return the store of the ranks, in which this rank is registered."""
        store: Store = PrefixStore(f"distwrap/{rendezvous.begin_meeting()}", self._store)
        said = {**rendezvous.registration(self.device), "gpu": None, "address": None}
        store.set(f"here/{placement.rank}", json.dumps(said))
        return store

    def channel(self, *args: Any) -> Channel:
        """Return a side channel, given what `Channel` takes."""
        return _SimulatedChannel(self.scheduler, *args)

    def condition(self) -> Condition:
        """Return a condition for threads of this thread's rank."""
        return Condition(self.scheduler)


dist.Backend.register_backend(
    BACKEND, lambda *given: simulated.running.make_group(*given), extended_api=True, devices=["cpu", "cuda"]
)


def _leave() -> None:
    """Leave what the rank has joined and not left, as where it has failed."""
    if (left := world.active_world()) is not None:
        world.deactivate()
        with suppress(Cancelled), left.cleanup:
            left.close()
    if dist.is_initialized():  # torch knows a thread's groups by their names
        dist.destroy_process_group()


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
            self._scheduler.wait(lambda: self._stopped.is_set() or self._is_woken(), "news of other ranks")
            self._heard = self._notifier.wakeups()
            self.work.look(True)

    def _is_woken(self) -> bool:
        return self._notifier.wakeups() != self._heard


class SimulateLauncher(base.Launcher):
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

    def check(self, job: base.Job) -> None:
        strategy = job.task.options.strategy
        if isinstance(strategy, Strategy) and not strategy.is_simulated:
            raise OptionError(
                f"{type(strategy).__name__} meets in a way of its own, which cannot be simulated: leave "
                "launcher='simulate' out, or run the function on real ranks by distwrap.testing.run_ranks()."
            )

    def run(self, job: base.Job, plan: Assignment) -> list[outcome.Outcome]:
        simulation, outcomes = Simulation(job.nprocs, self.schedule, self.fail), list[outcome.Outcome]()
        main = vars(sys.modules["__main__"])
        # In a notebook, and under pytest, the ranks share all modules.
        is_script = os.path.isfile(main.get("__file__") or "") and "pytest" not in sys.modules

        def body(place: Placement) -> None:
            os.environ.update(distwrap_environment.variables(place, self.name, "simulated"))
            if is_script:
                vars(sys.modules["__main__"]).update(main)
            assignment = replace(plan, placement=place)
            task = transport.unpack(plan.payload or b"")
            try:
                given = callers_models.given_models(task)
                value, trained = worker.take_part(assignment, task, lambda report: None)
                callers_models.say_what_stays(task, given, value)
                packed = worker.packed(assignment, task, value, trained)
                setup.teardown_process_group()
                outcomes.append(outcome.success(place.rank, packed))
            except BaseException as error:
                if not simulation.scheduler.ends:  # else this only follows from it
                    outcomes.append(outcome.failure(place.rank, failures.explained(error)))
                raise

        more = "" if is_script else ", and share all modules"
        # Rank 0 too has a thread of its own: what torch keeps for a thread would last into the next simulation.
        simulation.run(body, more, has_modules=is_script, first_here=False)
        cause = simulation.scheduler.failure
        if cause is not None and not any(each.failed for each in outcomes):
            raise cause
        return outcomes


def failure_of(path: str, ranks: int, arguments: Sequence[str], *, schedule: int | None = None) -> str:
    """Run a script on simulated ranks, and return in words why it has failed: a rank did, or none can go on.

    Each rank has a ``__main__`` and modules of its own.

    Args:
        path: the script's.
        ranks: their number.
        arguments: of the script.
        schedule: a number that draws another order of the ranks' turns.

    Raises:
        OptionError: there is no such script.
    """
    script = Path(path).resolve()
    if not script.is_file():
        raise OptionError(f"there is no script {path}")
    simulation = Simulation(ranks, schedule)
    mode, scheduler = OneDevice(simulation.device), simulation.scheduler

    def body(place: Placement) -> None:
        os.environ.update({**distwrap_environment.lacking(place, {}), torchrun.AGENT: "simulated"})
        own = vars(sys.modules["__main__"])
        own["__file__"] = str(script)
        # torch's own generator begins alike in every process.
        seed_generators(hash((schedule or 0, place.rank)) % 2**31, frozenset({"random", "numpy"}))
        try:
            with mode:  # torch.compile keeps what it makes with the code, which is compiled for each rank
                exec(compile(script.read_bytes(), str(script), "exec"), own)
        except SystemExit as error:
            if failures.is_failure(error):
                raise

    with (
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        mock.patch.object(sys, "argv", [path, *arguments]),
        answered_for_ranks(is_users, ranks, simulation.rank, mode),
    ):
        setup.import_before_group()
        simulation.run(body, f"; every device is {simulation.device}", has_modules=True, first_here=True)
    sys.stdout.flush()  # what the ranks have printed comes first
    cause, rank = scheduler.failure, scheduler.failed and scheduler.failed.rank.number
    if isinstance(cause, SystemExit):
        return f"rank {rank} called sys.exit({cause.code!r})"
    if cause is not None and rank is None and not isinstance(cause, Exception):
        raise cause  # Ctrl-C
    return f"rank {rank} raised:\n{tracebacks.as_text(cause)}" if cause and rank is not None else str(cause or "")
