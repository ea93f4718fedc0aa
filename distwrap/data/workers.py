"""Loader workers whose failures are explained, and which leave nothing behind where they or their rank are killed.

multiprocessing gives each worker a folder of its own for sockets, and a worker that is killed leaves it. Here all
workers of a rank share one. The rank removes it when it ends; its launcher, when the rank did not come to that; and
when both are gone the workers do, which then end themselves.
"""

import atexit
import contextlib
import multiprocessing.util
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from distwrap import locked_folder
from distwrap._internals.python import multiprocessing_settings
from distwrap._internals.torch_data import forget_ended_workers
from distwrap.environments.identity import has_ended, node
from distwrap.errors import LoaderError
from distwrap.group.world import RunPart, World, current_world
from distwrap.wording import first_line

_KIND = "workers"  # of temporary folders
_PID = "pid-"  # files named after the workers
_KEY = "tempdir"  # where multiprocessing keeps the folder's name
_LOOK_SECONDS = 0.5
_ORPHAN_SECONDS = 10.0  # that a worker without its rank stays, to remove what is left
_SOCKET_ROOM = (107 if sys.platform == "linux" else 103) - len("/distwrap-workers-12345678/listener-12345678")


class WorkerFolder(RunPart):
    """Folder of the workers that this process starts from now on; made where multiprocessing has none yet."""

    def __init__(self, world: World) -> None:
        self._settings = multiprocessing_settings()
        self._orphan: _Orphan | None = None
        if self._settings.get(_KEY) is None:
            remove_what_is_left()
            folder = locked_folder.make(_KIND, _place())
            self._settings[_KEY] = str(folder)
            self._orphan = _Orphan(folder, os.getpid())
            multiprocessing.util.register_after_fork(self._orphan, _Orphan.watch)
            atexit.register(self._remove_folder)

    def close(self) -> None:
        """Remove the folder; at the end of the process where a worker still runs, which would complain at its own."""
        if self._orphan is not None and not any(
            (self._orphan.folder / f"{_PID}{child.pid}").exists() for child in multiprocessing.active_children()
        ):
            self._remove_folder()

    def _remove_folder(self) -> None:
        orphan, self._orphan = self._orphan, None  # multiprocessing holds it weakly
        if orphan is not None:
            self._settings.pop(_KEY, None)
            _remove_batches(orphan.folder)
            locked_folder.remove(orphan.folder)
            atexit.unregister(self._remove_folder)


def explain_failures(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the workers' batches; where they fail for a limit of the node, raise an error with advice.

    Raises:
        LoaderError: names the limit, and how to lift it.
    """
    try:
        yield from batches
    except (RuntimeError, OSError) as error:
        advice = _advice(str(error))
        if not advice:
            raise
        rank = current_world().placement.rank
        raise LoaderError(
            f"rank {rank} on {socket.gethostname()}: a loader with workers failed with {first_line(error)!r}. {advice}"
        ) from error


def _advice(text: str) -> str:
    if "ancdata" in text or "Too many open files" in text:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"Each batch on its way is an open file, and this process may have {soft}: say `ulimit -n {hard}` before "
            f"the run, or take fewer workers or a smaller prefetch_factor."
        )
    if "Bus error" in text or "shared memory" in text or "No space left on device" in text:
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage("/dev/shm")
            return (
                f"Batches travel through /dev/shm, of which {usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB "
                f"are free: give a container more (docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir "
                f"with medium: Memory at /dev/shm), or take fewer workers or a smaller prefetch_factor."
            )
    return ""


@contextlib.contextmanager
def news_kept_away() -> Iterator[None]:
    """Keep torch from raising the error of a loader's worker that has ended badly: in a ``with``, and after it.

    For the main thread, in which torch raises it wherever that is just then, also while another error is handled.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        forget_ended_workers()
        signal.signal(signal.SIGCHLD, before)


def remove_what_is_left() -> None:
    """Remove what the workers of ranks have left that have ended, of whatever launch."""
    locked_folder.remove_abandoned(_KIND, first=_remove_batches, place=_place())


def _place() -> str:
    """Return where temporary files go, or /tmp, where a socket's path would be too long there: no batch would come."""
    place = tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= _SOCKET_ROOM or not os.access("/tmp", os.W_OK) else "/tmp"


def _remove_batches(folder: Path, *, all_end: bool = False) -> None:
    """Remove what the workers have put into shared memory, if they are gone or, as they say themselves, all end."""
    for note in folder.glob(f"{_PID}*"):
        pid = int(note.name.removeprefix(_PID))
        # Workers of one rank that end at once remove the same folder.
        with contextlib.suppress(FileNotFoundError):
            # A number means something in its own container alone, and there it may be another's by now.
            if note.read_text() == node() and (all_end or has_ended(pid)):
                # A worker that is killed while it passes a batch on leaves the batch's name.
                for batch in Path("/dev/shm").glob(f"torch_{pid}_*"):
                    batch.unlink(missing_ok=True)


class _Orphan:
    """Thread in a worker that removes the folder and ends the worker when its rank is gone."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank = folder, rank

    def watch(self) -> None:
        """Start the thread in a worker, and in nothing that the worker starts."""
        if os.getppid() == self._rank:
            with contextlib.suppress(OSError):
                (self.folder / f"{_PID}{os.getpid()}").write_text(node())
            threading.Thread(target=self._run, name="distwrap-orphan", daemon=True).start()
            sys.excepthook = self._complain

    def _complain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print what multiprocessing's thread has caught, but for a rank that fetches a batch no more."""
        if not isinstance(error, (EOFError, ConnectionError)):
            sys.__excepthook__(kind, error, trace)

    def _run(self) -> None:
        while os.getppid() == self._rank:
            time.sleep(_LOOK_SECONDS)
        try:
            _remove_batches(self.folder, all_end=True)
            deadline = time.monotonic() + _ORPHAN_SECONDS
            remove_what_is_left()
            # A process is no parent any more before the last of its threads has let go of the lock.
            while self.folder.exists() and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                remove_what_is_left()
        finally:
            os._exit(1)
