"""What a rank shows while it runs, on the board of its node, to whoever looks from another process of the same user."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from distwrap.devices.kinds import kind_of
from distwrap.environments import Placement
from distwrap.environments.identity import process_status
from distwrap.network import memory_file
from distwrap.network.waiting import wait_until
from distwrap.supervision.bells import BOARD
from distwrap.supervision.board import Board
from distwrap.supervision.hang_report import Activity, Location
from distwrap.supervision.notes import RankNotes
from distwrap.wording import named_ranks

NAME, _TOLD = "live", "told"
_ASK_SECONDS = 5.0  # for a rank to ask all others
_WINDOW = 10.0  # seconds over which idleness and speed are told
_LOOKS = 40  # in these
_TICK = 0.5  # seconds between two looks, at most where the machine is not overwhelmed


@dataclass(frozen=True)
class Shown:
    """Figures of a rank, as it has last shown them.

    Attributes:
        rank: its number.
        pid: of its process.
        host: on which it is.
        device: on which it computes.
        step: number of batches that its innermost loop has had; ``None`` where nobody counts.
        speed: steps a second.
        idle: share of the time in which its main thread did not want to compute; ``None`` where the system tells none.
        location: where it is, as a `Location` has it; ``None`` where it has left.
        memory: bytes of its process.
        device_memory: most bytes that it has had on its device; ``None`` where that has none of its own.
        bar: what a progress bar shows beside how far it is.
        time: of day, at which it showed all this.
    """

    rank: int
    pid: int
    host: str
    device: str
    step: int | None
    speed: float
    idle: float | None
    location: list[Any] | None
    memory: int
    device_memory: int | None
    bar: str
    time: float


class Live:
    """This rank's figures, looked at in the channel's thread.

    Args:
        notes: among which they are shown.
        placement: this rank's place.
        activity: the last helper that ran on this rank.

    Attributes:
        device: of this rank.
    """

    def __init__(self, notes: RankNotes, placement: Placement, activity: Activity) -> None:
        self._notes, self._rank, self._activity = notes, placement.rank, activity
        self._busy: deque[tuple[float, float]] = deque(maxlen=_LOOKS)
        self._steps: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # how many there were, as more came
        self._of_loops: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._averages = 0
        # The main thread's number is the process's; Python's word for it is out of date in a fork.
        self._clock = Path(f"/proc/self/task/{os.getpid()}/schedstat")
        self.device = torch.device("cpu")

    def look(self) -> None:
        """Note how long the main thread has computed, and how far it is."""
        now = time.monotonic()
        with suppress(OSError, ValueError):
            ran, waited_for_core, _ = map(int, self._clock.read_bytes().split())
            self._busy.append((now, (ran + waited_for_core) / 1e9))
        if more := self._new_steps():
            self._steps.append((now, self._steps[-1][1] + more))
        while len(self._steps) > 2 and now - self._steps[1][0] > _WINDOW:
            self._steps.popleft()

    def _new_steps(self) -> int:
        """Return how many steps came since the last look, of the loop or in averages of gradients: what shows more."""
        loop, step, averages = self._activity.loop, self._activity.step or 0, self._activity.averages()[1] // 2
        before, self._averages = self._averages, averages
        more = averages - before if averages >= before else averages  # they may be counted anew
        if loop is not None:
            before = self._of_loops.get(loop, 0)
            more = max(more, step - before if step >= before else step)
            self._of_loops[loop] = step
        return more

    def show(self, location: Location | None) -> None:
        """Show this rank to whoever looks from outside.

        Args:
            location: where it is; ``None`` where it has left.
        """
        if memory_file.ARE_POSSIBLE:  # else nobody could find the board
            self._notes.show(NAME, asdict(self._figures(location)))

    def tell(self, text: str) -> None:
        """Show where all ranks are, for who has asked from outside."""
        self._notes.show(_TOLD, [time.time(), text])

    def _figures(self, location: Location | None) -> Shown:
        step = self._activity.step
        return Shown(
            rank=self._rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(self.device),
            step=self._activity.averages()[1] // 2 or None if step is None else step,
            speed=self._speed(time.monotonic()),
            idle=self._idle(),
            location=None if location is None else list(location),
            memory=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            device_memory=kind_of(self.device).peak_memory(self.device),
            bar=self._activity.bar(),
            time=time.time(),
        )

    def _speed(self, now: float) -> float:
        """Return the steps a second: up to the last one, or where the next one is overdue, up to now."""
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        if last == first:
            return 0.0
        is_overdue = now - ended > _TICK + (ended - began) / (last - first)
        return (last - first) / ((now if is_overdue else ended) - began)

    def _idle(self) -> float | None:
        if len(self._busy) < 2:
            return None
        (began, before), (now, after) = self._busy[0], self._busy[-1]
        return min(1.0, max(0.0, 1 - (after - before) / (now - began)))


@dataclass(frozen=True)
class Run:
    """A run that is under way on this node.

    Attributes:
        holder: the process that called it, where that has its board; else the first of its ranks.
        processes: all that have its board, and those that have started them.
        figures: what each of its ranks here has shown.
        ranks: how many there are, on all nodes.
        board: its path.
    """

    holder: int
    processes: set[int]
    figures: list[Shown]
    ranks: int
    board: str = ""

    @property
    def elsewhere(self) -> str:
        """Words for the ranks that do not show themselves here; empty where all do."""
        missing = set(range(self.ranks)) - {shown.rank for shown in self.figures}
        if not missing:
            return ""
        return f"{named_ranks(missing)} {'is' if len(missing) == 1 else 'are'} on another node, or not there yet"


def runs() -> list[Run]:
    """Return the runs of this user that are under way on this node, as their ranks have last shown themselves."""
    boards: dict[tuple[int, int], str] = {}
    holders: dict[tuple[int, int], list[int]] = {}
    for process in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        for path, number in _boards_of(process):
            boards.setdefault(number, path)
            holders.setdefault(number, []).append(process)
    found = []
    for number, path in boards.items():
        with suppress(OSError):
            ranks, figures = _shown_on(path)
            if figures:
                above = {process: _above(process) for process in holders[number]}
                first = next(process for process in above if above[process].isdisjoint(above))
                found.append(Run(first, set(above).union(*above.values()), figures, ranks, path))
    return found


def _boards_of(process: int) -> list[tuple[str, tuple[int, int]]]:
    """Return the boards of this user that a process has open, each with its number; none where it is gone."""
    boards = []
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{fd}"
            with suppress(OSError):
                if os.path.basename(os.readlink(path)).removeprefix("memfd:").startswith(BOARD):
                    file = os.stat(path)
                    if file.st_uid == os.geteuid():  # root could read others' too
                        boards.append((path, (file.st_dev, file.st_ino)))
    return boards


def _above(process: int) -> set[int]:
    """Return the processes that have started a process, directly or not."""
    found = set()
    with suppress(OSError, ValueError):
        while process := int(process_status(process)[1][1]):
            found.add(process)
    return found


def where_all_are(run: Run) -> str:
    """Return where the ranks of all nodes are, for which one of those here is asked; empty where it does not answer."""
    with suppress(OSError):
        board, _ = _opened(run.board)
        rank = max(run.figures, key=lambda shown: shown.time).rank
        before = board.read(rank).get(_TOLD)
        board.ask(rank)
        told = wait_until(lambda: board.read(rank).get(_TOLD) not in (None, before), _ASK_SECONDS)
        return str(board.read(rank)[_TOLD][1]) if told else ""
    return ""


def _opened(path: str) -> tuple[Board, int]:
    """Return a board, and for how many ranks it is.

    Raises:
        OSError: it is gone, or no rank has come yet.
    """
    fd = os.open(path, os.O_RDWR)
    try:
        ranks = Board.ranks_in(os.fstat(fd).st_size)
        if not ranks:
            raise FileNotFoundError(path)
        return Board(fd, ranks, texts=True), ranks
    finally:
        os.close(fd)


def _shown_on(path: str) -> tuple[int, list[Shown]]:
    """Return for how many ranks a board is, and what those on it have shown."""
    board, ranks = _opened(path)
    found = []
    for rank in range(ranks):
        with suppress(TypeError):  # of another version of distwrap
            found.append(Shown(**board.read(rank).get(NAME, {})))
    return ranks, found
