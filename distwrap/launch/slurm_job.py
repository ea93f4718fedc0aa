"""A Slurm job under way, as its caller sees it: its state, what its ranks print, and the outcomes that they leave."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TextIO

from distwrap.errors import ArrivalError, WorkerDiedError
from distwrap.launch.outcome import Outcome, of_error, patience_after, raise_if_failed
from distwrap.launch.slurm_rank import BEAT, outcome_file
from distwrap.launch.supervisor import EXIT_SECONDS

_LOOK_SECONDS = 0.5
_STATE_SECONDS = 2.0  # between questions to Slurm's controller, which serves everybody
_FILE_SECONDS = 10.0  # for a file of a node to be seen here, on a shared file system
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "PREEMPTED")


class State(NamedTuple):
    """A job's state in Slurm's words.

    Attributes:
        name: ``"gone"`` for a job that Slurm has forgotten.
        reason: for waiting, or for the end.
        exit_code: of the job, and the signal that ended it.
    """

    name: str
    reason: str = "unknown"
    exit_code: str = "unknown"


class Collector:
    """The outcomes of a job's ranks, as they come; what the ranks print is shown meanwhile.

    Args:
        folder: of the job.
        number: Slurm's, of the job.
        nprocs: number of ranks.
        wait: seconds for the job to start.
    """

    def __init__(self, folder: Path, number: str, nprocs: int, *, wait: float) -> None:
        self._folder, self._number, self._nprocs, self._wait = folder, number, nprocs, wait
        self._logs = [
            _Log(folder / f"{number}_{rank}_log.{kind}", console)
            for rank in range(nprocs)
            for kind, console in (("out", sys.stdout), ("err", sys.stderr))
        ]
        self._state, self._asked, self._beats = State("PENDING"), 0.0, 0

    def collect(self) -> list[Outcome]:
        """Wait for all outcomes, after a failure only for those that may tell more of it.

        Raises:
            BaseException: what a rank raised first.
            ArrivalError: the job did not start in time.
        """
        deadline, began, started = math.inf, time.monotonic(), False
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self._nprocs and time.monotonic() < deadline:
            self._look()
            started = started or self._state.name not in _QUEUED
            if not started and time.monotonic() > began + self._wait:
                raise ArrivalError(
                    f"Slurm job {self._number} did not start within {self._wait:g} s; Slurm's reason: "
                    f"{self._state.reason}. It is cancelled."
                )
            ended = has_ended(self._state)  # before the files are looked for, of which there is no more then
            new = self._new(outcomes)
            outcomes.update(new)
            failed = [outcome for outcome in outcomes.values() if outcome.failed]
            if any(outcome.failed for outcome in new.values()):
                deadline = min(deadline, time.monotonic() + patience_after(failed) + _STATE_SECONDS)
            if ended:
                outcomes.update(self._without_a_word(outcomes))
        self._let_end()
        raise_if_failed(outcomes.values())
        return [outcomes[rank] for rank in sorted(outcomes)]

    def _look(self) -> None:
        """Say that the caller is there, show what is new in the logs, and ask for the job's state now and then."""
        time.sleep(_LOOK_SECONDS)
        self._beats += 1
        beat = self._folder / f"{BEAT}.new"
        beat.write_text(str(self._beats))
        beat.replace(self._folder / BEAT)
        for log in self._logs:
            log.show()
        if time.monotonic() > self._asked + _STATE_SECONDS:
            self._state, self._asked = state_of(self._number) or self._state, time.monotonic()

    def _new(self, known: Iterable[int]) -> dict[int, Outcome]:
        """Return the outcomes that the other ranks have left by now. The files are of this user's own job."""
        files = {rank: outcome_file(self._folder, rank) for rank in set(range(self._nprocs)) - set(known)}
        return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}

    def _without_a_word(self, known: Iterable[int]) -> dict[int, Outcome]:
        """Return what the other ranks have left, once the job has ended, and the deaths of those who left nothing."""
        missing, found = set(range(self._nprocs)) - set(known), dict[int, Outcome]()
        deadline = time.monotonic() + _FILE_SECONDS
        while missing - set(found) and time.monotonic() < deadline:
            self._look()
            found.update(self._new({*known, *found}))
        for rank in missing - set(found):
            died = WorkerDiedError(
                f"rank {rank} of Slurm job {self._number} ended without a word: the job is {self._state.name} (reason: "
                f"{self._state.reason}, exit code {self._state.exit_code}). What it printed last is above.",
                rank=rank,
            )
            found[rank] = of_error(rank, "?", 0, died)
        return found

    def _let_end(self) -> None:
        """Wait for the job's own end, for exit handlers and last words, and show these."""
        deadline = time.monotonic() + EXIT_SECONDS + _STATE_SECONDS
        while not has_ended(self._state) and time.monotonic() < deadline:
            self._look()
        for log in self._logs:
            log.show(rest=True)


class _Log:
    """The log of one rank, which is shown as it grows, whole lines at a time."""

    def __init__(self, path: Path, console: TextIO) -> None:
        self._path, self._console, self._shown = path, console, 0

    def show(self, *, rest: bool = False) -> None:
        """Print the lines that are new; also a last one without an end, where there is no more to come."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new if rest else new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        self._console.write(whole.decode(errors="replace"))
        self._console.flush()


def has_ended(state: State | None) -> bool:
    """Tell whether a job has ended, by its state; what is unknown has not.

    Example:
        >>> has_ended(State("TIMEOUT")), has_ended(State("RUNNING")), has_ended(None)
        (True, False, False)
    """
    return state is not None and state.name not in (*_QUEUED, *_RUNNING)


def state_of(number: str) -> State | None:
    """Ask Slurm for a job's state; ``None`` where it gives no answer: its controller may come back."""
    command = ["scontrol", "--oneliner", "show", "job", number]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode:
        return State("gone") if "Invalid job id" in asked.stderr else None
    words = dict(word.split("=", 1) for word in asked.stdout.split() if "=" in word)
    return State(words.get("JobState", "gone"), words.get("Reason", "unknown"), words.get("ExitCode", "unknown"))
