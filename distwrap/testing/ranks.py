"""Running of test bodies on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from distwrap import tracebacks
from distwrap.checks import AT_LEAST_ONE
from distwrap.launch import base
from distwrap.launch.forkserver import ForkServerLauncher
from distwrap.launch.task import Task
from distwrap.options import TEST_RANKS, Options
from distwrap.registry import strategies

if TYPE_CHECKING:
    from distwrap.testing.simulation.scheduler import Fail

R = TypeVar("R")


def run_ranks(fn: Callable[..., R], nprocs: int, *args: Any, timeout: float = 30) -> list[R]:
    """Run a function on `nprocs` ranks from the warm fork server, and return the values of all ranks in rank order.

    Where there are fewer accelerators than ranks, they share them.

    Args:
        fn: the body of the test; the process group is set up when it runs.
        nprocs: the number of ranks, which may be 1.
        *args: the arguments of `fn`.
        timeout: seconds for the whole call. When they are over, the Python stacks of the ranks are printed, and the
            ranks are killed.

    Raises:
        WorkerTimeoutError: the ranks did not finish in time.
        BaseException: the exception that a rank raised first.

    Example:
        >>> run_ranks(abs, 1, -3)
        [3]
    """
    return launch_ranks(nprocs, Options(timeout=timeout, returns="all", share_devices=True), timeout, fn, *args)


def launch_ranks(nprocs: int, options: Options, timeout: float, fn: Callable[..., R], *args: Any) -> list[R]:
    """Run a function on ranks under options, which return all ranks' values; see `run_ranks`."""
    job = base.Job(Task(fn, args, {}, options), AT_LEAST_ONE("nprocs", nprocs), seconds=timeout)
    return _launched(_launcher(), job)


def _launched(launcher: base.Launcher, job: base.Job) -> list[Any]:
    """Return the values of all ranks; an exception comes without our frames."""
    try:
        values: list[Any] = base.launch(launcher, job)
    except BaseException as error:
        tracebacks.fold(error)
        raise
    return values


def _launcher() -> base.Launcher:
    """Return the launcher of test bodies: real ranks, or simulated ones where the variable says so."""
    if os.environ.get(TEST_RANKS) == "simulate":
        from distwrap.testing.simulation.simulation import SimulateLauncher

        return SimulateLauncher()
    return ForkServerLauncher()


def simulate(
    fn: Callable[..., R],
    nprocs: int,
    *args: Any,
    schedule: int | Iterable[int] | None = None,
    fail: Fail | None = None,
    **options: Any,
) -> list[R]:
    """Run a function on simulated ranks, threads of this process, and return the values of all in rank order.

    Exactly one rank runs, and it gives up its turn only where it waits in a collective, for a
    message, at a store, or in ``time.sleep``. So a plain ``breakpoint()`` stops all, and one run is one order.

    Args:
        fn: the function; the process group is set up when it runs.
        nprocs: the number of ranks.
        *args: the arguments of `fn`; each rank gets copies, as by pickling.
        schedule: a number draws another order of the turns; several numbers run it once for each, and return the values
            of the last.
        fail: ``(rank, event)``: this rank dies at the event of this number, from 1, with no handler run. Or a function
            of a rank, an event's number, and the event in words, which returns ``"die"``, an exception that the event
            raises, by how many simulated seconds the rank is late, or ``None``. Events are collectives, messages, and
            operations on stores and files.
        **options: of ``@distributed``, as ``strategy="fsdp"``.

    Raises:
        DeadlockError: no rank can go on.
        CollectiveError: the ranks are in different collectives.
        WorkerDiedError: a rank died, as `fail` asked.
        BaseException: the exception that a rank raised first.

    Example:
        >>> simulate(abs, 2, -3)
        [3, 3]
    """
    from distwrap.testing.simulation.simulation import SimulateLauncher

    values: list[R] = []
    for seed in [schedule] if schedule is None or isinstance(schedule, int) else schedule:
        chosen = Options(returns="all").updated(options)
        task = Task(fn, args, {}, replace(chosen, strategy=strategies.make(chosen.strategy)))
        launcher = SimulateLauncher(seed, fail)
        job = base.Job(task, AT_LEAST_ONE("nprocs", nprocs))
        launcher.check(job)
        values = _launched(launcher, job)
    return values
