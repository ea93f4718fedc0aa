"""Loader workers that say why they fail, and leave nothing behind, also where they or their rank are killed.

multiprocessing gives each worker a folder of its own for sockets, and a worker that is killed leaves it. Here all
workers of a rank share one. The rank removes it when it ends; its launcher, when the rank did not come to that; and
when both are gone the workers do, which then end themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from distwrap.errors import LoaderError
from distwrap.group.world import current_world

_PID = "pid-"  # files named after the workers
_KEY = "tempdir"  # where multiprocessing keeps the folder's name
_LOOK_SECONDS = 0.5


def tidy(launch: str) -> Callable[[], None] | None:
    """Let the loader workers that this process starts from now on leave nothing; return how to undo it.

    Args:
        launch: a name of the launch, by which its launcher finds what is left; empty where there is no such launcher.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get(_KEY) is not None:
        return None
    folder = config[_KEY] = tempfile.mkdtemp(prefix=_prefix(launch))
    orphans = [_Orphan(folder, os.getpid())]
    multiprocessing.util.register_after_fork(orphans[0], _Orphan.watch)

    def undo() -> None:
        orphans.clear()  # multiprocessing holds it weakly
        config.pop(_KEY, None)
        _remove(folder)
        atexit.unregister(undo)

    atexit.register(undo)
    return undo


def explained(batches: Iterable[Any]) -> Iterator[Any]:
    """Pass workers' batches on, and say of a limit that the machine has set what to do about it."""
    try:
        yield from batches
    except (RuntimeError, OSError) as error:
        advice = _advice(str(error))
        if not advice:
            raise
        world = current_world()
        raise LoaderError(
            f"rank {world.placement.rank} on {socket.gethostname()}: a loader with workers failed with "
            f"{str(error).strip().splitlines()[0]!r}. {advice}"
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


def remove_what_is_left(launch: str) -> None:
    """Remove what the workers of a launch have left, when all its ranks have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(launch)}*"):
        _remove(folder)


def _prefix(launch: str) -> str:
    return f"distwrap-{'-'.join(filter(str.isdigit, launch.split('/')))}-"


def _remove(folder: str | Path) -> None:
    for name in Path(folder).glob(f"{_PID}*"):
        # A worker that is killed while it passes a batch on leaves the batch's name.
        for batch in Path("/dev/shm").glob(f"torch_{name.name.removeprefix(_PID)}_*"):
            batch.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class _Orphan:
    """In a worker: a thread that removes the folder and ends the worker when its rank is gone."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def watch(self) -> None:
        if os.getppid() == self._rank:  # a worker itself, and nothing that it starts
            with contextlib.suppress(OSError):
                Path(self._folder, f"{_PID}{os.getpid()}").touch()
            threading.Thread(target=self._run, name="distwrap-orphan", daemon=True).start()

    def _run(self) -> None:
        while os.getppid() == self._rank:
            time.sleep(_LOOK_SECONDS)
        _remove(self._folder)
        os._exit(1)
