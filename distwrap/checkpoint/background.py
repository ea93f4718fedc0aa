"""Writing of checkpoints in a thread, one at a time, while training goes on."""

import threading
from collections.abc import Callable
from typing import Any

from distwrap.checkpoint.plain import Staging
from distwrap.group.world import RunPart, World


class Writer(RunPart):
    """Background checkpoint writer; one per run, on rank 0. A state waits until the one before it is written."""

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
        """Wait without raising an error: the run has failed already, or `settle` has raised it."""
        if self._thread is not None:
            self._thread.join()
