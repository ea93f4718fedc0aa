"""One world: a program on so many simulated ranks, in a child process and a folder of its own, and what they did."""

from __future__ import annotations

import ast
import contextlib
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.utils.data import DataLoader, RandomSampler

from distwrap import simulated
from distwrap._internals.torch_prove import batches_of
from distwrap._internals.torch_simulation import replaced
from distwrap.comm.allreduce import AllReduce
from distwrap.data import loader as loaders
from distwrap.data.loader import shard
from distwrap.data.sharded import innermost
from distwrap.environments import torchrun
from distwrap.errors import DistwrapError, LaunchError
from distwrap.launch.worker import tie_to_parent
from distwrap.network.waiting import wait_until
from distwrap.places import place
from distwrap.protocols import Wrapping
from distwrap.prove.observer import Observer, Seen, numbers_in
from distwrap.strategies.ddp import DDPStrategy
from distwrap.supervision.stacks import is_users
from distwrap.testing.simulation.script import failure_of

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PATHS = (str, bytes, os.PathLike)
_ONE, _BOTH = slice(0, 1), slice(0, 2)
# What changes something, and which of the audit event's arguments say where.
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"), _ONE),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), _BOTH),
    "socket.connect": slice(1, 2),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "sqlite3.connect"), _ONE),
}
_SECONDS = 600.0  # for a world
_exit = os._exit  # which is the end of a rank, where one is simulated


@dataclass(frozen=True)
class Size:
    """Size of a world.

    Attributes:
        ranks: how many.
        times: by how much the loop's own batch on a rank is multiplied; 0 where all ranks together take one batch
            that 2, 3 and 4 divide.
    """

    ranks: int
    times: int = 0


def common_batch(said: int) -> int:
    """Return the multiple of 12 that is nearest to a batch size.

    Example:
        >>> [common_batch(size) for size in (1, 8, 16, 32, 64)]
        [12, 12, 12, 36, 60]
    """
    return 12 * max(1, round(said / 12))


@dataclass
class World:
    """What the ranks of a world did.

    Attributes:
        seen: by each rank.
        error: why it ended early, in words; empty where it did not.
        sizes: batch sizes that the loop has said.
    """

    size: Size
    seen: dict[int, Seen] = field(default_factory=dict)
    error: str = ""
    sizes: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Program:
    """What is proven, a script or a function, and how.

    Attributes:
        script: its path; empty for a function.
        arguments: of either.
        keywords: arguments of the function by name.
        function: called on each rank.
        allow_writes: whether it may change files outside of its folder, and connect to other machines.
        double: whether it computes in float64.
        real: whether its ranks are processes, rather than simulated.
        steps: of optimizers, after which a rank has been seen enough.
        epochs: in the place of steps, of so many batches at most; 0 for steps.
        batch: size of the batch of all ranks together; by default the one that is nearest to the loop's.
    """

    script: str = ""
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    allow_writes: bool = False
    double: bool = False
    real: bool = False
    steps: int = 12
    epochs: int = 0
    batch: int | None = None

    @cached_property
    def is_decorated(self) -> bool:
        """Whether it launches its ranks itself, by distwrap."""
        if self.function is not None:
            return True
        nodes = list(ast.walk(ast.parse(Path(self.script).read_bytes())))
        bound = [each for node in nodes if isinstance(node, ast.Import) for each in node.names]
        modules = {each.asname or each.name for each in bound if each.name == "distwrap"}
        taken = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("distwrap")]
        return any(each.name in ("distributed", "*") for node in taken for each in node.names) or any(
            node.attr == "distributed" and getattr(node.value, "id", "") in modules
            for node in nodes
            if isinstance(node, ast.Attribute)
        )


def run(program: Program, size: Size, folder: str | None = None) -> World:
    """Run a program in a world of its own, in children of this process, and return what its ranks did.

    Args:
        program: what is run.
        size: of the world.
        folder: in which it runs; by default one that is removed after it.

    Raises:
        LaunchError: a child has ended without a word, or none in time; or the system has no fork.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("a proof runs each world in a fork of this process, which this system does not have.")
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(_folder())  # which the loop does not see
        place = Path(folder).resolve() if folder else stack.enter_context(_folder())
        found = [own / f"{rank}.pt" for rank in range(size.ranks if program.real else 1)]
        sys.stdout.flush()
        sys.stderr.flush()
        children = set[int]()
        stack.callback(_end, children)
        port = 0
        if program.real:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
        for rank in range(len(found)):
            child = os.fork()
            if child == 0:
                try:
                    tie_to_parent()
                    _Child(program, size, place, found, rank, port).run()
                except BaseException:  # noqa: BLE001 - whose caller is the parent's
                    traceback.print_exc(file=sys.__stderr__)
                finally:
                    _exit(1)
            children.add(child)
        statuses = list[int]()

        def have_ended() -> bool:
            for child in list(children):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    children.remove(child)
                    statuses.append(status)
            return not children or any(statuses)  # the others may wait for one that has failed

        if not wait_until(have_ended, _SECONDS):
            raise LaunchError(f"the world of {size.ranks} ranks was not done in {_SECONDS} s: look at fewer --steps.")
        there = sorted((each for each in found if each.exists()), key=lambda each: each.stat().st_mtime_ns)
        worlds: list[World] = [torch.load(each, weights_only=False) for each in there]  # of our own processes
        if not worlds or (any(statuses) and not any(each.error for each in worlds)):
            raise LaunchError(f"the world of {size.ranks} ranks has ended without a word (status {statuses}).")
        for each in worlds[1:]:
            worlds[0].seen |= each.seen
            worlds[0].error = worlds[0].error or each.error  # the first one
        return worlds[0]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for a ``with``, by the name that the system has for it."""
    with tempfile.TemporaryDirectory(prefix="distwrap-prove-") as folder:
        yield Path(folder).resolve()


def _end(children: set[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


class _Child:
    """This process as a child: a world of simulated ranks, or one rank of a world of processes.

    Args:
        program: what it runs.
        size: of its world.
        folder: in which it runs.
        found: the files in which the children say what they did.
        rank: its own number.
        port: at which ranks meet that are processes.
    """

    def __init__(self, program: Program, size: Size, folder: Path, found: list[Path], rank: int, port: int) -> None:
        self._program, self._size, self._found, self._rank, self._port = program, size, found, rank, port
        self._world, self._allowed, self._done = World(size), _guard(folder, program), set[int]()
        self._observer = Observer(
            self._rank_now, self._enough, steps=program.steps, epochs=program.epochs, double=program.double
        )

    def run(self) -> NoReturn:
        """Run the program, and end this process."""
        program, size = self._program, self._size
        try:
            output = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody sees what a debugger asks
            torch.set_num_threads(1)  # the parent's threads are not here after the fork
            if program.double:
                torch.set_default_dtype(torch.float64)
            # CUDA does not work after a fork.
            os.environ.update({"DISTWRAP_QUIET": "1", "CUDA_VISIBLE_DEVICES": "", **self._variables()})
            if program.real:
                os.dup2(output.fileno(), 2)  # native code warns when another rank stops first
            with (
                contextlib.redirect_stdout(output),
                contextlib.redirect_stderr(output),
                batches_of(self._batch, 0 if size.times else size.ranks, program.steps if program.epochs else 0),
                self._alike(),
                self._observer.watching(),
            ):
                returned = self._start()
            self._observer.here().seen.returned = numbers_in(returned)
            for seen in self._observer.seen.values():
                seen.has_ended = True
        except BaseException as error:  # noqa: BLE001 - told to the parent
            self._world.error = _in_words(error)
        self._end()

    def _end(self) -> NoReturn:
        self._world.seen = self._observer.seen
        own = self._found[self._rank]
        self._allowed.append(str(own.parent))
        torch.save(self._world, own.with_suffix(".part"))
        own.with_suffix(".part").replace(own)
        if self._world.error:
            _exit(1)
        wait_until(lambda: all(each.exists() for each in self._found), _SECONDS)  # others may need this process
        _exit(0)

    def _alike(self) -> Any:
        """Return a context in which ranks get the samples, and the mean of gradients, that one process has."""
        real = DDPStrategy.prepare_model

        def prepare(strategy: Any, model: Any, world: Any, wrapping: Wrapping) -> Any:
            comm = wrapping.comm or strategy.comm
            if comm is not None and type(comm).__module__.startswith("distwrap.comm"):  # not one of the user's own
                self._observer.here().seen.switched_off.add(f"comm={type(comm).__name__}")
                wrapping = replace(wrapping, comm=AllReduce())
            return real(strategy, model, world, wrapping)

        return replaced([(loaders, "shard", _shard), (DDPStrategy, "prepare_model", prepare)])

    def _variables(self) -> dict[str, str]:
        if not self._program.real:
            return {"DISTWRAP_SIMULATE": str(self._size.ranks)}
        own, ranks = str(self._rank), str(self._size.ranks)
        numbers = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        numbers["OMP_NUM_THREADS"] = "1"  # the threads of OpenMP are not here after the fork, and would be waited for
        return {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), torchrun.AGENT: "prove"}

    def _batch(self, said: int) -> int:
        self._world.sizes.add(said)
        return said * self._size.times or (self._program.batch or common_batch(said)) // self._size.ranks

    def _rank_now(self) -> int:
        running: Any = simulated.running
        return self._rank if running is None else int(running.rank())

    def _enough(self) -> None:
        """Let this rank stand still after its steps, and end the world where all have made them."""
        self._done.add(self._rank_now())
        if (running := simulated.running) is None or len(self._done) >= self._size.ranks:
            self._end()
        running.scheduler.wait(bool, "the other ranks of a proof, which has seen enough")

    def _start(self) -> Any:
        """Run the program, and return what a function has returned."""
        program = self._program
        if program.function is not None:
            is_decorated = hasattr(program.function, "options")
            function = program.function if is_decorated else sys.modules["distwrap"].distributed()(program.function)
            return function(*program.arguments, **program.keywords)
        words = list(map(str, program.arguments))
        if not program.is_decorated and not program.real:
            if failure := failure_of(program.script, self._size.ranks, words):
                raise LaunchError(failure)
            return None
        sys.path.insert(0, str(Path(program.script).parent.resolve()))
        try:
            with mock.patch.object(sys, "argv", [program.script, *words]):
                runpy.run_path(program.script, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        return None


def _shard(loader: Any, mode: Any, batch_size: Any, order: Any, split: Any, **options: Any) -> Any:
    """Shard a loader so that each step's samples are those of one process."""
    shuffles = isinstance(loader, DataLoader) and isinstance(innermost(loader), RandomSampler)
    if order == "auto" and shuffles:
        order = "torch"
    if mode == "auto" and shuffles:
        mode = "drop"
    return shard(loader, mode, "per_rank", order if shuffles else "auto", split, **options)


def _guard(folder: Path, program: Program) -> list[str]:
    """Stop this process where it would change something outside of a folder; return where else it may write."""
    os.chdir(folder)
    tempfile.tempdir = str(folder)
    allowed = [str(folder), os.devnull, "/dev/shm", "/proc/self"]
    if program.real:
        allowed.append("('127.0.0.1'")  # where its ranks meet
    if program.allow_writes:
        return allowed

    def look(event: str, args: tuple[Any, ...]) -> None:
        changes = args[2] & _WRITES if event == "open" else event in _CHANGES
        for each in args[_CHANGES.get(event, _ONE)] if changes else ():
            text = os.path.abspath(os.fsdecode(each)) if isinstance(each, _PATHS) else str(each)
            if isinstance(each, int) or text.startswith(tuple(allowed)) or "__pycache__" in text:
                continue  # an integer is a file that is open already
            raise PermissionError(
                f"distwrap prove: the loop would {event.rpartition('.')[2]} {text}. A proof changes nothing outside of "
                "its own folder: give the loop a relative path, or say --allow-writes."
            )

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, _PATHS):
            look("os.mkdir", (f,))  # which torch writes without an audit event
        real(obj, f, *args, **kwargs)

    real = torch.save
    torch.save = save
    sys.addaudithook(look)
    return allowed


def _in_words(error: BaseException) -> str:
    """Return an error's type and message, and the line of the user's that has raised it."""
    words = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = [each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)]
    if isinstance(error, DistwrapError) or not frames:
        return words
    if isinstance(error, FileNotFoundError):
        words += "; a proof runs in a folder of its own: read data by Path(__file__).parent"
    return f"{words} (at {place(frames[-1].filename, frames[-1].lineno or 0)})"
