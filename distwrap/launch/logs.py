"""What ranks print, in a file a rank besides the console.

Each rank writes into pipes, and one thread of the caller copies them: so the last words of a rank that crashed are
kept, and those of what it started.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from distwrap.errors import OptionError

Streams = tuple[int, int]  # descriptors of standard output and error

DRAIN_SECONDS = 2.0  # after the ranks' ends, for what still holds their pipes
LINE_SECONDS = 0.2  # until the beginning of a line goes to the console, as that of a progress bar


class Logs:
    """The files of a launch, and the thread that fills them.

    Args:
        folder: made where it is not there; files in it are appended to.
        ranks: whose.

    Raises:
        OptionError: the folder or a file cannot be written.
    """

    def __init__(self, folder: str, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._copies: list[_Copy] = []
        self._given: list[Streams] = []
        self._thread = threading.Thread(target=self._pump, name="distwrap-logs", daemon=True)
        self._ended = threading.Event()
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for rank in ranks:
                self._given.append((self._open(folder, rank, 1), self._open(folder, rank, 2)))
        except OSError as error:
            self._close_all()
            raise OptionError(f"log_dir={folder!r} cannot be written: {error}.") from error

    def _open(self, folder: str, rank: int, console: int) -> int:
        name = f"rank_{rank}.{'stdout' if console == 1 else 'stderr'}.log"
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        readable, writable = os.pipe()
        self._copies.append(_Copy(readable, file, os.path.join(folder, name), os.dup(console)))
        return writable

    def streams(self, rank: int) -> Streams:
        """Return the descriptors that are to be a rank's standard output and error."""
        return self._given[self._ranks.index(rank)]

    def start(self, keep: int = 0) -> None:
        """Begin to copy. All ranks are started: a thread before would make forking unsafe.

        Args:
            keep: how many of the first ranks' streams this process goes on using itself.
        """
        for streams in self._given[keep:]:
            for fd in streams:
                os.close(fd)
        del self._given[keep:]
        self._thread.start()

    def close(self) -> None:
        """Copy what is left, and end; after the ranks have ended."""
        self._ended.set()
        for fd in (fd for streams in self._given for fd in streams):
            os.close(fd)
        self._given.clear()
        if self._thread.is_alive():
            self._thread.join()
        self._close_all()

    def _close_all(self) -> None:
        for fd in (fd for streams in self._given for fd in streams):
            os.close(fd)
        for copy in self._copies:
            copy.close()
        self._given, self._copies = [], []

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


class _Waiting(NamedTuple):
    text: bytes
    since: float


class _Copy:
    """One stream of a rank on its way to its file and to the console."""

    def __init__(self, readable: int, file: int, path: str, console: int) -> None:
        self.readable = readable
        self._file: int | None = file
        self._path = path
        self._console = console
        self._waiting = _Waiting(b"", 0.0)

    def take(self, data: bytes) -> None:
        """Write what was read: to the file at once, to the console in whole lines, which ranks then do not mix."""
        if self._file is not None and data:
            try:
                _write(self._file, data)
            except OSError as error:
                self._close_file()
                print(
                    f"distwrap: {self._path} is not complete: {error}. The run goes on, and so does the console.",
                    file=sys.stderr,
                    flush=True,
                )
        lines, _, rest = (self._waiting.text + data).rpartition(b"\n")
        self._show(lines + b"\n" if _ else b"")
        self._waiting = _Waiting(rest, time.monotonic())
        if not data:
            self._show(rest)
            self._waiting = _Waiting(b"", 0.0)

    def show_what_waits(self) -> None:
        """Show the beginning of a line whose end does not come."""
        if self._waiting.text and time.monotonic() - self._waiting.since > LINE_SECONDS:
            self._show(self._waiting.text)
            self._waiting = _Waiting(b"", 0.0)

    def _show(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a console that is closed
            _write(self._console, text)

    def close(self) -> None:
        os.close(self.readable)
        os.close(self._console)
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def redirected(streams: Streams | None) -> Iterator[None]:
    """Let this process itself print to a rank's streams for the time of a ``with``."""
    if streams is None:
        yield
        return
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
