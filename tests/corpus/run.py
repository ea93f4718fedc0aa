"""Run one program of the fixed point, and end whatever it leaves behind."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.corpus.output import Given, error_of, lines_of
from tests.forked_commands import forked_commands, own_commands
from tests.interpreters import ROOT, run_python
from tests.ports import free_port

PROGRAMS = Path(__file__).with_name("programs")
SECONDS = 120.0
ENVIRONMENT = {
    "DISTWRAP_QUIET": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "https_proxy": "http://127.0.0.1:9",  # nobody answers there
    "RUNID": "0",
}
FUNCTIONS = 'distwrap() { python -m distwrap "$@"; }\n'
_BLOCK = re.compile(r"^(?:<!-- (.*?) -->\n)?~~~~(\w*)\n(.*?)^~~~~$", re.MULTILINE | re.DOTALL)
_SUBREAPER = 36


def steps(source: Path, command: str, folder: Path) -> Iterator[str]:
    """Yield what the shell runs of a program, step by step, and write its files into an empty folder before that."""
    if source.suffix == ".py":
        shutil.copytree(source.parent, folder, dirs_exist_ok=True)
        yield command or f"python {source.name}"
        return
    programs: list[str] = []
    for mark, language, text in _BLOCK.findall(source.read_text()):
        if mark.startswith("file: "):
            path = folder / mark.removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif language == "python":
            if not programs or mark == "new program":
                programs.append("")
            programs[-1] += f"\n\n{text}"
        else:
            yield from _written(programs, folder)
            yield str(text)
    yield from _written(programs, folder)


def _written(programs: list[str], folder: Path) -> Iterator[str]:
    """Write the programs that a page has so far, and forget them."""
    for number, program in enumerate(programs):
        (folder / f"program_{number}.py").write_text(program)
        yield f"python program_{number}.py"
    programs.clear()


def run(name: str) -> tuple[Given, float]:
    """Run a program in a folder of its own, and return what it gave, and in how many seconds."""
    began = time.monotonic()
    file, _, command = name.partition(": ")
    says_how_many = re.search("nprocs|NPROCS|torchrun", (PROGRAMS / file).read_text() + command)
    printed, errors = "", ""
    with tempfile.TemporaryDirectory(prefix="corpus-", ignore_cleanup_errors=True) as temporary:
        folder, scratch = Path(temporary, "run"), Path(temporary, "tmp")
        folder.mkdir()
        scratch.mkdir()
        more = {"TMPDIR": str(scratch), "HOME": str(scratch), **({} if says_how_many else {"DISTWRAP_NPROCS": "2"})}
        for step in steps(PROGRAMS / file, command, folder):
            ended, out, err = _ended(step, folder, more)
            printed, errors = printed + out, errors + err
            if ended != 0:
                break
    given: Given = {"exit": ended, "error": error_of(errors) if ended else "", "lines": lines_of(printed)}
    return given, time.monotonic() - began


def _ended(text: str, folder: Path, more: dict[str, str]) -> tuple[int | None, str, str]:
    """Run a text of a shell with forks of a warm interpreter for `python`; return its exit code and what it printed."""
    commands = own_commands() if "$!" in text else forked_commands()  # a process that the text means itself
    here = {"PYTHONPATH": str(ROOT), "PORT": str(free_port())}
    env = {**os.environ, **ENVIRONMENT, **here, **commands, **more}
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            ["sh", "-eu", "-c", FUNCTIONS + text],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _end_what_is_left()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return code, texts[0], texts[1]


def _end_what_is_left() -> None:
    """Kill what a program has left behind, which became this process's children, all but the warm interpreter."""
    for attempt in range(20):
        left = set(_children()) - _kept()
        for pid in left:
            if attempt > 5 and Path(f"/proc/{pid}").exists():  # some end by themselves
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0 if attempt > 5 else os.WNOHANG)
        if not left:
            return
        time.sleep(0.1)


@functools.cache
def _kept() -> frozenset[int]:
    """Return the children that this process has of its own; asked first when it has nothing else."""
    return frozenset(_children())


def _children() -> Iterator[int]:
    for tasks in Path("/proc/self/task").glob("*/children"):
        yield from map(int, tasks.read_text().split())


def begin() -> None:
    """Make this process the parent of whatever loses its own."""
    run_python("-c", "", timeout=SECONDS)  # the interpreter is ready
    _kept()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
