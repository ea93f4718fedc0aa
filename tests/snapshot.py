"""What a launch, and a test, must leave as it was."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from distwrap.launch import forkserver
from tests import orphans

_COUNTED = ("children", "python_threads", "open_files")


@dataclass
class Snapshot:
    environ: dict[str, str]
    directory: str
    umask: int
    import_path: list[str]
    python_threads: set[str]
    torch_threads: int
    children: set[int]
    open_files: list[str]

    @classmethod
    def take(cls) -> Snapshot:
        umask = os.umask(0)
        os.umask(umask)
        return cls(
            environ={k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
            directory=os.getcwd(),
            umask=umask,
            import_path=list(sys.path),
            python_threads={thread.name for thread in threading.enumerate()},
            torch_threads=torch.get_num_threads(),
            children=_children(),
            open_files=_open_files(),
        )

    def differences(self) -> list[str]:
        """Return what is not as it was; give threads and processes a moment to be gone."""
        for pause in (0, 0.05, 0.2, 0.5, 1, 2, 4):
            if pause:
                time.sleep(pause)
                gc.collect()
            now = Snapshot.take()
            now.children |= set(filter(orphans.is_orphan, self.children - now.children))  # others may end at any time
            if now == self or (replace(now, open_files=self.open_files) == self and self._was_garbage(now)):
                return []
        more = {
            name: list((Counter(getattr(now, name)) - Counter(getattr(self, name))).elements()) for name in _COUNTED
        }
        return [
            f"{field.name}: was {getattr(self, field.name)!r}, is {getattr(now, field.name)!r}"
            for field in fields(self)
            if field.name not in _COUNTED and getattr(self, field.name) != getattr(now, field.name)
        ] + [
            *(
                f"{name}: {more[name]!r} more, and {fewer!r} fewer"
                for name in _COUNTED
                if (fewer := _fewer(self, now, name)) or more[name]
            ),
            *(
                f"{child}, {'an orphan' if orphans.is_orphan(child) else 'a child'}, is {_command(child)}"
                for child in more["children"]
            ),
        ]

    def _was_garbage(self, now: Snapshot) -> bool:
        """Return whether what is open no more was garbage: nobody's open file has lost its descriptor."""
        if Counter(now.open_files) - Counter(self.open_files):
            return False
        files = [each for each in gc.get_objects() if issubclass(type(each), io.FileIO) and not each.closed]
        return all(_is_open(each.fileno()) for each in files)


def _fewer(before: Snapshot, now: Snapshot, name: str) -> list[object]:
    return list((Counter(getattr(before, name)) - Counter(getattr(now, name))).elements())


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _command(pid: int) -> str:
    """Return what a process runs, and whether it waits to be reaped."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"{Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:300]!r} in state {state}"
    return "gone"


def random_state() -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), *rest)


def _children() -> set[int]:
    """Return the processes whose parent we are, orphans too, but the fork server, which stays on purpose."""
    server = forkserver._server.pid if forkserver._server is not None else None
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/children") as children:
            found.update(map(int, children.read().split()))  # a thread may end meanwhile
    return orphans.reaped(found) - {server}


def _open_files() -> list[str]:
    """What the descriptors lead to; a socket's number says nothing, how many there are does."""
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        kinds.append(target.split(":")[0] if ":[" in target else target)
    return sorted(kinds)
