"""Whether the main thread of this process moves."""

from __future__ import annotations

import time

from distwrap.supervision import stacks

IDLE_CPU = 0.05  # of a core; who uses less, and stays in the same line, does not move


class StallDetector:
    """Notices when the main thread does not move: the same place, and hardly any CPU time of the process."""

    def __init__(self) -> None:
        self.still_since = time.monotonic()
        self.told = False
        self._mark: tuple[int, int] | None = None
        self._cpu = time.process_time()
        self._time = time.monotonic()

    def look(self) -> tuple[bool, float]:
        """Say whether it has moved since the last look, and for how many seconds it has not."""
        frame = stacks.frame_of(stacks.main_thread())
        mark = (id(frame), frame.f_lasti) if frame is not None else None
        del frame
        cpu, now = time.process_time(), time.monotonic()
        moved = mark != self._mark or cpu - self._cpu > IDLE_CPU * (now - self._time)
        self._mark, self._cpu, self._time = mark, cpu, now
        return moved, now - self.still_since
