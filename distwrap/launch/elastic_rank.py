"""Ranks that torch elastic's agent starts, for a call under ``launcher="elastic"``: outcomes come home in files."""

import gc
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from distwrap.environments import Placement, detect
from distwrap.group.world import say
from distwrap.launch import worker
from distwrap.launch.logs import copied
from distwrap.launch.outcome import Outcome, first_cause, write_whole
from distwrap.launch.task import Assignment, Task
from distwrap.supervision import board

_AGENTS = ("TORCHELASTIC_", "TORCH_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")  # its variables


def be_a_rank(plan: Assignment, task: Task | None, folder: str, log_dir: str | None) -> None:
    """Be a rank that torch's agent has started."""
    code = 1
    try:
        with copied(log_dir, int(os.environ["RANK"])):
            code = worker.work(_FolderLink(plan, folder), task)
        if code == 0:
            gc.collect()  # a model that is garbage would keep the group's connections until all ranks are done
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code:
            # Of an exception, also of the one that torch's agent sends to the other ranks, torch's own worker would
            # leave a file that nobody removes. A forked process's exit handlers are its caller's.
            os._exit(1)


class _FolderLink:
    """The link of a rank that torch's agent has started: outcomes are files in a folder of the launch."""

    def __init__(self, plan: Assignment, folder: str) -> None:
        self._plan, self._folder = plan, Path(folder)
        self._attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def tie(self) -> None:
        worker.tie_to_parent()

    def assignment(self) -> Assignment:
        agents = {name: value for name, value in os.environ.items() if name.startswith(_AGENTS)}
        surroundings = self._plan.surroundings
        if surroundings is not None:
            surroundings = replace(surroundings, environ={**surroundings.environ, **agents})
        placement = detect(os.environ if surroundings is None else surroundings.environ)
        assert isinstance(placement, Placement)
        if self._plan.secret:  # all ranks are of this caller, and need no port to meet
            file = str(self._folder / f"store-{self._attempt}")
            placement = replace(placement, master_addr=None, master_port=None, job=file)
            board.hold(file, str(self._folder / f"{board.BOARD}-{self._attempt}"))
        self._placement = placement
        if placement.rank == 0 and self._attempt > 0:
            self._tell_of_restart()
        return replace(self._plan, surroundings=surroundings, placement=placement)

    def report(self, outcome: Outcome) -> None:
        file = self._folder / f"attempt-{self._attempt}.{outcome.rank}"
        write_whole(file, pickle.dumps((outcome, self._placement)))

    def _tell_of_restart(self) -> None:
        before = [outcome for outcome, _ in reports(self._folder, self._attempt - 1) if outcome.failed]
        why = "a rank, or a node, died without raising an exception"
        if before:
            cause = first_cause(before)
            if not cause.is_secondary:
                why = f"rank {cause.rank} on {cause.host} raised {cause.summary}"
        limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        say(f"restart {self._attempt} of at most {limit}: {why}")


def reports(folder: Path, attempt: int | None = None) -> list[tuple[Outcome, Placement]]:
    """Read what the ranks of an attempt, by default the last, have left, in rank order."""
    attempts: dict[int, list[tuple[Outcome, Placement]]] = {}
    for path in folder.glob("attempt-*.[0-9]*"):
        attempts.setdefault(int(path.stem.removeprefix("attempt-")), []).append(pickle.loads(path.read_bytes()))
    which = max(attempts, default=0) if attempt is None else attempt
    return sorted(attempts.get(which, []), key=lambda report: report[0].rank)
