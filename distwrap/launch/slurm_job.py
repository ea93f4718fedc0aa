"""A Slurm job under way, as its caller sees it: its state, what its ranks print, and the outcomes that they leave."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple, TextIO

from distwrap.errors import ArrivalError, WorkerDiedError
from distwrap.launch.outcome import Outcome, OutcomeFolder, collect, died, raise_if_failed, write_whole
from distwrap.launch.slurm_rank import BEAT
from distwrap.launch.supervisor import EXIT_SECONDS
from distwrap.wording import print_notice

_LOOK_SECONDS = 0.5
_STATE_SECONDS = 2.0  # between questions to Slurm's controller, which serves everybody
_FIRST_SECONDS = 0.25  # until the first question, which is followed by later ones, once all ranks are done
_FILE_SECONDS = 10.0  # for a file of a node to be seen here, on a shared file system
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


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
        self._folder, self._number, self._wait, self._missing = folder, number, wait, set(range(nprocs))
        self._logs = [
            _Log(folder / f"{number}_{rank}_log.{kind}", console)
            for rank in range(nprocs)
            for kind, console in (("out", sys.stdout), ("err", sys.stderr))
        ]
        self._state, self._asked = State("PENDING"), 0.0

    def collect(self) -> list[Outcome]:
        """Wait for all outcomes, after a failure only for those that may tell more of it.

        Raises:
            BaseException: what a rank raised first.
            ArrivalError: the job did not start in time.
        """
        outcomes = collect(self._receive)
        self._let_end()
        raise_if_failed(outcomes)
        return sorted(outcomes, key=lambda outcome: outcome.rank)

    def _receive(self, seconds: float | None, _: object) -> list[Outcome]:
        """Wait for more outcomes, for a while after Slurm's own news of a death."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds + _STATE_SECONDS
        began, told = time.monotonic(), self._state
        while self._missing and time.monotonic() < deadline:
            self._look()
            if self._state.name not in _QUEUED:
                began = time.monotonic()  # a job may come back to the queue
            elif self._state != told:
                told = self._state
                print_notice(f"Slurm job {self._number} is {told.name}, reason: {told.reason}")
            if time.monotonic() > began + self._wait:
                raise ArrivalError(
                    f"Slurm job {self._number} did not start within {self._wait:g} s; Slurm's reason: "
                    f"{self._state.reason}. It is cancelled."
                )
            ended = has_ended(self._state)  # before the files are looked for, of which there is no more then
            if new := self._new() or (self._without_a_word() if ended else []):
                return new
        return []

    def _look(self) -> None:
        """Print new lines of the logs, and ask for the job's state now and then."""
        time.sleep(_LOOK_SECONDS)
        for log in self._logs:
            log.show()
        if time.monotonic() > self._asked + _STATE_SECONDS:
            self._ask()

    def _ask(self) -> None:
        """Ask Slurm for the job's state; where it gives no answer, the last one stands."""
        self._state, self._asked = state_of(self._number) or self._state, time.monotonic()

    def _new(self) -> list[Outcome]:
        """Return the outcomes that ranks have left since the last look. The files are of this user's own job."""
        new = [outcome for outcome, _ in OutcomeFolder(self._folder).read() if outcome.rank in self._missing]
        self._missing -= {outcome.rank for outcome in new}
        return new

    def _without_a_word(self) -> list[Outcome]:
        """Return, once the job has ended, the deaths of the ranks that have left no outcome after a while."""
        deadline = time.monotonic() + _FILE_SECONDS
        while time.monotonic() < deadline:
            self._look()
            if new := self._new():
                return new
        words = "Look at what it printed last."
        if not any(log.is_there for log in self._logs):
            words = (
                f"There is no log of it: do the nodes see {self._folder.parent}? If not, say "
                "launcher='slurm(folder=...)', a folder that they see."
            )
        text = (
            f"died without raising an exception: the job is {self._state.name} (reason: {self._state.reason}, exit "
            f"code {self._state.exit_code}). {words}"
        )
        missing, self._missing = sorted(self._missing), set()
        return [
            died(WorkerDiedError(f"rank {rank} of Slurm job {self._number} {text}", rank=rank), rank)
            for rank in missing
        ]

    def _let_end(self) -> None:
        """Wait for the job's own end, for exit handlers and last words, and show these."""
        deadline, pause = time.monotonic() + EXIT_SECONDS + _STATE_SECONDS, _FIRST_SECONDS
        while not has_ended(self._state) and time.monotonic() < deadline:
            time.sleep(pause)
            self._ask()
            for log in self._logs:
                log.show()
            pause = min(2 * pause, _STATE_SECONDS)
        for log in self._logs:
            log.show(rest=True)


class _Log:
    """The log of one rank, which is shown as it grows, whole lines at a time.

    Attributes:
        is_there: whether the node has made it.
    """

    def __init__(self, path: Path, console: TextIO) -> None:
        self._path, self._console, self._shown = path, console, 0
        self.is_there = False

    def show(self, *, rest: bool = False) -> None:
        """Print the lines that are new; also a last one without an end, where there is no more to come."""
        new = _read(self._path, self._shown)
        if new is None:
            return
        self.is_there = True
        whole = new if rest else new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        self._console.write(whole.decode(errors="replace"))
        self._console.flush()


class Beat:
    """A file that changes while the caller is there, from a thread, since its console may keep it waiting."""

    def __init__(self, folder: Path) -> None:
        self._file, self._ended = folder / BEAT, threading.Event()
        self._file.write_text("0")
        self._thread = threading.Thread(target=self._run, name="distwrap-slurm-beat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        beats = 0
        while not self._ended.wait(_LOOK_SECONDS):
            beats += 1
            with contextlib.suppress(OSError):  # a full disk, or a server that is away for a moment
                write_whole(self._file, str(beats).encode())


def _read(path: Path, start: int = 0) -> bytes | None:
    """Return what is in a file from a place on; ``None`` where it cannot be read now."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError:
        return None


def has_ended(state: State | None) -> bool:
    """Return whether a job has ended, by its state; a job with an unknown state has not.

    Example:
        >>> has_ended(State("TIMEOUT")), has_ended(State("RUNNING")), has_ended(None)
        (True, False, False)
    """
    return state is not None and state.name not in (*_QUEUED, *_RUNNING)


def state_of(number: str) -> State | None:
    """Ask Slurm for a job's state; return ``None`` without an answer, since the controller may come back."""
    command = ["scontrol", "--oneliner", "show", "job", number]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode:
        return State("gone") if "Invalid job id" in asked.stderr else None
    words = dict(word.split("=", 1) for word in asked.stdout.split() if "=" in word)
    return State(words.get("JobState", "gone"), words.get("Reason", "unknown"), words.get("ExitCode", "unknown"))
