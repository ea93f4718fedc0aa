"""Write checkpoints in a thread, one at a time, while training goes on."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from distwrap.checkpoint.plain import Staging
from distwrap.group.world import RunPart, World
from distwrap.simulated import simulation


class Writer(RunPart):
    """Background checkpoint writer; one per run and rank. A state waits until the previous one is written."""

    def __init__(self, world: World) -> None:
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, state: Any, write: Callable[[Any], None], *, tells: bool = True) -> None:
        """Copy a plain state, and write the copy in the background when the previous one is written.

        Args:
            state: plain values.
            write: writes the copy.
            tells: whether this rank raises a failure; if all ranks write a state, only rank 0 does.

        Raises:
            CheckpointError: the previous state could not be written.
        """
        self.wait()
        copy = self._staging.copied(state)

        def work() -> None:
            try:
                write(copy)
            except Exception as error:  # noqa: BLE001 - raised where somebody waits
                self._error = error if tells else None

        if simulation() is not None:
            work()
            return
        atexit.unregister(self._end_program)
        atexit.register(self._end_program)
        # Not a daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=work, name="distwrap-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the last state could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait without raising an error; an error that nobody has seen ends the program with exit code 1."""
        if self._thread is not None:
            self._thread.join()
        if self._error is None:
            atexit.unregister(self._end_program)

    def _end_program(self) -> None:
        """End the program with an error if the last state could not be written, and nobody has seen it."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - printed as any uncaught exception
            sys.excepthook(type(error), error, None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit handler cannot change the exit code otherwise
