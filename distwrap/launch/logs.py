"""Files of what ranks print, beside the console.

Each rank writes into pipes, and one thread of the caller copies them: so the last words of a rank that crashed are
kept, and those of what it started.
"""

import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from distwrap.errors import OptionError
from distwrap.wording import print_notice

Streams = tuple[int, int]  # descriptors of standard output and error

DRAIN_SECONDS = 2.0  # after the ranks' ends, for processes that still hold their pipes
LINE_SECONDS = 0.2  # until the beginning of a line goes to the console, as that of a progress bar


class Logs:
    """The files of a launch, and the thread that fills them.

    Args:
        folder: made where it is not there; files in it are appended to. ``None`` where the ranks write to this
            process's own streams, and nothing is copied.
        ranks: the ranks that write.

    Raises:
        OptionError: the folder or a file cannot be written.
    """

    def __init__(self, folder: str | None, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._copies: list[_Copy] = []
        self._thread = threading.Thread(target=self._pump, name="distwrap-logs", daemon=True)
        self._ended = threading.Event()
        if folder is None:
            return
        try:
            os.makedirs(folder, exist_ok=True)
            for rank in ranks:
                for console, path in _files(folder, rank):
                    self._copies.append(_Copy(path, console))
        except OSError as error:
            self.close()
            raise OptionError(f"log_dir={folder!r} cannot be written: {error}.") from error

    def streams(self, rank: int) -> Streams | None:
        """Return the descriptors that are to be a rank's standard output and error; ``None`` for this process's."""
        if not self._copies:
            return None
        index = 2 * self._ranks.index(rank)
        return self._copies[index].writable, self._copies[index + 1].writable

    def start(self, keep: int = 0) -> None:
        """Begin to copy. All ranks are started: a thread before would make forking unsafe.

        Args:
            keep: number of the first ranks whose streams this process goes on using itself.
        """
        for copy in self._copies[2 * keep :]:
            copy.release()
        if self._copies:
            self._thread.start()

    def close(self) -> None:
        """Copy what is left, and end; after the ranks have ended."""
        self._ended.set()
        for copy in self._copies:
            copy.release()
        if self._thread.is_alive():
            self._thread.join()
        for copy in self._copies:
            copy.close()
        self._copies = []

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for copy in self._copies:
                selector.register(copy.readable, selectors.EVENT_READ, copy)
            deadline = float("inf")
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(LINE_SECONDS):
                    data = os.read(key.fd, 1 << 16)
                    key.data.take(data)
                    if not data:
                        selector.unregister(key.fd)
                for copy in self._copies:
                    copy.show_what_waits()
                if self._ended.is_set() and deadline == float("inf"):
                    deadline = time.monotonic() + DRAIN_SECONDS


class _Copy:
    """One stream of a rank on its way to its file and to the console.

    Attributes:
        readable: end of the pipe that is copied.
        writable: end of the pipe into which the rank writes.
    """

    def __init__(self, path: str, console: int) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - `close` closes it
        self._console = os.dup(console)
        self.readable, self.writable = os.pipe()
        self._waiting, self._since = b"", 0.0

    def take(self, data: bytes) -> None:
        """Write what was read: to the file at once, to the console in whole lines, which ranks then do not mix."""
        if not self._file.closed:
            try:
                _write(self._file.fileno(), data)
            except OSError as error:
                self._file.close()
                print_notice(
                    f"{self._path} is not complete: {error}. The run goes on, and the console still shows everything."
                )
        text = self._waiting + data
        self._show(text, text.rfind(b"\n") + 1 if data else len(text))

    def show_what_waits(self) -> None:
        """Show the beginning of a line whose end has not come."""
        if self._waiting and time.monotonic() - self._since > LINE_SECONDS:
            self._show(self._waiting, len(self._waiting))

    def _show(self, text: bytes, end: int) -> None:
        """Write a text to the console up to `end`, and keep the rest."""
        self._waiting, self._since = text[end:], time.monotonic()
        with suppress(OSError):  # a console that is closed
            _write(self._console, text[:end])

    def release(self) -> None:
        """Close the rank's end of the pipe in this process."""
        if self.writable >= 0:
            os.close(self.writable)
            self.writable = -1

    def close(self) -> None:
        """Close the other end, and the file."""
        os.close(self.readable)
        os.close(self._console)
        self._file.close()


@contextmanager
def redirected(streams: Streams | None) -> Iterator[None]:
    """Let this process itself print to a rank's streams for the time of a ``with``."""
    if streams is None:
        yield
        return
    if any(_descriptor(stream) != number for number, stream in ((1, sys.stdout), (2, sys.stderr))):
        print_notice("sys.stdout was replaced, as in a notebook, so what Python prints is not written to log_dir.")
    _flush()
    before = [os.dup(1), os.dup(2)]
    try:
        for number, given in enumerate(streams, start=1):
            os.dup2(given, number)
        yield
    finally:
        _flush()
        for number, own in enumerate(before, start=1):
            os.dup2(own, number)
            os.close(own)


@contextmanager
def copied(folder: str | None, rank: int) -> Iterator[None]:
    """Copy what a rank prints that another program has started, for the time of a ``with`` at whose end it ends.

    A process copies each stream, so that the last words of a rank that crashes are kept.
    """
    if folder is None:
        yield
        return
    tees, pipes = [], []
    for console, path in _files(folder, rank):
        readable, writable = os.pipe()
        tees.append(subprocess.Popen(["tee", "-ai", path], stdin=readable, stdout=console, start_new_session=True))
        pipes.append(writable)
        os.close(readable)
    # In a fork the caller's own may lead elsewhere, as in a notebook.
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    try:
        with redirected((pipes[0], pipes[1])):
            for pipe in pipes:
                os.close(pipe)
            yield
    finally:
        for tee in tees:
            with suppress(subprocess.TimeoutExpired):
                tee.wait(DRAIN_SECONDS)


def _files(folder: str, rank: int) -> Iterator[tuple[int, str]]:
    """Yield the descriptors of standard output and error, each with the file of what a rank writes there."""
    for console, name in ((1, "stdout"), (2, "stderr")):
        yield console, os.path.join(folder, f"rank_{rank}.{name}.log")


def _descriptor(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return -1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
