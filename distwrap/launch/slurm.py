"""``launcher="slurm"``: a call on a login node becomes a Slurm job, and gets its results; the extra ``submitit``.

submitit writes the batch script and submits it. The ranks are the tasks of the job; they meet, train and fail as under
any launcher, and leave how they ended in a folder that all nodes see.
Source: https://github.com/facebookincubator/submitit.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TextIO

from distwrap.checks import AT_LEAST_ONE, SECONDS
from distwrap.errors import ArrivalError, LaunchError, OptionError, WorkerDiedError, WorkerTimeoutError
from distwrap.launch.base import Job, Launcher
from distwrap.launch.outcome import Outcome, first_cause, of_error, raise_failure
from distwrap.launch.slurm_rank import BEAT, be_a_rank, outcome_file
from distwrap.launch.supervisor import CAUSE_SECONDS, SETTLE_SECONDS
from distwrap.launch.task import Assignment
from distwrap.packages import require_package
from distwrap.wording import named_ranks, print_notice

_LOOK_SECONDS = 0.5
_STATE_SECONDS = 2.0  # between questions to Slurm's controller, which serves everybody
_FILE_SECONDS = 10.0  # for a file of a node to be seen here, on a shared file system
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "PREEMPTED")


class SlurmLauncher(Launcher):
    """Ranks that are the tasks of a Slurm job, which the call submits and waits for.

    Args:
        nodes: of the job, over which the ranks are spread evenly.
        cpus: CPUs of a rank, which is also its number of threads.
        gpus: GPUs of a node.
        minutes: that the job may take, after which Slurm ends it.
        partition: of the cluster; by default its own default.
        account: that the job is charged to.
        folder: that all nodes see, for what the job reads and writes meanwhile; by default the current one.
        wait: seconds for the job to start.
        orphan_seconds: after which the job ends itself when the caller was killed.
        parameters: other options of sbatch by their names, as ``{"constraint": "a100", "requeue": True}``.
        setup: lines of the batch script before the ranks start, as ``["module load cuda"]``.

    Raises:
        OptionError: one of them is of no such kind.

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
            AT_LEAST_ONE(f"SlurmLauncher({name}=)", value)
        for name, seconds in (("wait", wait), ("orphan_seconds", orphan_seconds)):
            SECONDS(f"SlurmLauncher({name}=)", seconds)
        self.nodes, self.cpus, self.gpus, self.minutes = nodes, cpus, gpus, minutes
        self.partition, self.account, self.folder, self.setup = partition, account, folder, list(setup)
        self.wait, self.orphan_seconds, self.parameters = wait, orphan_seconds, dict(parameters or {})

    def count(self, nprocs: int | Literal["auto"]) -> int:
        if nprocs == "auto" and not self.gpus:
            raise OptionError(
                "launcher='slurm': nprocs='auto' is one rank for each GPU of the job, and it has none: say "
                "launcher='slurm(gpus=4)', with the number of GPUs of a node, or nprocs=."
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
        with self._work_folder() as folder, self._submitted(job, plan, folder) as number:
            print_notice(f"Slurm job {number} is submitted for {job.nprocs} ranks; Ctrl-C cancels it.")
            return _Watch(self, job, number, folder).collect()

    @contextmanager
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

    @contextmanager
    def _submitted(self, job: Job, plan: Assignment, folder: Path) -> Iterator[str]:
        """Submit the job, and yield its number; cancel it where it has not ended by itself."""
        import submitit

        (folder / BEAT).write_text("0")
        executor = submitit.SlurmExecutor(folder, max_num_timeout=0)
        options: dict[str, Any] = {
            "job_name": job.task.name.removesuffix("()"),
            "nodes": self.nodes,
            "ntasks_per_node": job.nprocs // self.nodes,
            "cpus_per_task": self.cpus,
            "time": self.minutes,
            "setup": ["export SUBMITIT_LOG_LEVEL=CRITICAL", *self.setup],
            "additional_parameters": {name.replace("_", "-"): value for name, value in self.parameters.items()},
        }
        given = {"gpus_per_node": self.gpus or None, "partition": self.partition, "account": self.account}
        executor.update_parameters(**options, **{name: value for name, value in given.items() if value is not None})
        log_dir = job.task.options.log_dir and os.path.abspath(job.task.options.log_dir)
        try:
            number = str(executor.submit(be_a_rank, plan, str(folder), self.orphan_seconds, log_dir).job_id)
        except submitit.core.utils.FailedJobError as error:
            raise LaunchError(f"Slurm has refused the job: {_refusal(str(error))}.") from error
        try:
            yield number
        finally:
            if _state(number)[0] in (*_QUEUED, *_RUNNING):
                subprocess.run(["scancel", number], check=False, timeout=60, capture_output=True)


class _Watch:
    """The caller's work while its job runs: it shows what the ranks print, and takes what they leave.

    Args:
        launcher: whose job it is.
        job: what runs.
        number: Slurm's, of the job.
        folder: of the job.
    """

    def __init__(self, launcher: SlurmLauncher, job: Job, number: str, folder: Path) -> None:
        self._launcher, self._job, self._number, self._folder = launcher, job, number, folder
        streams = (("out", sys.stdout), ("err", sys.stderr))
        self._logs = [
            _Log(folder / f"{number}_{rank}_log.{kind}", console)
            for rank in range(job.nprocs)
            for kind, console in streams
        ]
        self._state, self._asked, self._beats = ("PENDING", "", ""), 0.0, 0

    def collect(self) -> list[Outcome]:
        """Wait for all outcomes, after a failure only for those that may tell more of it.

        Raises:
            BaseException: what a rank raised first.
            ArrivalError: the job did not start in time.
            WorkerTimeoutError: the ranks were not done in time.
        """
        started, deadline, began = False, math.inf, time.monotonic()
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self._job.nprocs and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            self._look()
            state, reason, _ = self._state
            if state in _QUEUED and not started and time.monotonic() > began + self._launcher.wait:
                raise ArrivalError(
                    f"Slurm job {self._number} did not start within {self._launcher.wait:g} s; Slurm's reason: "
                    f"{reason}. It is cancelled."
                )
            if state not in _QUEUED and not started:
                started = True
                deadline = math.inf if self._job.seconds is None else time.monotonic() + self._job.seconds
            new = self._new(set(range(self._job.nprocs)) - set(outcomes))
            outcomes.update(new)
            failed = [outcome for outcome in outcomes.values() if outcome.failed]
            if any(outcome.failed for outcome in new.values()):
                patience = CAUSE_SECONDS if first_cause(failed).is_secondary else SETTLE_SECONDS
                deadline = min(deadline, time.monotonic() + patience + _FILE_SECONDS * (self._launcher.nodes > 1))
            if state not in (*_QUEUED, *_RUNNING) and len(outcomes) < self._job.nprocs:
                outcomes.update(self._ended_without_a_word(outcomes))
        self._look()
        failed = [outcome for outcome in outcomes.values() if outcome.failed]
        if failed:
            raise_failure(failed, [outcome.rank for outcome in outcomes.values() if not outcome.failed])
        left = set(range(self._job.nprocs)) - set(outcomes)
        if left:
            raise WorkerTimeoutError(
                f"{named_ranks(left)} of {self._job.nprocs} in Slurm job {self._number} did not finish within "
                f"{self._job.seconds:g} s.",
                rank=min(left),
            )
        return [outcomes[rank] for rank in sorted(outcomes)]

    def _look(self) -> None:
        """Say that the caller is there, show what is new in the logs, and ask for the job's state now and then."""
        self._beats += 1
        beat = self._folder / f"{BEAT}.new"
        beat.write_text(str(self._beats))
        beat.replace(self._folder / BEAT)
        for log in self._logs:
            log.show()
        if time.monotonic() > self._asked + _STATE_SECONDS:
            self._state, self._asked = _state(self._number), time.monotonic()

    def _new(self, ranks: set[int]) -> dict[int, Outcome]:
        """Return the outcomes that these ranks have left by now. The files are of this user's own job."""
        files = {rank: outcome_file(self._folder, rank) for rank in ranks}
        return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}

    def _ended_without_a_word(self, known: Mapping[int, Outcome]) -> dict[int, Outcome]:
        """Return the deaths of those of whom nothing is known, once the job has ended."""
        deadline = time.monotonic() + _FILE_SECONDS
        missing = set(range(self._job.nprocs)) - set(known)
        found: dict[int, Outcome] = {}
        while missing - set(found) and time.monotonic() < deadline:
            found.update(self._new(missing - set(found)))
            time.sleep(_LOOK_SECONDS)
        self._look()
        state, reason, exit_code = self._state
        for rank in missing - set(found):
            died = WorkerDiedError(
                f"rank {rank} of Slurm job {self._number} ended without a word: the job is {state} (reason: {reason}, "
                f"exit code {exit_code}). What it printed last is above.",
                rank=rank,
            )
            found[rank] = of_error(rank, "?", 0, died)
        return found


class _Log:
    """The log of one rank, which is shown as it grows, whole lines at a time."""

    def __init__(self, path: Path, console: TextIO) -> None:
        self._path, self._console, self._shown = path, console, 0

    def show(self) -> None:
        """Print the lines that are new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        for line in whole.decode(errors="replace").splitlines(keepends=True):
            if not line.startswith("submitit "):  # which logs there too
                self._console.write(line)
        self._console.flush()


def _state(number: str) -> tuple[str, str, str]:
    """Return a job's state, reason and exit code in Slurm's words; a job that Slurm has forgotten is ``"gone"``."""
    asked = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", number], capture_output=True, text=True, timeout=60
    )
    words = dict(word.split("=", 1) for word in asked.stdout.split() if "=" in word)
    if asked.returncode and "Invalid job id" not in asked.stderr:
        return "RUNNING", f"scontrol does not answer: {asked.stderr.strip()}", ""  # the controller may come back
    return words.get("JobState", "gone"), words.get("Reason", "unknown"), words.get("ExitCode", "unknown")


def _refusal(words: str) -> str:
    """Return what sbatch has said, out of submitit's error.

    Example:
        >>> _refusal("Traceback ...\\nsbatch: error: invalid partition specified: gpu\\n")
        'invalid partition specified: gpu'
    """
    lines = [line.partition("sbatch: error:")[2].strip() for line in words.splitlines() if "sbatch: error:" in line]
    return " ".join(lines) or words.strip()
