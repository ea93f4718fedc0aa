"""Run one cell of a fault matrix: a program that breaks as a real process, judged by what is seen and left behind."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from distwrap._internals.torch import import_compiler
from tests.faults.cells import LIMIT, LOOP_LIMIT, TIMEOUT, Expected, expected, loop_limit
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
PROGRAM = Path(__file__).parent / "program.py"
PATIENCE = 60.0  # seconds for a program to end, from the fault
ARRIVAL = 240.0  # seconds for it to come there, in which busy cores may still be importing torch

LATE = "known after"
NOT_STRUCK = "the fault did not strike"

PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Seen:
    """What came of a cell.

    Attributes:
        seconds: from the fault to the moment when the caller knew.
        wrong: what was not as expected, in words.
    """

    cell: Any
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def verdict(self) -> str:
        """Right; late, where that is all that is wrong; or wrong."""
        late = [words for words in self.wrong if words.startswith(LATE)]
        return "right" if not self.wrong else "late" if late == self.wrong else "wrong"


def run(
    cell: Any, *, slack: float = 1.0, wanted: Expected | None = None, main: Callable[[Any], None] | None = None
) -> Seen:
    """Run a cell, and again where it did not come to its fault, as where ranks on busy cores came too late to meet.

    Args:
        cell: the fault.
        slack: how many times longer than expected it may take until the caller knows, as on busy cores.
        wanted: what the caller has to see; by default as in the fault matrix.
        main: the caller, which is forked; by default that of the fault matrix.
    """
    seen, limit = _run(cell, slack, wanted, main), loop_limit()
    for longer in (3, 9):
        if NOT_STRUCK in seen.wrong:
            with patch.dict(os.environ, {LOOP_LIMIT: str(longer * limit)}):  # within which the ranks have to meet too
                seen = _run(cell, slack, wanted, main)
    return seen


def _run(cell: Any, slack: float, wanted: Expected | None, main: Callable[[Any], None] | None) -> Seen:
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and hand that down
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        temporary = folder / "temporary"
        temporary.mkdir()
        code = _wait(_start(cell, folder, main), folder / "struck")
        ended = time.time()
        seen = Seen(cell)
        gone = _wait_for_descendants(ended + LIMIT)
        seen.output = (folder / "output").read_text(errors="replace")
        try:
            _judge(seen, wanted or expected(cell), code, folder, ended, slack)
        except Exception:  # noqa: BLE001 - a cell that cannot be judged has failed
            seen.wrong.append(traceback.format_exc())
        seen.wrong += [f"left: process {line}" for line in gone]
        seen.wrong += [f"left: file {path.name}" for path in temporary.iterdir() if not _may_stay(path, cell)]
        seen.wrong += [f"left: shared memory {name}" for name in _abandoned(shared)]
    return seen


def _judge(seen: Seen, wanted: Expected, code: int | None, folder: Path, ended: float, slack: float) -> None:
    cell = seen.cell
    if code is None:
        seen.wrong.append(f"it did not end within {PATIENCE:g} s of the fault")
        return
    note = folder / "seen"
    told: dict[str, Any] = json.loads(note.read_text()) if note.exists() and note.read_text() else {}
    struck = folder / "struck"
    if not struck.exists() or not struck.read_text():
        seen.wrong.append(NOT_STRUCK)
        return
    known = told["time"] if "raises" in told else ended
    seen.seconds = max(0.0, known - float(struck.read_text()))
    seconds = wanted.seconds + (loop_limit() - TIMEOUT) * (cell.fault == "infinite loop")
    if seen.seconds > slack * seconds:
        seen.wrong.append(f"{LATE} {seen.seconds:.1f} s, not within {seconds:g} s")
    if cell.launcher != "torchrun" and told.get("raises", "") not in wanted.raises.split("|"):
        seen.wrong.append(f"raised {told.get('raises') or 'nothing'}, not {wanted.raises or 'nothing'}")
    if cell.launcher != "torchrun" and not wanted.raises and wanted.code == 0 and told.get("value") != "whole":
        seen.wrong.append(f"returned {told.get('value')!r}")
    if code != wanted.code:
        seen.wrong.append(f"exit code {code}, not {wanted.code}")
    text = told.get("text", "") + "\n" + seen.output
    seen.wrong += [f"{words!r} is nowhere" for words in wanted.words if not re.search(words, text)]
    seen.wrong += filter(None, [told.get("wrong")])
    if told.get("environ"):
        seen.wrong.append(f"left: variables {told['environ']}")


def _may_stay(path: Path, cell: Any) -> bool:
    """Say whether torch alone has left this file, or nobody was left to remove it, so that the next launch does."""
    dies = cell.who == "caller" and cell.fault in ("os._exit(3)", "SIGKILL", "SIGSEGV")
    if cell.launcher == "elastic" and dies and path.name.startswith("distwrap-restarts-"):
        return True
    # When a worker's socket is gone, torch's loader makes ten files to see whether it still can, and the news of the
    # worker's death, an exception in a signal's handler, may find it between one file's making and removal.
    between = cell.when == "in a loader worker" and path.name.startswith("tmp") and path.stat().st_size == 0
    if cell.launcher == "torchrun":  # its log folder; and it ends loader workers without letting anybody clean up
        return between or path.name.startswith(("torch", "distwrap-"))
    return between or path.name.startswith("torchinductor")


def _start(cell: Any, folder: Path, main: Callable[[Any], None] | None) -> int:
    """Start the caller: a fork of this process, but where ranks begin as the caller's own command does."""
    env = {"TMPDIR": str(folder / "temporary"), "DISTWRAP_QUIET": "1", "PYTHONUNBUFFERED": "", "PYTHONWARNINGS": ""}
    with open(folder / "output", "wb") as output:
        if cell.launcher not in ("script", "torchrun"):
            return _fork(cell, folder, env, output.fileno(), main)
        command = [sys.executable, str(PROGRAM), cell.launcher, cell.who, cell.fault, cell.when]
        if cell.launcher == "torchrun":
            command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **env, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ).pid


def _fork(cell: Any, folder: Path, env: dict[str, str], output: int, main: Callable[[Any], None] | None) -> int:
    import tests.faults.program as program

    _import_what_ranks_need()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(env)
        tempfile.tempdir = None
        os.chdir(folder)
        import atexit

        atexit._clear()
        code = _as_an_interpreter_would(main or program.main, cell)
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


@cache
def _import_what_ranks_need() -> None:
    """Import what each rank would import anew otherwise: half of what a cell costs."""
    torch.set_num_threads(1)
    importlib.import_module("distwrap.launch.elastic")
    import_compiler()


def _as_an_interpreter_would(main: Callable[[Any], None], cell: Any) -> int:
    try:
        main(cell)
    except SystemExit as error:
        return int(error.code or 0)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    return 0


def adopt_orphans() -> None:
    """Become the parent of whatever a caller leaves behind, to find it (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _wait(pid: int, struck: Path) -> int | None:
    deadline, has_struck = time.monotonic() + ARRIVAL, False
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if not has_struck and struck.exists():
            deadline, has_struck = time.monotonic() + PATIENCE, True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _abandoned(before: set[str]) -> list[str]:
    """Return torch's shared memory of processes that are gone; what runs beside us has some too, for moments."""
    names: list[str] = []
    for pause in (0, 0.5):
        time.sleep(pause)
        new = set(os.listdir("/dev/shm")) - before
        names = [name for name in new if name.startswith("torch_") and not Path("/proc", name.split("_")[1]).exists()]
        if not names:
            break
    return names


def _wait_for_descendants(deadline: float) -> list[str]:
    """Wait until all that the caller has started is gone; end what is not, and return it."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = list(_descendants(os.getpid()))
        if not alive:
            return []
        if time.time() > deadline:
            break
        time.sleep(0.02)
    for pid, _ in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in alive]


def _descendants(pid: int) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                        yield child, command[:200]
                yield from _descendants(child)
