"""``launcher="slurm"``: a call on a login node becomes a Slurm job, and gets its results; the extra ``submitit``.

submitit writes the batch script and submits it. The ranks are the tasks of the job; they meet, train and fail as under
any launcher, and leave how they ended in a folder that all nodes see.
Source: https://github.com/facebookincubator/submitit.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from distwrap.checks import AT_LEAST_ONE, SECONDS, whole
from distwrap.errors import LaunchError, OptionError
from distwrap.launch.base import Job, Launcher
from distwrap.launch.logs import Logs
from distwrap.launch.outcome import Outcome
from distwrap.launch.slurm_job import Beat, Collector, has_ended, state_of
from distwrap.launch.slurm_rank import rank_main
from distwrap.launch.task import Assignment
from distwrap.packages import require_package
from distwrap.wording import print_notice

# Options of sbatch that the launcher gives itself, or that would make another job than the one it looks at.
_OWN = {"nodes", "ntasks", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "time", "partition", "account"}
_OWN |= {"job_name", "signal", "output", "error", "array", "clusters", "wait", "parsable"}


class SlurmLauncher(Launcher):
    """Ranks that are the tasks of a Slurm job, which the call submits and waits for.

    Args:
        nodes: number of nodes, over which the ranks are spread evenly.
        cpus: CPUs of a rank, which is also its number of threads.
        gpus: number of GPUs on each node.
        minutes: time limit of the job.
        partition: partition of the cluster; by default the cluster's own default.
        account: account that is charged.
        folder: folder that all nodes see, for what the job reads and writes meanwhile; by default the current one.
        wait: seconds for the job to start.
        orphan_seconds: seconds without a sign of the caller, after which the job ends itself.
        parameters: other options of sbatch by their names, as ``{"constraint": "a100", "requeue": True}``.
        setup: lines of the batch script before the ranks start, as ``["module load cuda"]``.

    Raises:
        OptionError: an option has a wrong value.

    Example:
        >>> SlurmLauncher(nodes=2, partition="gpu").nodes
        2
    """

    name = "slurm"
    runs_one_rank = True
    writes_logs = True

    def __init__(
        self,
        *,
        nodes: int = 1,
        cpus: int = 1,
        gpus: int = 0,
        minutes: int = 60,
        partition: str | None = None,
        account: str | None = None,
        folder: str | None = None,
        wait: float = 86400.0,
        orphan_seconds: float = 300.0,
        parameters: Mapping[str, Any] | None = None,
        setup: Sequence[str] = (),
    ) -> None:
        for name, value in (("nodes", nodes), ("cpus", cpus), ("minutes", minutes)):
            AT_LEAST_ONE(f"SlurmLauncher: {name}", value)
        whole(0, "a whole number from 0")("SlurmLauncher: gpus", gpus)
        for name, seconds in (("wait", wait), ("orphan_seconds", orphan_seconds)):
            SECONDS(f"SlurmLauncher: {name}", seconds)
        self.nodes, self.cpus, self.gpus, self.minutes = nodes, cpus, gpus, minutes
        self.partition, self.account, self.folder, self.setup = partition, account, folder, list(setup)
        self.wait, self.orphan_seconds, self.parameters = wait, orphan_seconds, dict(parameters or {})
        if taken := _OWN.intersection(name.replace("-", "_") for name in self.parameters):
            raise OptionError(
                f"SlurmLauncher(parameters=...): {', '.join(sorted(taken))} cannot be given there. Use the "
                "launcher's own option where it has one, and nprocs= for the number of ranks; a job array is "
                "not possible."
            )

    def count(self, nprocs: int | Literal["auto"]) -> int:
        if nprocs == "auto" and not self.gpus:
            raise OptionError(
                "launcher='slurm': nprocs='auto' means one rank for each GPU of the job, and the job has none: "
                "say launcher='slurm(gpus=4)', with the number of GPUs of a node, or nprocs=."
            )
        number = self.nodes * self.gpus if nprocs == "auto" else nprocs
        if number % self.nodes:
            raise OptionError(f"launcher='slurm': {number} ranks cannot be spread evenly over {self.nodes} nodes.")
        return number

    def check(self, job: Job) -> None:
        require_package("submitit", "launcher='slurm'")
        if shutil.which("sbatch") is None:
            raise LaunchError(
                "launcher='slurm': there is no sbatch here. Call it on a node from which jobs are submitted."
            )

    def plan(self, job: Job) -> Assignment:
        return replace(super().plan(job), threads=self.cpus)

    def run(self, job: Job, plan: Assignment) -> Sequence[Outcome]:
        Logs(job.task.options.log_dir, ()).close()  # makes the folder, or refuses it
        with self._work_folder() as folder, Beat(folder), self._submitted(job, plan, folder) as number:
            print_notice(f"Slurm job {number} is submitted for {job.nprocs} ranks; Ctrl-C cancels it.")
            return Collector(folder, number, job.nprocs, wait=self.wait).collect()

    @contextlib.contextmanager
    def _work_folder(self) -> Iterator[Path]:
        """Make a folder that only this user may read, in that which all nodes see; remove it in the end."""
        place = Path(self.folder or os.getcwd()).resolve()
        try:
            folder = Path(tempfile.mkdtemp(prefix=".distwrap-slurm-", dir=place))
        except OSError as error:
            raise LaunchError(
                f"launcher='slurm' keeps what the job reads and writes in {place}, which cannot be written ({error}): "
                f"say launcher='slurm(folder=...)', a folder that all nodes see."
            ) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _submitted(self, job: Job, plan: Assignment, folder: Path) -> Iterator[str]:
        """Submit the job, and yield its number; cancel it where it has not ended by itself."""
        import submitit

        executor = submitit.SlurmExecutor(folder, max_num_timeout=0, max_pickle_size_gb=math.inf)
        options: dict[str, Any] = {
            "job_name": job.task.name.removesuffix("()"),
            "nodes": self.nodes,
            "ntasks_per_node": job.nprocs // self.nodes,
            "cpus_per_task": self.cpus,
            "time": self.minutes,
            "signal_delay_s": min(90, 15 * self.minutes),  # it would end a rank that has just begun
            # srun takes over the batch script's CPUs of a task by this variable alone, since Slurm 22.05.
            "setup": [
                "export SUBMITIT_LOG_LEVEL=CRITICAL",
                "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
                *self.setup,
            ],
            "additional_parameters": {name.replace("_", "-"): value for name, value in self.parameters.items()},
        }
        given = {"gpus_per_node": self.gpus or None, "partition": self.partition, "account": self.account}
        executor.update_parameters(**options, **{name: value for name, value in given.items() if value is not None})
        log_dir = job.task.options.log_dir and os.path.abspath(job.task.options.log_dir)
        refusals = (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError)
        try:
            with _interrupts_wait():  # between sbatch's work and its answer, a job would stay
                number = str(executor.submit(rank_main, plan, str(folder), self.orphan_seconds, log_dir).job_id)
        except refusals as error:
            raise LaunchError(f"Slurm has refused the job: {_refusal(str(error))}.") from error
        try:
            yield number
        finally:
            if not has_ended(state_of(number)):
                _cancel(number)


def _cancel(number: str) -> None:
    """Cancel a job, or print that the user must cancel it."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run(["scancel", number], timeout=60, capture_output=True).returncode == 0:
            return
    print_notice(f"Slurm job {number} could not be cancelled. Run `scancel {number}` by hand")


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay a Ctrl-C to the end of a ``with``, here and in processes that are started in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refusal(words: str) -> str:
    """Return what sbatch has said, out of submitit's error.

    Example:
        >>> _refusal("Traceback ...\\nsbatch: error: invalid partition specified: gpu\\n")
        'invalid partition specified: gpu'
    """
    lines = [line.partition("sbatch: error:")[2].strip() for line in words.splitlines() if "sbatch: error:" in line]
    return " ".join(lines) or words.strip()
