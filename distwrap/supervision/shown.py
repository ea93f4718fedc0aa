"""Figures that ranks show on the board of their node; without torch, so that `where` and `top` start at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAME, ANSWER = "live", "told"  # names of notes: a rank's figures, and where all ranks are


@dataclass(frozen=True)
class Shown:
    """Figures of a rank, as it has last shown them.

    Attributes:
        rank: its number.
        pid: of its process.
        host: on which it is.
        device: on which it computes.
        step: number of batches that its innermost loop has had, or of averages of gradients; ``None`` without either.
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
