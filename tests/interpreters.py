"""Programs, each run as `python program.py` by a fork of one interpreter that has torch imported.

To import torch takes a core a second or more, and tests run a thousand programs. A fork becomes the program, up to the
interpreter's own end, and imports distwrap itself. It differs from a process of its own in what Python, OpenMP and
torch read from options and variables when they start: a program that is given others than the tests have gets one.
What a program starts by `sys.executable` or by multiprocessing, as ranks and servers, is a fork too: there it is the
command `tests/commands/python`, which asks for one.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

ROOT = Path(__file__).parents[1]
COMMANDS = Path(__file__).with_name("commands")
ASKED = "INTERPRETER_OF_TESTS"
LEAVE_LATE = "INTERPRETER_OF_TESTS_LEAVES_LATE"

_LENGTH = struct.Struct("Q")
_STATUS = struct.Struct("i")
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "MALLOC_", "CUDA_")
# Which a fork can do at its own start, or which are read later.
_FOLLOWED = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONHASHSEED",  # all forks share one, as who sets it wants
    "PYTHON_EXEC",
    "OMP_NUM_THREADS",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
)


class Interpreter:
    """The interpreter, which ends with its caller."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # to a name that Linux chooses, and that is no file
            listener.listen()  # whoever connects while it imports waits
            self.name: str = listener.getsockname()[1:].decode()
            descriptors = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve(*{descriptors})"],
                cwd=ROOT,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.read_at_start = _read_at_start(os.environ)

    def can_be(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a fork can become the program: it wants no other start than this interpreter had."""
        return command[0] == sys.executable and can_be_forked(command, env, self.read_at_start)

    def start(self, command: Sequence[str], cwd: str, env: Mapping[str, str], files: Sequence[IO[Any]]) -> Fork:
        """Start a fork, given the files that are its standard input, output and error."""
        return ask(self._control, command, cwd, env, {number: file.fileno() for number, file in enumerate(files)})

    def variables(self) -> dict[str, str]:
        """Return the variables by which `tests/commands/python` finds this interpreter."""
        asked = {"name": self.name, "python": sys.executable, "read_at_start": self.read_at_start}
        return {"INTERPRETER_PATH": sys.executable, ASKED: json.dumps(asked)}

    def close(self) -> None:
        """End the interpreter."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def can_be_forked(command: Sequence[str], env: Mapping[str, str], read_at_start: Mapping[str, str]) -> bool:
    """Return whether a fork of an interpreter that had these variables at its start can become the program."""
    options, what, _ = _parsed(command)
    return (
        what not in ("", "-")
        and all(option in ("-W", "-u", "-B") for option, _ in options)
        and _read_at_start(env) == read_at_start
    )


def ask(
    connection: socket.socket,
    command: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    files: Mapping[int, int],
    *,
    session: bool = False,
) -> Fork:
    """Start a fork by a connection to the interpreter.

    Args:
        connection: the connection.
        command: the command line.
        cwd: where it runs.
        env: its variables.
        files: the descriptors that it has, by their number there.
        session: whether it leads a session of its own, which is killed as a whole where the connection is closed.
    """
    words = {"command": list(command), "cwd": cwd, "env": dict(env), "numbers": [*files], "session": session}
    asked = json.dumps(words).encode()
    read, write = os.pipe()
    try:
        socket.send_fds(connection, [_LENGTH.pack(len(asked))], [*files.values(), write])
    finally:
        os.close(write)
    connection.sendall(asked)
    return Fork(read)


class Fork:
    """A program under way.

    Args:
        status: a pipe from which its process id comes, and at its end its exit code, negative of a signal.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        (self.pid,) = _STATUS.unpack(os.read(status, _STATUS.size))

    def wait(self, seconds: float | None) -> int | None:
        """Return the exit code; ``None`` if the program has not ended, which kills it."""
        try:
            ready, _, _ = select.select([self._status], [], [], seconds)
            if not ready:
                os.kill(self.pid, signal.SIGKILL)
            (code,) = _STATUS.unpack(os.read(self._status, _STATUS.size))
            return int(code) if ready else None
        finally:
            os.close(self._status)


@functools.cache
def interpreter() -> Interpreter:
    """Return the interpreter of this process; the first call starts it, and waits for nothing."""
    return Interpreter()


def close() -> None:
    """End the interpreter of this process."""
    if interpreter.cache_info().currsize:
        interpreter().close()
        interpreter.cache_clear()


def run_python(
    *words: Any,
    cwd: Any = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    check: bool = False,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these words, as `subprocess.run` does with captured output.

    Args:
        *words: what follows ``python`` on the command line.
        cwd: where it runs; by default here.
        env: its variables; by default this process's.
        input: its standard input; by default that is empty.
        check: whether an exit code other than 0 is an error.
        timeout: its limit, in seconds.

    Raises:
        subprocess.TimeoutExpired: it has not ended by then.
        subprocess.CalledProcessError: its exit code is not 0.
    """
    command = [sys.executable, *map(str, words)]
    env = {**(os.environ if env is None else env), **interpreter().variables()}
    folder = os.fspath(cwd or os.getcwd())
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write((input or "").encode())
        stdin.seek(0)
        if interpreter().can_be(command, env):
            code = interpreter().start(command, folder, env, [stdin, out, err]).wait(timeout)
        else:
            code = _own_process(command, folder, env, [stdin, out, err], timeout)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    done = subprocess.CompletedProcess(command, code, *texts)
    if check:
        done.check_returncode()
    return done


def _own_process(
    command: Sequence[str], cwd: str, env: Mapping[str, str], files: Sequence[IO[Any]], seconds: float
) -> int | None:
    stdin, stdout, stderr = files
    try:
        return subprocess.run(
            command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in env.items()
        if value and key.startswith(_READ_AT_START) and not key.startswith(_FOLLOWED)
    }


def _parsed(command: Sequence[str]) -> tuple[list[tuple[str, str]], str, list[str]]:
    """Return the options of a command of Python with their values, what it runs, and that program's words."""
    words = list(command[1:])
    options = []
    while words and words[0].startswith("-") and words[0] not in ("-", "-c", "-m"):
        word = words.pop(0)
        options.append((word[:2], word[2:] or words.pop(0)) if word[:2] in ("-W", "-X") else (word, ""))
    return options, words.pop(0) if words else "", words


def serve(control_fd: int, listener_fd: int) -> NoReturn:
    """Fork a program for each that is asked for, and tell its end, until the caller goes.

    Args:
        control_fd: descriptor of the socket that leads to the caller.
        listener_fd: of the one to which other processes of this user connect, each for one program, which is killed
            where they go before it has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of a test is meant for its program
    importlib.import_module("tests.started")
    importlib.import_module("torch._dynamo")  # torch, with what comes with DDP and with the first optimizer
    with contextlib.suppress(ImportError):
        importlib.import_module("sklearn.datasets")  # which takes as long, and gives programs of pages their digits
    gc.collect()
    gc.freeze()
    runpy.run_path(str(ROOT / "distwrap" / "launch" / "large_pages.py"))["use_large_pages"]()
    control, listener = socket.socket(fileno=control_fd), socket.socket(fileno=listener_fd)
    callers = [control]
    programs: dict[int, _Program] = {}  # by what says that it has ended
    while True:
        for ready in select.select([listener, *callers, *programs], [], [])[0]:
            if ready is listener:
                callers += _of_this_user(listener)
            elif ready in programs:
                program = programs.pop(ready)
                os.close(ready)
                _tell(program.status, os.waitstatus_to_exitcode(os.waitpid(program.pid, 0)[1]))
                os.close(program.status)
            elif received := _received(ready):
                asked, (*files, status) = received
                pid = os.fork()
                if pid == 0:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    for fd in (status, *programs, *(each.status for each in programs.values())):
                        os.close(fd)
                    for each in (listener, *callers):
                        each.close()
                    _have(dict(zip(asked["numbers"], files, strict=True)))
                    if asked["session"]:
                        os.setsid()
                    _become(asked["command"], asked["cwd"], asked["env"])
                programs[os.pidfd_open(pid)] = _Program(pid, status, ready, asked["session"])
                _tell(status, pid)
                for fd in files:
                    os.close(fd)
            elif ready is control:
                os._exit(0)
            else:
                for each in programs.values():
                    if each.caller is ready:
                        each.kill()
                callers.remove(ready)
                ready.close()


class _Program(NamedTuple):
    pid: int
    status: int
    caller: socket.socket
    session: bool

    def kill(self) -> None:
        """Kill it, with what it has started where it leads a session."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if self.session:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _of_this_user(listener: socket.socket) -> list[socket.socket]:
    """Return the connection that somebody wants, if that is the user of this process."""
    connection, _ = listener.accept()
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return [connection] if user == os.getuid() else []


def _received(caller: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return what a caller asks for and the descriptors that come with it; ``None`` if it has gone meanwhile."""
    fds: list[int] = []
    try:
        head, fds, _, _ = socket.recv_fds(caller, _LENGTH.size, 100)
        return json.loads(caller.recv(*_LENGTH.unpack(head), socket.MSG_WAITALL)), fds
    except (OSError, struct.error, ValueError):
        for fd in fds:
            os.close(fd)
        return None


def _have(files: dict[int, int]) -> None:
    """Let this process have descriptors by their numbers, which others may have here."""
    apart = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for number, fd in files.items()}
    for fd in files.values():
        os.close(fd)
    for number, fd in apart.items():
        os.dup2(fd, number)
        os.close(fd)


def _tell(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller waits no more
        os.write(pipe, _STATUS.pack(number))


def _become(command: list[str], cwd: str, env: dict[str, str]) -> NoReturn:
    """Run a program in place of this one; its end, an exception, is that of the interpreter."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    options, what, words = _parsed(command)
    unbuffered = bool(env.get("PYTHONUNBUFFERED")) or ("-u", "") in options
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _output(sys.stdout, 1, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _output(sys.stderr, 2, unbuffered)  # type: ignore[misc]
    sys.orig_argv = command
    sys.dont_write_bytecode |= ("-B", "") in options
    if ASKED in env:
        import multiprocessing

        sys.executable = str(COMMANDS / "python")
        multiprocessing.set_executable(sys.executable)
    of_warnings = [value for option, value in options if option == "-W"]
    sys.warnoptions += of_warnings
    warnings._processoptions(of_warnings)  # type: ignore[attr-defined]
    first = {"-c": "", "-m": cwd}
    sys.path[0] = first[what] if what in first else str(Path(what).resolve().parent)
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    import numpy
    import torch

    torch.seed()
    numpy.random.seed()
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    from distwrap.live_objects import mark_as_served

    mark_as_served()
    if LEAVE_LATE in env:
        _leave_late()
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)  # else it tells of its objects that nobody collects
    with _told_as_a_program():
        _run(what, words)
    sys.exit(0)


def _leave_late() -> None:
    """Let torch's group end when gloo's threads have nothing left to do.

    Seen with torch 2.13: a work that began in a backward holds a Python object, so that gloo's thread wants the
    interpreter's lock to let go of it. Where a DDP model is the last that holds its group, which is so once the group
    is destroyed, it waits for that thread with the lock in its hands, for ever. A program of plain torch that ends
    right after its last backward met that in one of five runs as a fork, which is quick to end.
    """
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def destroy_late(*given: object, **named: object) -> None:
        time.sleep(0.2)
        destroy(*given, **named)

    dist.destroy_process_group = destroy_late


def _run(what: str, words: list[str]) -> None:
    """Run a script, the code after ``-c``, or the module after ``-m``."""
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    if what == "-m":
        sys.argv = words
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
    elif what == "-c":
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [what, *words]
        main.__file__ = os.path.abspath(what)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        exec(compile(Path(what).read_text(), main.__file__, "exec"), main.__dict__)


@contextlib.contextmanager
def _told_as_a_program() -> Iterator[None]:
    """Let an exception be told without the frames of this file, and an interrupt end this process as one."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, contextlib.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            from distwrap._internals.python import run_interpreter_end

            run_interpreter_end()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def _output(before: IO[str], number: int, unbuffered: bool) -> io.TextIOWrapper:
    """Return a standard stream anew, as this process would have had it with PYTHONUNBUFFERED or without."""
    raw: Any = io.FileIO(number, "w", closefd=False)
    raw.name = before.name
    binary = raw if unbuffered else io.BufferedWriter(raw)
    each_line = number == 2 and not unbuffered
    return io.TextIOWrapper(binary, before.encoding, before.errors, line_buffering=each_line, write_through=unbuffered)
