"""Running of test bodies on several ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from distwrap import tracebacks
from distwrap.checks import AT_LEAST_ONE
from distwrap.launch import base
from distwrap.launch.forkserver import ForkServerLauncher
from distwrap.launch.task import Task
from distwrap.options import Options
from distwrap.testing.exactness import Computing

R = TypeVar("R")


def run_ranks(fn: Callable[..., R], nprocs: int, *args: Any, timeout: float = 30) -> list[R]:
    """Run a function on `nprocs` ranks from the warm fork server, and return the values of all ranks in rank order.

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
    return Launch(Options(timeout=timeout, returns="all"), AT_LEAST_ONE("nprocs", nprocs), timeout)(fn, *args)


@dataclass(frozen=True)
class Launch:
    """Launch of a function on ranks, which may be called many times.

    Attributes:
        options: of the run, which returns all ranks' values.
        nprocs: number of ranks.
        timeout: seconds for a call.
        dtype: in which the nets of behaviours compute.
    """

    options: Options
    nprocs: int
    timeout: float
    dtype: torch.dtype = torch.float64

    def __call__(self, fn: Callable[..., R], *args: Any, nprocs: int | None = None, **options: Any) -> list[R]:
        """Run a function on as many ranks as were said, or on others, under `options` besides; see `run_ranks`."""
        if self.dtype != torch.float64:
            fn = Computing(fn, self.dtype)
        task = Task(fn, args, {}, self.options.updated(options))
        job = base.Job(task, nprocs or self.nprocs, seconds=self.timeout)
        try:
            values: list[R] = base.launch(ForkServerLauncher(), job)
        except BaseException as error:
            tracebacks.fold(error)
            raise
        return values
