"""What `import distwrap` does in a fresh interpreter, and what the command does without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import distwrap
from tests.interpreters import run_python

ROOT = str(Path(distwrap.__file__).parents[1])
OPTIONAL = ["cloudpickle", "tqdm", "sklearn", "matplotlib"]
LATE = {"torch.distributed.nn", "pdb", "wrapt", "importlib.metadata", "distwrap.launch", "distwrap.launch.elastic"}

# torch imports some of them itself where they are there; so they are made impossible to import.
PROBE = f"""
import json, os, sys, threading
for name in {OPTIONAL}: sys.modules[name] = None
import torch
before = dict(os.environ), sys.path[:], torch.get_rng_state(), torch.get_num_threads()
os_threads, had = len(os.listdir("/proc/self/task")), set(sys.modules)
import distwrap
after = dict(os.environ), sys.path[:], torch.get_rng_state(), torch.get_num_threads()
children = [open(f"/proc/self/task/{{task}}/children").read() for task in os.listdir("/proc/self/task")]
print(json.dumps({{
    "threads": [thread.name for thread in threading.enumerate()],
    "new threads": len(os.listdir("/proc/self/task")) - os_threads,
    "children": "".join(children).split(),
    "unchanged": before[:2] == after[:2] and torch.equal(before[2], after[2]) and before[3] == after[3],
    "group": torch.distributed.is_initialized(),
    "cuda": torch.cuda.is_initialized(),
    "late": sorted(({{*sys.modules}} - had) & {LATE}),
}}))
"""


def test_importing_starts_nothing_changes_nothing_and_is_cheap() -> None:
    """`import distwrap` starts no thread, process or group, and touches no accelerator and no state of the caller's.

    It needs no optional package, and leaves to the first use what takes long to import.
    """
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "threads": ["MainThread"],
        "new threads": 0,
        "children": [],
        "unchanged": True,
        "group": False,
        "cuda": False,
        "late": [],
    }


def test_an_import_of_an_optional_package_would_be_seen() -> None:
    """The test above would fail, as importing one of them does here."""
    told = run_python("-c", PROBE.replace("import distwrap", "import distwrap, tqdm"), timeout=60).stderr
    assert "ModuleNotFoundError: import of tqdm halted" in told


# What an installed console script does, with modules and words of its own.
CONSOLE_SCRIPT = """
import sys

from distwrap.cli import main

code = 0
try:
    main()
except SystemExit as error:
    code = error.code
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def asked(script: Path, *words: str) -> tuple[str, str, int]:
    """Run the command as it is called when it is installed; return what it prints and its exit code."""
    script.write_text(CONSOLE_SCRIPT)
    command = [sys.executable, script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": ROOT})
    return done.stdout, done.stderr, done.returncode


def test_the_name_is_the_one_it_was_called_by(tmp_path: Path) -> None:
    """As a console script it is called distwrap, and neither --help nor --version waits for torch."""
    out, err, code = asked(tmp_path / "distwrap", "help", "check")
    assert (out.splitlines()[0], err.strip(), code) == (
        "usage: distwrap check [-h] SCRIPT.py [SCRIPT.py ...]",
        "False",
        0,
    )
    assert "  distwrap check train.py\n" in out
    for words in (["--version"], ["--help"], []):
        out, err, code = asked(tmp_path / "distwrap", *words)
        assert (err.strip(), code) == ("False", 0), words


def test_the_ranks_of_a_run_are_shown_without_torch(tmp_path: Path) -> None:
    """``where`` only reads what ranks show, and need not wait for torch."""
    out, err, _ = asked(tmp_path / "distwrap", "where", str(2**22 + 1))
    assert (out, err.splitlines()[0]) == ("", f"distwrap: there is no process {2**22 + 1} on this node.")
    assert err.splitlines()[1:] == ["False"]


@pytest.mark.slow("an interpreter that imports torch")
def test_any_other_program_has_torch(tmp_path: Path) -> None:
    """In a program that is not the command, `import distwrap` imports torch, and watches its first use."""
    assert asked(tmp_path / "train", "--version")[1].strip() == "True"


def test_as_a_module_it_does_not_wait_for_torch() -> None:
    """``python -m distwrap --version`` imports no torch."""
    command = [sys.executable, "-X", "importtime", "-m", "distwrap", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("distwrap ")
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "distwrap.cli" in imported
    assert "torch" not in imported
