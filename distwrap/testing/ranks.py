"""Running of test bodies on several ranks."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from distwrap.checks import AT_LEAST_ONE
from distwrap.launch import base
from distwrap.launch.forkserver import ForkServerLauncher
from distwrap.launch.task import Task
from distwrap.options import Options

P = ParamSpec("P")
R = TypeVar("R")


def run_ranks(fn: Callable[..., R], nprocs: int, *args: Any, timeout: float = 30) -> list[R]:
    """Run a function on `nprocs` ranks from the warm fork server, and return every rank's value in rank order.

    Args:
        fn: the test body; in it the process group is set up.
        nprocs: how many ranks, also 1.
        *args: for `fn`.
        timeout: seconds for all of it. After that the Python stacks of the ranks are printed, and the ranks ended.

    Raises:
        WorkerTimeoutError: they were not done in time.
        BaseException: what a rank raised first.

    Example:
        >>> run_ranks(abs, 1, -3)
        [3]
    """
    return run_with(Options(timeout=timeout, returns="all"), fn, nprocs, *args, timeout=timeout)


def run_with(options: Options, fn: Callable[..., R], nprocs: int, *args: Any, timeout: float) -> list[R]:
    """Run a function on ranks as `run_ranks` does, under options of a run, which return all ranks' values."""
    nprocs = AT_LEAST_ONE("nprocs", nprocs)
    job = base.Job(Task(fn, args, {}, options), nprocs, seconds=timeout)
    values: list[R] = base.launch(ForkServerLauncher(), job)
    return values
