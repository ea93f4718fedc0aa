"""The code of a page of the documentation: which blocks make which program, and how a page is run.

A block of Python belongs to the page's program, which all of its blocks make together, one after the other. A comment
before a block says otherwise:

    <!-- file: train.py -->         the block is the file of this name, which a command on the page runs
    <!-- new program -->            this block begins another program
    <!-- printed -->                this block of text was printed by what ran before it; … stands for anything
    <!-- not run: it needs a GPU --> the block is not run, for this reason

A block of `sh` is run where it stands, in the folder with the files above it, and must end well.
In it PORT is a port that nobody has. A block of `console` has commands with what they print, and is not run here;
tests/docs/coming_from.py runs those of its own pages.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.forked_commands import forked_commands, own_commands
from tests.interpreters import run_python
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# torch.compile imports what torch itself no longer wants.
PYTHON = [sys.executable, "-W", "error", "-W", "ignore:`torch.jit:DeprecationWarning"]
# Commands of a page that need no shell.
RUN_BY_PYTHON = {
    "python": [sys.executable],
    "distwrap": [sys.executable, "-m", "distwrap"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
# Languages of blocks that nobody would run.
NO_CODE = {"", "text", "diff", "mermaid", "pycon"}


class Block(NamedTuple):
    """A block of code on a page.

    Attributes:
        language: the word after the fence.
        text: what is between the fences.
        line: of the page, of the opening fence.
        mark: the comment before it, as ``"file"``, and ``""`` without one.
        value: what follows the mark's colon.
    """

    language: str
    text: str
    line: int
    mark: str
    value: str


_FENCE = re.compile(
    r"(?:^<!-- *(?P<mark>file|new program|printed|not run)(?:: *(?P<value>[^\n]*?))? *-->\n+)?"
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^ *(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the blocks of a page, in their order."""
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("fence")) + 1
        lines = [each.removeprefix(found["indent"]) for each in found["text"].splitlines(keepends=True)]
        yield Block(found["language"].strip(), "".join(lines), line, found["mark"] or "", found["value"] or "")


def faults_of(text: str, *elsewhere: str) -> Iterator[str]:
    """Yield what is wrong with the blocks of a page: code that is neither run nor marked, a mark without a reason.

    Args:
        text: the page.
        *elsewhere: languages whose blocks another test runs.
    """
    for block in blocks_of(text):
        is_code = block.language not in NO_CODE and not block.language.startswith("{")
        if block.mark in ("file", "not run") and not block.value:
            yield f"line {block.line}: the mark {block.mark!r} says nothing after its colon."
        elif block.mark == "printed" and block.language != "text":
            yield f"line {block.line}: what was printed is a block of text, not of {block.language}."
        elif is_code and not block.mark and block.language not in ("python", "sh", *elsewhere):
            yield f"line {block.line}: a block of {block.language} is a file, or is not run for a reason."


def has_code(text: str) -> bool:
    """Return whether something of a page runs."""
    return any(block.language in ("python", "sh") and block.mark != "not run" for block in blocks_of(text))


def run_page(text: str, folder: Path, seconds: float = 100) -> str:
    """Run the code of a page in an empty folder, and return what it printed; fail where it does.

    Args:
        text: the page.
        folder: where its files are written, and its programs and commands run.
        seconds: the limit of each program and command.
    """
    programs: list[str] = []
    printed = ""
    for block in blocks_of(text):
        if block.mark == "printed":
            printed += _run_programs(programs, folder, seconds)
            assert_printed(block, printed)
        elif block.mark == "file":
            path = folder / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "python" and block.mark != "not run":
            if not programs or block.mark == "new program":
                programs.append("")
            programs[-1] += f"\n\n{block.text}"
        elif block.language == "sh" and block.mark != "not run":
            printed += _run_programs(programs, folder, seconds)
            for command in _commands(block.text):
                printed += _run(command, folder, seconds)
    return printed + _run_programs(programs, folder, seconds)


def assert_printed(block: Block, printed: str) -> None:
    """Fail where a line of a block was not printed; … stands for anything."""
    for line in block.text.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.strip().split("…"))
        assert re.search(rf"^\s*{pattern}\s*$", printed, re.MULTILINE), f"not printed: {line!r}, but:\n{printed}"


def _run_programs(programs: list[str], folder: Path, seconds: float) -> str:
    """Run the programs that a page has so far, and forget them."""
    printed = ""
    for number, program in enumerate(programs):
        path = folder / f"program_{number}.py"
        path.write_text(program)
        printed += _run([*PYTHON, str(path)], folder, seconds)
    programs.clear()
    return printed


def _commands(text: str) -> list[list[str]]:
    """Return commands that a shell would run one after the other, or all as one of a shell where it has more to do."""
    lines = [words for line in text.replace("\\\n", "").splitlines() if (words := shlex.split(line, comments=True))]
    if set(text) & set("|&;<>$`*=(") or any(words[0] not in RUN_BY_PYTHON for words in lines):
        return [["sh", "-eu", "-c", text]]
    return [[*RUN_BY_PYTHON[words[0]], *words[1:]] for words in lines]


def _run(command: list[str], folder: Path, seconds: float) -> str:
    """Run a command of a page, and return what it printed."""
    return run_command(
        command,
        folder,
        seconds,
        OMP_NUM_THREADS="1",  # threads that wait for each other take minutes on cores that are busy
        PORT=str(free_port()),
    )


def run_command(command: list[str], folder: Path, seconds: float = 100, **env: str) -> str:
    """Run a command in a folder, and return what it printed; fail with its errors where it fails.

    Args:
        command: and its words.
        folder: in which it runs.
        seconds: its limit.
        **env: variables beside those of this process.
    """
    commands = forked_commands() if "$!" not in command[-1] else own_commands()  # a process that it means itself
    env = {**os.environ, "DISTWRAP_QUIET": "1", "PYTHONUNBUFFERED": "", **commands, **env}  # lines come out whole
    if command[0] == sys.executable:
        done = run_python(*command[1:], cwd=folder, env=env, timeout=seconds)
    else:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
