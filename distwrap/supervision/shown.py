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
        pid: the number of its process.
        host: the name of its host.
        device: its device.
        step: the number of batches that its innermost loop has had, or of averages of gradients; ``None`` without
            either.
        speed: steps per second.
        idle: the share of the time in which its main thread did not compute; ``None`` if the system does not tell.
        location: where it is, as the values of a `Location`; ``None`` if it has left.
        memory: bytes of its process.
        device_memory: the most bytes that it has used on its device; ``None`` if the device has no memory of its own.
        bar: the text that a progress bar shows beside its progress.
        time: the time of day at which it showed these figures.
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
