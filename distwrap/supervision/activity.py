"""Last activity of a rank, for the reports of ranks that hang or are gone."""

import inspect
import os
import weakref
from collections.abc import Iterable
from typing import Any

from distwrap._internals.torch_data import batches_given

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Activity:
    """Last helper that the user's code called, from where, and how far its loader is.

    Attributes:
        helper: name of the helper, or empty.
        site: file and line of the call.
    """

    def __init__(self, world: object) -> None:
        self.helper = ""
        self.site = ""
        self._batches: weakref.ref[Any] | None = None

    def record(self, helper: str) -> None:
        """Note that a helper runs, and who called it."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        self.helper = helper
        self.site = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""

    def follow(self, batches: Iterable[Any]) -> None:
        """Take the step from a loader's iterator when it is asked for: counting here would cost each step."""
        self._batches = weakref.ref(batches)

    @property
    def step(self) -> int | None:
        """Number of batches that the last loader has given; ``None`` where nobody counts."""
        batches = self._batches() if self._batches is not None else None
        step = getattr(batches, "step", None)  # of a lockstep loop
        return step if isinstance(step, int) else batches_given(batches)

    def wait(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...

    def __str__(self) -> str:
        return f"{self.helper} at {self.site}" if self.helper else ""
