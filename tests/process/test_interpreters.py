"""A program that is a fork of one interpreter is as one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distwrap.network.waiting import wait_until
from tests.forked_commands import COMMANDS, PYTHON, forked_commands
from tests.interpreters import interpreter, run_python
from tests.limits import SOON
from tests.orphans import lives

PROBE = """
import os, sys, threading, warnings
import torch

def show():
    main = sys.modules["__main__"]
    print(sys.argv, sys.orig_argv, repr(sys.path[0]), os.getcwd())
    print(__name__, getattr(main, "__file__", None), getattr(main.__spec__, "name", None), vars(main) is globals())
    print(sys.warnoptions, sys.stdin.read(), os.environ["PROBE"], torch.get_num_threads())
    print([(each.name, each.errors, each.line_buffering, each.write_through) for each in (sys.stdout, sys.stderr)])
    print([each.name for each in threading.enumerate()], "distwrap" in sys.modules and "distwrap.launch" in sys.modules)
    warnings.warn("a warning")

show()
what = sys.argv[-1]
if what == "raises":
    raise ValueError("a reason")
if what == "exits":
    sys.exit("a word")
if what == "is interrupted":
    os.kill(os.getpid(), 2)
    import time
    time.sleep(100)
if what == "is killed":
    os.kill(os.getpid(), 9)
"""


def in_its_own_process(*words: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=env, input="words", capture_output=True, text=True, timeout=SOON)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("probe.py", "--lr", "1", "raises"), 1),
        (("-c", PROBE, "is killed"), -signal.SIGKILL),
        (("-W", "ignore:a", "-m", "probe", "is interrupted"), -signal.SIGINT),
    ],
)
@pytest.mark.slow("an interpreter that imports torch, beside a fork")
def test_it_is_the_same_program(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    """What it sees, prints and ends with is that of a process of its own."""
    (tmp_path / "probe.py").write_text(PROBE)
    env = {**os.environ, "PROBE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    assert interpreter().can_be([sys.executable, *words], env)
    fork = run_python(*words, cwd=tmp_path, env=env, input="words", timeout=SOON)
    alone = in_its_own_process(*words, folder=tmp_path, env=env)
    assert fork.returncode == alone.returncode == code, fork.stderr
    assert fork.stdout == alone.stdout
    assert fork.stderr == alone.stderr


@pytest.mark.parametrize("words", [("-X", "dev", "a.py"), ("-S", "a.py"), ("-",), ("a.py",)])
def test_what_python_reads_when_it_starts_wants_a_process(words: tuple[str, ...]) -> None:
    """Options and variables that a fork is too late for are seen."""
    env = {**os.environ, "TORCH_SHOW_CPP_STACKTRACES": "1"} if words == ("a.py",) else {**os.environ}
    assert not interpreter().can_be([sys.executable, *words], env)


def test_a_program_that_does_not_end_is_ended() -> None:
    """After its limit it is killed, and what it has printed is told."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run_python("-c", code, timeout=2)
    pid = int(str(late.value.stdout))
    deadline = time.monotonic() + SOON
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


IN_A_SHELL = """
import os, sys
was_there = "torch" in sys.modules
print(was_there, os.environ.get("RANK", "no rank"), sys.stdin.readline().strip(), sys.argv[1:], sys.flags.no_site)
sys.exit(3)
"""


def in_a_shell(text: str, folder: Path) -> list[str]:
    env = {**os.environ, **forked_commands()}
    command = ["sh", "-c", text]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SOON, check=False)
    return sorted(done.stdout.splitlines()) or done.stderr.splitlines()


def test_commands_of_a_shell_are_forks(tmp_path: Path) -> None:
    """A fork has the pipes and words of its command, and its exit code; what a fork cannot be is Python itself."""
    (tmp_path / "probe.py").write_text(IN_A_SHELL)
    assert in_a_shell("echo a line | python probe.py --lr 1; echo $?", tmp_path) == [
        "3",
        "True no rank a line ['--lr', '1'] 0",
    ]
    assert in_a_shell("echo a line | python -S probe.py; echo $?", tmp_path) == ["3", "False no rank a line [] 1"]


RANKS = """
import sys, torch
import distwrap as dw

@dw.distributed(nprocs=2, launcher=sys.argv[1], returns="all")
def main():
    return dw.rank(), "torch._dynamo" in sys.modules

if __name__ == "__main__":
    print(main())
"""


@pytest.mark.parametrize("launcher", ["forkserver", "spawn", "script"])
@pytest.mark.slow("others of its kind are in make test")
def test_what_a_program_starts_are_forks_too(launcher: str, tmp_path: Path) -> None:
    """A server, and ranks, have the descriptors that they are given, and what the interpreter has imported."""
    (tmp_path / "program.py").write_text(RANKS)
    done = run_python("program.py", launcher, cwd=tmp_path, timeout=SOON)
    assert (done.stdout, done.stderr) == ("[(0, True), (1, True)]\n", "")


def test_a_fork_that_leads_a_session_ends_with_its_command_and_caller() -> None:
    """As ranks do: by a signal to the group of the command, and where the caller is gone."""
    code = "import os, subprocess; print(os.getpid(), subprocess.Popen(['sleep', '100']).pid, flush=True); os.wait()"
    start = f"import subprocess, sys; subprocess.Popen([{PYTHON!r}, '-c', {code!r}], start_new_session=True).wait()"
    for words, session in ((["-c", code], True), (["-c", start], False)):
        with subprocess.Popen(
            [PYTHON, *words], start_new_session=session, stdout=subprocess.PIPE, text=True
        ) as command:
            assert command.stdout is not None
            pids = list(map(int, command.stdout.readline().split()))
            command.kill()
        assert wait_until(lambda pids=pids: not any(map(lives, pids)), SOON)


@pytest.mark.slow("a program under torchrun")
def test_ranks_of_torchrun_are_forks(tmp_path: Path) -> None:
    """Each has what torchrun gives it."""
    (tmp_path / "probe.py").write_text(IN_A_SHELL.replace("3", "0"))
    assert in_a_shell("torchrun --nproc-per-node=2 probe.py a", tmp_path) == [
        f"True {rank}  ['a'] 0" for rank in range(2)
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_ends_its_fork(number: int, tmp_path: Path) -> None:
    """A signal to the command is one to the fork; where the command is killed, so is the fork."""
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen(
        ["python", "-c", program],
        env={**os.environ, **forked_commands()},
        executable=COMMANDS / "python",
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        fork = int(command.stdout.readline())
        assert fork != command.pid
        command.send_signal(number)
        assert command.wait(SOON) == -number
    assert wait_until(lambda: not lives(fork), SOON)
