"""``launcher="simulate"``: the ranks of a call as threads of this process, which take turns."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType
from typing import Literal

from distwrap.devices.selection import visible_devices
from distwrap.environments import Placement, distwrap_environment
from distwrap.errors import OptionError, WorkerDiedError
from distwrap.group import failures, setup
from distwrap.launch import transport, worker
from distwrap.launch.base import Job, Launcher
from distwrap.launch.callers_models import given_models, say_what_stays
from distwrap.launch.outcome import Outcome, failure, success
from distwrap.launch.task import Assignment
from distwrap.strategies.base import Strategy
from distwrap.testing.simulation.scheduler import Fail
from distwrap.testing.simulation.simulation import Simulation


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
        if isinstance(strategy, Strategy) and type(strategy).join is not Strategy.join:
            raise OptionError(
                f"strategy={strategy!r} meets in a way of its own, which cannot be simulated: choose another launcher."
            )

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        simulation, outcomes = Simulation(job.nprocs, self.schedule), list[Outcome]()
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

        if self.fail is not None:
            simulation.scheduler.let_fail(self.fail)
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
