"""The pages of docs/coming_from: run the commands that they show, and compare what the programs have trained.

Every page has a block `console` with its commands, which are run here as they stand. A program is given the name of
the file that it writes its weights to.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.docs.pages import DOCS, ROOT, RUN_BY_PYTHON, blocks_of
from tests.forked_commands import forked_commands
from tests.interpreters import run_python
from tests.ports import free_port

PAGES = DOCS / "coming_from"
PROGRAMS = PAGES / "programs"
AFTER = "after.py"  # what the programs before become, but for three that have a program after of their own
NAMES = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")

# With these words torch ends a process now and then while threads of gloo are still there, as in programs of others.
TORCHS_END = "terminate called without an active exception"
NOT_ENDED = "It did not end in"

State = dict[str, torch.Tensor]


def commands_of(name: str) -> list[str]:
    """Return the commands that a page shows."""
    blocks = blocks_of((PAGES / f"{name}.md").read_text())
    text = "".join(block.text for block in blocks if block.language == "console")
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


def files_of(name: str) -> list[Path]:
    """Return the programs that a page shows."""
    shown = re.findall(r"literalinclude} programs/(\w+\.py)", (PAGES / f"{name}.md").read_text())
    return [PROGRAMS / file for file in shown]


def trained_by(
    name: str, commands: list[str], folder: Path, environment: dict[str, str] | None = None, seconds: float = 200
) -> dict[str, State]:
    """Run commands of a page beside its programs, and return the weights in each file that they have written.

    Args:
        name: of the page.
        commands: as they stand on the page.
        folder: empty, for the programs and what they write.
        environment: variables beside those that are set here.
        seconds: the limit of each command.
    """
    for path in files_of(name):
        # The port of the programs that name one belongs to somebody else when tests run beside each other.
        (folder / path.name).write_text(path.read_text().replace("12355", str(free_port())))
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DISTWRAP_QUIET": "1", **(environment or {})}
    here |= forked_commands(plain=True)
    for command in commands:
        words = command.replace("accelerate launch", f"accelerate launch --main_process_port {free_port()}")
        ended, printed = _ended(words, folder, here, seconds)
        # Seen with torch 2.13 at the end of plain DDP: gloo's group waits, as it goes, for a thread of its own that
        # wants the interpreter's lock, which the one that waits has.
        if not ended and "_before.py" in command and (TORCHS_END in printed or NOT_ENDED in printed):
            ended, printed = _ended(words, folder, here, seconds)
        assert ended, f"{command}\n{printed}"
    return {path.name: state_in(path) for path in sorted(folder.glob("*.pt"))}


def _ended(words: str, folder: Path, environment: dict[str, str], seconds: float) -> tuple[bool, str]:
    """Run a command; return whether it has ended well, and what it has printed."""
    env = {**os.environ, **environment}
    first, *rest = shlex.split(words)
    if first in RUN_BY_PYTHON:
        try:
            done = run_python(*RUN_BY_PYTHON[first][1:], *rest, cwd=folder, env=env, timeout=seconds)
        except subprocess.TimeoutExpired as late:
            return False, f"{late.stdout}{late.stderr}\n{NOT_ENDED} {seconds:g} s."
        return done.returncode == 0, done.stdout + done.stderr
    told = folder / "printed.txt"
    with told.open("w") as printed:
        process = subprocess.Popen(
            ["sh", "-c", words],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(seconds) == 0, told.read_text()
    except subprocess.TimeoutExpired:
        return False, f"{told.read_text()}\n{NOT_ENDED} {seconds:g} s."
    finally:
        if process.poll() is None:  # with the ranks that it has started
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def state_in(path: Path) -> State:
    """Return the weights in a file, without the words before their names."""
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return {key.removeprefix("net."): value for key, value in found.get("model", found).items()}


def one_process(shuffle: bool) -> State:
    """Return the weights of the same training in plain torch and in this process.

    Args:
        shuffle: in the order of torch's `DistributedSampler`, or in that of the dataset.
    """
    program = runpy.run_path(str(PROGRAMS / AFTER))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = program["make_model"]()
    x, y = program["make_data"]().tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in (order if shuffle else torch.arange(len(x))).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    state: State = model.state_dict()
    return state


def assert_same(found: dict[str, State], expected: State, tolerance: float) -> None:
    """Fail where the weights of a file are not the expected ones; 0 compares bit by bit."""
    assert found
    for file, state in found.items():
        assert state.keys() == expected.keys(), file
        for key, value in expected.items():
            torch.testing.assert_close(
                state[key], value, rtol=0, atol=tolerance, msg=lambda m, file=file: f"{file}: {m}"
            )


def assert_page_holds(
    name: str,
    folder: Path,
    environment: dict[str, str] | None = None,
    commands: list[str] | None = None,
    seconds: float = 200,
) -> None:
    """Run a page's commands, and compare the weights with one another and with those of one process.

    Args:
        name: of the page.
        folder: empty.
        environment: variables for the commands.
        commands: those to be run instead of all of the page.
        seconds: the limit of each command.
    """
    found = trained_by(name, commands or commands_of(name), folder, environment, seconds)
    in_order = any("in_order.py" in command for command in commands_of(name))
    assert_same(found, one_process(shuffle=not in_order), 1e-6)
    if "before.pt" in found:
        assert_same(found, found["before.pt"], 0 if same_bits(name) else 1e-6)


def same_bits(name: str) -> bool:
    """Return whether the index promises that the weights are the same bit by bit."""
    return rows()[name][-1] == "to the bit"


def rows() -> dict[str, list[str]]:
    """Return the cells of each page's row in the index's table."""
    lines = [line for line in (PAGES / "index.md").read_text().splitlines() if line.startswith("| [")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].partition("](")[2].removesuffix(".md)"): row for row in cells}
