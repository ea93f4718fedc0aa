"""Writing of checkpoints in a thread, one at a time, while training goes on."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from distwrap.checkpoint.plain import Staging
from distwrap.errors import CheckpointError
from distwrap.group.world import RunPart, World


class Writer(RunPart):
    """Background checkpoint writer; one per run and rank. A state waits until the one before it is written."""

    def __init__(self, world: World) -> None:
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._what = ""

    def write(self, state: Any, write: Callable[[Any], None], what: str, *, tells: bool = True) -> None:
        """Copy a plain state, and write the copy in the background, after what is being written now.

        Args:
            state: plain values.
            write: writes a copy of them.
            what: is written, for the error at the program's end.
            tells: whether this rank raises what fails; of a state that all ranks write, rank 0 alone does.

        Raises:
            Exception: that of the state before, which could not be written.
        """
        self.wait()
        copy, self._what = self._staging.copied(state), what

        def work() -> None:
            try:
                write(copy)
            except Exception as error:  # noqa: BLE001 - raised where somebody waits
                self._error = error if tells else None

        atexit.unregister(self._end_program)
        atexit.register(self._end_program)
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

    def close(self) -> None:
        """Wait without raising an error; one of which nobody has been told makes the program end with it."""
        if self._thread is not None:
            self._thread.join()
        if self._error is None:
            atexit.unregister(self._end_program)

    def _end_program(self) -> None:
        """Let the program end with an error where the last state could not be written, and nobody has been told."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - told like any that nobody has caught
            told = CheckpointError(f"{self._what} was not written in the background: {type(error).__name__}: {error}.")
            told.__cause__ = error
            sys.excepthook(CheckpointError, told, None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit handler cannot change the code in another way
