"""What a rank shows while it runs, on the board of its node, to whoever looks from another process of the same user."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distwrap.devices.kinds import kind_of
from distwrap.environments import Placement
from distwrap.network import memory_file
from distwrap.supervision.bells import BOARD
from distwrap.supervision.board import Board
from distwrap.supervision.hang_report import Activity, Location
from distwrap.supervision.notes import RankNotes

NAME = "live"
_SECONDS = 1.0  # between two times that a rank shows itself
_WINDOW = 40  # looks, four a second, over which idleness and speed are told


class Live:
    """This rank's figures, looked at in the channel's thread.

    Args:
        notes: among which they are shown.
        placement: this rank's place.
        activity: the last helper that ran on this rank.
        location: returns where the rank is.
    """

    def __init__(
        self, notes: RankNotes, placement: Placement, activity: Activity, location: Callable[[], Location]
    ) -> None:
        self._notes, self._rank, self._activity, self._location = notes, placement.rank, activity, location
        self._shown = 0.0
        self._idle: deque[bool] = deque(maxlen=_WINDOW)
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._state = f"/proc/self/task/{threading.main_thread().native_id}/stat"
        self.device = torch.device("cpu")

    def look(self) -> None:
        """Note whether the main thread computes, and how far it is; now and then show it."""
        if not memory_file.ARE_POSSIBLE:  # nobody could find the board
            return
        now = time.monotonic()
        with suppress(OSError, IndexError):
            self._idle.append(Path(self._state).read_bytes().rpartition(b")")[2].split()[0] in (b"S", b"D"))
        step = self._step()
        if self._steps and (step or 0) < self._steps[-1][1]:  # another loop
            self._steps.clear()
        self._steps.append((now, step or 0))
        if now - self._shown >= _SECONDS:
            self._shown = now
            self._notes.show(NAME, self._figures())

    def _step(self) -> int | None:
        """Return how many batches the loop has had, or where nobody counts them, how many averages of gradients."""
        step = self._activity.step
        return self._activity.averages()[1] // 2 or None if step is None else step

    def _figures(self) -> dict[str, Any]:
        (began, first), (now, last) = self._steps[0], self._steps[-1]
        peak = kind_of(self.device).peak_memory(self.device)
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "device": str(self.device),
            "step": self._step(),
            "speed": (last - first) / (now - began) if now > began else 0.0,
            "idle": sum(self._idle) / max(1, len(self._idle)),
            "where": str(self._location()),
            "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "device_memory": peak,
            "shown": self._activity.bar(),
            "time": time.time(),
        }


@dataclass(frozen=True)
class Run:
    """A run that is under way on this node.

    Attributes:
        holder: the process that holds its board: who called it, or one of its ranks.
        figures: what each of its ranks has shown.
    """

    holder: int
    figures: list[dict[str, Any]]

    def has(self, pid: int) -> bool:
        """Return whether a process is its caller or one of its ranks."""
        return pid == self.holder or any(shown["pid"] == pid for shown in self.figures)


def runs() -> list[Run]:
    """Return the runs of this user that are under way on this node, as their ranks have last shown themselves."""
    found: dict[int, Run] = {}
    for process in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        for path in _boards_of(process):
            with suppress(OSError):
                number = os.stat(path).st_ino
                figures = [] if number in found else _shown_on(path)
                if figures:
                    found[number] = Run(process, figures)
    return list(found.values())


def _boards_of(process: int) -> list[str]:
    """Return the paths of the boards that a process has open; none where it is gone, or another user's."""
    boards = []
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{fd}"
            with suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{BOARD}"):
                    boards.append(path)
    return boards


def _shown_on(path: str) -> list[dict[str, Any]]:
    fd = os.open(path, os.O_RDWR)
    try:
        ranks = Board.ranks_in(os.fstat(fd).st_size)
        if not ranks:
            return []  # no rank has come yet
        board = Board(fd, ranks, texts=True)
    finally:
        os.close(fd)
    return [shown for rank in range(ranks) if (shown := board.read(rank).get(NAME))]
