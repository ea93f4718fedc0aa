"""Write one state at a time in a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from distwrap.checkpoint.plain import Staging
from distwrap.group.world import RunPart, World


class Writer(RunPart):
    """Background writer of a run's checkpoints, on rank 0; a state that comes during a write waits for its end."""

    def __init__(self, world: World) -> None:
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, state: Any, write: Callable[[Any], None]) -> None:
        """Copy a plain state, and write the copy in the background, after what is being written now.

        Raises:
            Exception: that of the state before, which could not be written.
        """
        self.wait()
        copy = self._staging.copied(state)

        def work() -> None:
            try:
                write(copy)
            except Exception as error:  # noqa: BLE001 - raised where somebody waits
                self._error = error

        # Not a daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=work, name="distwrap-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            Exception: what was being written could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait, and raise the failure of what could not be written."""
        self.wait()

    def close(self) -> None:
        """Wait, and say nothing of a failure: the run has failed already, or has been told."""
        if self._thread is not None:
            self._thread.join()
