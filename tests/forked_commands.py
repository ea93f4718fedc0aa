"""The commands `python` and `torchrun` of tests' programs as forks too: where a shell or a launcher starts them.

A command on the PATH asks the interpreter of tests for a fork, with its own standard streams, waits for its end, and
ends as it does. It hands signals on, and where it is killed, so is the fork. What a test says about processes,
their parents and groups, it has to say of real ones: it leaves PATH as it is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from tests.interpreters import ask, can_be_forked, interpreter

COMMANDS = Path(__file__).with_name("commands")
_ASKED = "INTERPRETER_OF_TESTS"


def own_commands() -> dict[str, str]:
    """Return the variable with which programs find `python` and others of this environment, as processes."""
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def forked_commands() -> dict[str, str]:
    """Return the variables with which programs find the commands that are forks."""
    asked = {"name": interpreter().name, "python": sys.executable, "read_at_start": interpreter().read_at_start}
    return {
        "PATH": os.pathsep.join([str(COMMANDS), own_commands()["PATH"]]),
        "PYTHON_EXEC": str(COMMANDS / "python"),  # with which torchrun starts ranks
        "INTERPRETER_PATH": sys.executable,
        _ASKED: json.dumps(asked),
    }


def main(words: list[str]) -> NoReturn:
    """Be the fork of this command, or Python itself where a fork cannot be it."""
    asked = json.loads(os.environ[_ASKED])
    command = [asked["python"], *words]
    if not can_be_forked(command, os.environ, asked["read_at_start"]):
        os.execv(command[0], command)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + asked["name"])
        fork = ask(connection, command, os.getcwd(), os.environ, [0, 1, 2])
        for handed_on in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(handed_on, lambda number, _: os.kill(fork.pid, number))
        code = fork.wait(None)
    assert code is not None
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
