"""What a launch, and a test, must leave as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from distwrap.launch import forkserver

_AS_IT_WAS = ("environ", "directory", "umask", "import_path", "torch_threads")
_NO_MORE = ("python_threads", "children", "open_files")  # fewer are garbage of before


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
        """Say what is not as it was, and what is there that was not; give what ends by itself a moment to be gone."""
        for pause in (0, 0.05, 0.2, 0.5, 1):
            if pause:
                time.sleep(pause)
                gc.collect()
            found = Snapshot.take()._beside(self)
            if not found:
                return []
        return found

    def _beside(self, before: Snapshot) -> list[str]:
        changed = [name for name in _AS_IT_WAS if getattr(self, name) != getattr(before, name)]
        left = {
            name: list((Counter(getattr(self, name)) - Counter(getattr(before, name))).elements()) for name in _NO_MORE
        }
        return [
            *(f"{name}: was {getattr(before, name)!r}, is {getattr(self, name)!r}" for name in changed),
            *(f"{name}: {more!r}, which was not there" for name, more in left.items() if more),
            *(f"{child} is {_command(child)}" for child in left["children"]),
        ]


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
    """The processes whose parent we are, but the fork server, which stays on purpose."""
    server = forkserver._server.pid if forkserver._server is not None else None
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/children") as children:
            found.update(map(int, children.read().split()))  # a thread may end meanwhile
    return found - {server}


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
