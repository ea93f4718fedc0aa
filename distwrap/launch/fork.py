"""``launcher="fork"``: ranks that are copies of this process."""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Pipe

from distwrap._internals.python import forget_exit_handlers
from distwrap._internals.torch import import_compiler
from distwrap.errors import ForkError
from distwrap.group.setup import import_before_group
from distwrap.launch import fork_safety, openmp, worker
from distwrap.launch.base import Job
from distwrap.launch.local import LocalLauncher
from distwrap.launch.logs import Streams
from distwrap.launch.processes import Process, standard_streams
from distwrap.launch.task import Assignment, Task
from distwrap.seeding import RandomState


class ForkLauncher(LocalLauncher):
    """Copies of this process: nothing is pickled, and nothing is imported again."""

    name = "fork"
    start_method = "fork"
    _was_used = False  # in this process

    def check(self, job: Job) -> None:
        refusal = fork_safety.refusal()
        if refusal:
            raise ForkError(f"launcher='fork' is not safe here: {refusal}. Use launcher='forkserver' or 'spawn'.")

    def plan(self, job: Job) -> Assignment:
        plan = replace(self.plan_in_place(job), random=RandomState.capture())
        import_before_group()  # once here, and not in every rank
        if ForkLauncher._was_used:  # the first launch would wait for it, and its ranks may not need it
            before = set(os.environ)
            import_compiler()
            for name in set(os.environ) - before:
                del os.environ[name]  # torch sets it anew where it uses its compiler
        ForkLauncher._was_used = True
        # Without the pause more than one thread would hang in the first large kernel.
        return plan if openmp.pause() else replace(plan, threads=1)

    def start(self, job: Job, rank: int, earlier: Sequence[Process], streams: Streams | None) -> Process:
        return ForkedProcess(rank, job.task, earlier, streams)


class ForkedProcess(Process):
    """A copy of this process.

    Args:
        rank: the rank.
        task: what it is to run.
        earlier: the ranks' processes that were started before, whose connections the copy lets go of.
        streams: its standard output and error; by default this process's.
    """

    def __init__(self, rank: int, task: Task, earlier: Sequence[Process], streams: Streams | None = None) -> None:
        self.rank = rank
        self.conn, theirs = Pipe()
        foreign = [self.conn, *(process.conn for process in earlier)]
        stdin = os.dup(standard_streams()[0])

        def run() -> None:
            os.dup2(stdin, 0)  # multiprocessing has put /dev/null there
            os.close(stdin)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            if streams is not None:
                os.dup2(streams[0], 1)
                os.dup2(streams[1], 2)
                # The caller's own may lead elsewhere, as in a notebook.
                sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
            for conn in foreign:
                conn.close()
            forget_exit_handlers()  # the caller's own are the caller's
            worker.rank_main(theirs, task)

        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=run, name=f"distwrap-rank-{rank}")
        with warnings.catch_warnings():
            # Python >= 3.12 warns of any native thread; which ones matter was checked before.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        os.close(stdin)
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def exitcode(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def close(self) -> None:
        super().close()
        if self._process.exitcode is not None:
            self._process.close()
