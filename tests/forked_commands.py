"""The commands `python` and `torchrun` of tests' programs as forks too: where a shell or a launcher starts them.

A command on the PATH asks the interpreter of tests for a fork, with its own standard streams, waits for its end, and
ends as it does. The fork has all descriptors that the command was given, and leads a session where the command does.
The command hands signals on, and where it is killed, so is the fork; where it leads a session, it ends with its parent.
The fork's own parent is the interpreter: what a test says about parents of processes it has to say of real ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tests.interpreters import ASKED, COMMANDS, LEAVE_LATE, ask, can_be_forked, interpreter

PYTHON = str(COMMANDS / "python")  # to be started with `forked_commands` among the variables
_HANDED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGABRT")


def own_commands() -> dict[str, str]:
    """Return the variable with which programs find `python` and others of this environment, as processes."""
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def forked_commands(*, plain: bool = False) -> dict[str, str]:
    """Return the variables with which programs find the commands that are forks.

    Args:
        plain: they are programs of plain torch, which leave so early that gloo may not let them end.
    """
    return {
        **({LEAVE_LATE: "1"} if plain else {}),
        "PATH": os.pathsep.join([str(COMMANDS), own_commands()["PATH"]]),
        "PYTHON_EXEC": PYTHON,  # with which torchrun starts ranks
        **interpreter().variables(),
    }


@contextlib.contextmanager
def spawned_as_forks() -> Iterator[None]:
    """Let ranks that this process starts by ``launcher="spawn"`` be forks."""
    from distwrap.launch import processes, spawn

    os.environ.update(interpreter().variables())
    spawn.python_command = lambda code: [PYTHON, *processes.python_command(code)[1:]]
    try:
        yield
    finally:
        spawn.python_command = processes.python_command
        for name in interpreter().variables():
            del os.environ[name]


def main(words: list[str]) -> NoReturn:
    """Be the fork of this command, or Python itself where a fork cannot be it."""
    files = {fd: fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}
    asked = json.loads(os.environ[ASKED])
    command = [asked["python"], *words]
    if not can_be_forked(command, os.environ, asked["read_at_start"]):
        _be_python(command)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect("\0" + asked["name"])
        except ConnectionRefusedError:  # in a network namespace of its own, in which a fork would not be
            _be_python(command)
        leads = os.getsid(0) == os.getpid()
        if leads:  # it may be a rank, or a server, which ends with its caller
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        fork = ask(connection, command, os.getcwd(), os.environ, files, session=leads)
        for name in _HANDED_ON:
            signal.signal(getattr(signal, name), lambda number, _: os.kill(fork.pid, number))
        for fd in files.keys() - {0, 1, 2}:
            os.close(fd)
        code = fork.wait(None)
    assert code is not None
    if code < 0:
        with contextlib.suppress(OSError):  # nobody can handle SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _be_python(command: list[str]) -> NoReturn:
    importlib.import_module("tests.started")  # an interpreter that is counted
    os.execv(command[0], command)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:  # it has listed the others
        return False
    return True
