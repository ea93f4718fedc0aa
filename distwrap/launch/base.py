"""The protocol of launchers: check in the caller, plan, run, and return to the caller the values of the ranks."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distwrap import protocols, retrofit
from distwrap.devices.cpus import allowed_cpus, choose_threads, too_many_ranks
from distwrap.devices.selection import choose_nprocs, visible_devices
from distwrap.errors import LaunchError, SerializationError, WorkerError
from distwrap.group.world import say_once
from distwrap.launch import pickling, transport
from distwrap.launch.outcome import CleanExit, Outcome, raise_if_failed
from distwrap.launch.task import Assignment, CallerContext, NodePlan, Task
from distwrap.network import secret
from distwrap.wording import named_ranks


@dataclass(frozen=True)
class Job:
    """A task that is to run on several ranks.

    Attributes:
        task: what is to run.
        nprocs: number of ranks that this node starts.
        nodes: the nodes that take part.
        seconds: time limit for the whole run; ``None`` where there is none.
    """

    task: Task
    nprocs: int
    nodes: NodePlan = field(default_factory=NodePlan)
    seconds: float | None = None

    @property
    def returns(self) -> Literal["rank0", "all", "gathered"]:
        """Whose value goes home."""
        wanted = self.task.options.returns
        return "gathered" if wanted == "all" and self.nodes.several else wanted


class Launcher(protocols.Launcher):
    __doc__ = protocols.Launcher.__doc__

    def count(self, nprocs: int | Literal["auto"]) -> int:
        return choose_nprocs(nprocs, visible_devices())

    def plan(self, job: Job) -> Assignment:
        payload = transport.pack(job.task)
        path, module = self._main(job, payload)
        plan = replace(self.plan_in_place(job), main_path=path, main_module=module)
        return replace(plan, payload=payload, context=CallerContext.capture())

    def plan_in_place(self, job: Job) -> Assignment:
        """Return the plan for ranks that have the call and the caller's context already."""
        inherited = b"" if job.nodes.several else secret.new()
        return Assignment(self.name, job.returns, choose_threads(job.nprocs), secret=inherited)

    def collect_result(self, job: Job, outcomes: Sequence[Outcome]) -> Any:
        task = job.task
        found = retrofit.find(task.function, task.args, task.kwargs) if task.options.retrofit else []
        own = [item.original for item in found]
        values = []
        for index, outcome in enumerate(self._checked(job, outcomes)):
            if outcome.value is not None:
                value, states = transport.unpack_result(outcome.value, own)
                if index == 0 and not isinstance(value, CleanExit):
                    for item, state in zip(found, states, strict=True):
                        item.load(state)
                values.append(value)
        if self.summary is not None:
            return self.summary
        return values if job.returns == "all" else values[0]

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(options)})"

    def _checked(self, job: Job, outcomes: object) -> list[Outcome]:
        """Return what `run` has returned, in rank order, if it is an outcome of each rank and none failed."""
        known = [each for each in outcomes if isinstance(each, Outcome)] if isinstance(outcomes, Sequence) else []
        raise_if_failed(known)
        ranks = {outcome.rank for outcome in known}
        if not len(ranks) == len(known) >= job.nprocs:  # elastic may have more, of nodes that came and went
            seen = f"those of {named_ranks(ranks)}" if ranks else repr(outcomes)
            raise LaunchError(
                f"launcher={job.task.options.launcher!r}: run() must return the outcomes of the {job.nprocs} ranks "
                f"of this node, one each, and has returned {seen}."
            )
        return sorted(known, key=lambda outcome: outcome.rank)

    def _main(self, job: Job, payload: bytes) -> tuple[str | None, str | None]:
        """Return the script, or the module, that a rank must import first, where something of it goes by reference."""
        if pickling.by_value() or b"__main__" not in payload:
            return None, None
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        if spec is not None:  # python -m package.train
            return None, str(spec.name)
        path: str | None = getattr(main, "__file__", None)
        if path is None or not os.path.exists(path):
            raise SerializationError(
                f"{job.task.name} or an argument is defined interactively, and launcher={self.name!r} sends "
                f"things by name. Install cloudpickle (pip install 'distwrap[notebook]') to send it by value."
            )
        return os.path.abspath(path), None


def tell_of_crowd(count: int) -> None:
    """Print a line, before ranks are started on this node, where there are far more than it has CPUs to run them."""
    if not visible_devices().count and (words := too_many_ranks(count, len(allowed_cpus()))):
        say_once("too many ranks", words)


def launch(launcher: protocols.Launcher, job: Job) -> Any:
    """Run a job by a launcher that has checked it, and return what the decorated call returns."""
    outcomes = launcher.run(job, launcher.plan(job))
    value = launcher.collect_result(job, outcomes)
    values = value if job.task.options.returns == "all" and isinstance(value, list) else [value]
    left = [rank for rank, each in enumerate(values) if isinstance(each, CleanExit)]
    if len(left) == len(values):
        sys.exit(0)
    if left:
        raise WorkerError(
            f"{named_ranks(left)} left {job.task.name} by sys.exit(0), so there is no value of theirs, and "
            "returns='all' asks for the values of all ranks: let every rank return."
        )
    return value
