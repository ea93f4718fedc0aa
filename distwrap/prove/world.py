"""One world: a program on so many simulated ranks, in a child process and a folder of its own, and what they did."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, RandomSampler

from distwrap import locked_folder, simulated
from distwrap._internals.torch_calls import replaced
from distwrap._internals.torch_prove import batches_of
from distwrap.comm.gradients import AllReduce
from distwrap.data import loader as loaders
from distwrap.data.loader import shard
from distwrap.data.sharded import innermost
from distwrap.environments import torchrun
from distwrap.errors import DistwrapError, LaunchError
from distwrap.group.world import active_world
from distwrap.launch.worker import bind_to_parent
from distwrap.network.waiting import wait_until
from distwrap.places import place
from distwrap.protocols import Wrapping
from distwrap.prove.observer import Observer, Seen, length, numbers_in
from distwrap.strategies.ddp import DDPStrategy
from distwrap.supervision.stacks import is_users
from distwrap.testing.simulation.script import failure_of
from distwrap.wording import named_ranks

_KIND = "proof"  # of our temporary folders
_FILES = "files"  # the loop's folder in its world's
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PATHS = (str, bytes, os.PathLike)
# What changes something, and which of the audit event's arguments say where.
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"), slice(0, 1)),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), slice(0, 2)),
    "socket.connect": slice(1, 2),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "sqlite3.connect"), slice(0, 1)),
}
_SECONDS = 600.0  # for a world
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no second
_exit = os._exit  # which is the end of a rank, where one is simulated


def common_batch(said: int) -> int:
    """Return the multiple of 12 that is nearest to a batch size: 2, 3 and 4 divide it.

    Example:
        >>> [common_batch(size) for size in (1, 8, 16, 32, 64)]
        [12, 12, 12, 36, 60]
    """
    return 12 * max(1, round(said / 12))


@dataclass
class World:
    """What the ranks of a world did.

    Attributes:
        ranks: how many there are.
        seen: by each rank.
        error: why it ended early, in words; empty where it did not.
        sizes: batch sizes that the loop has said.
    """

    ranks: int
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
        evaluated: lengths of data over which one process makes no step: where a script by hand has as many on a rank,
            in a loader without a sampler, that rank takes whole batches of them.
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
    evaluated: Set[int] = frozenset()

    @cached_property
    def is_decorated(self) -> bool:
        """Whether it launches its ranks itself, by distwrap."""
        if self.function is not None:
            return True
        nodes = list(ast.walk(ast.parse(Path(self.script).read_bytes())))
        ours = {"distwrap", *(each.asname for each in nodes if isinstance(each, ast.alias) and each.name == "distwrap")}
        taken = [each for each in nodes if isinstance(each, ast.ImportFrom) and str(each.module).startswith("distwrap")]
        names = {each.name for node in taken for each in node.names}
        names |= {
            each.attr for each in nodes if isinstance(each, ast.Attribute) and getattr(each.value, "id", "") in ours
        }
        return not names.isdisjoint(("distributed", "*"))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a folder for a ``with``, removed also by SIGTERM and SIGHUP; the next one removes that of a killed process.

    This process then ends by the signal, as it would have without a folder.
    """
    locked_folder.remove_abandoned(_KIND)
    made, heard = locked_folder.make(_KIND), list[int]()

    def stop(number: int, frame: object) -> NoReturn:
        heard.append(number)
        raise SystemExit

    is_main = threading.current_thread() is threading.main_thread()
    hears = [each for each in _SIGNALS if is_main and signal.getsignal(each) == signal.SIG_DFL]
    for each in hears:
        signal.signal(each, stop)
    try:
        yield made.resolve()
    finally:
        locked_folder.remove(made)
        for each in hears:
            signal.signal(each, signal.SIG_DFL)
        if heard:
            os.kill(os.getpid(), heard[0])


def run(program: Program, ranks: int, folder: Path) -> World:
    """Run a program in a world of its own, in children of this process, and return what its ranks did.

    Args:
        program: what is run.
        ranks: how many.
        folder: in which it runs, in a part of its own.

    Raises:
        LaunchError: a child has ended without a word, or none in time.
    """
    (folder / _FILES).mkdir(parents=True, exist_ok=True)
    found, port = [folder / f"{rank}.pt" for rank in range(ranks if program.real else 1)], 0
    if program.real:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork").Process
    children = [fork(target=_Child(program, ranks, found, rank, port).run) for rank in range(len(found))]
    with contextlib.ExitStack() as stack:
        for child in children:
            child.start()
            stack.callback(_end, child)
        # The others may wait for one that has failed.
        if not wait_until(lambda: {each.exitcode for each in children} not in ({None}, {None, 0}), _SECONDS):
            raise LaunchError(f"the world of {ranks} ranks was not done in {_SECONDS} s: look at fewer --steps.")
        statuses = [each.exitcode for each in children]
    there = sorted((each for each in found if each.exists()), key=lambda each: each.stat().st_mtime_ns)
    worlds: list[World] = [torch.load(each, weights_only=False) for each in there]  # of our own processes
    if not worlds or (any(statuses) and not any(each.error for each in worlds)):
        raise LaunchError(f"the world of {ranks} ranks has ended without a word (status {statuses}).")
    for path in there:
        path.unlink()
    for each in worlds[1:]:
        worlds[0].seen |= each.seen
        worlds[0].error = worlds[0].error or each.error  # the first one
    return worlds[0]


def _end(child: Any) -> None:
    if child.exitcode is None:
        child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
    child.close()


class _Child:
    """A child process: a world of simulated ranks, or one rank of a world of processes.

    Args:
        program: what it runs.
        ranks: of its world.
        found: the files in which the children say what they did, beside the folder in which they run.
        rank: its own number.
        port: at which ranks meet that are processes.
    """

    def __init__(self, program: Program, ranks: int, found: list[Path], rank: int, port: int) -> None:
        self._program, self._found, self._rank, self._port = program, found, rank, port
        self._world, self._done, self._seconds = World(ranks), set[int](), _SECONDS
        meeting = ("('127.0.0.1'",) if program.real else ()  # of its ranks
        self._allowed = (str(found[0].parent), os.devnull, "/dev/shm", "/proc/self", *meeting)
        self._observer = Observer(self._rank_now, self._enough, program.steps, program.epochs, program.double)

    def run(self) -> NoReturn:
        """Run the program, and end this process."""
        program = self._program
        bind_to_parent()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, signal.SIG_DFL)
        os.chdir(self._found[0].with_name(_FILES))
        tempfile.tempdir = os.getcwd()
        changes: list[tuple[Any, str, Any]] = [
            (loaders, "shard", _shard),
            (DDPStrategy, "prepare_model", self._exact(DDPStrategy.prepare_model)),
        ]
        if program.script:
            changes.append((sys, "argv", [program.script, *map(str, program.arguments)]))
            changes.append((sys, "path", [str(Path(program.script).parent), *sys.path]))
        if not program.allow_writes:
            sys.addaudithook(self._look)
            changes.append((torch, "save", self._looking(torch.save)))
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody sees what a debugger asks
            errors = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
            torch.set_num_threads(1)  # the parent's threads are not here after the fork
            if program.double:
                torch.set_default_dtype(torch.float64)
            # CUDA does not work after a fork.
            os.environ.update({"DISTWRAP_QUIET": "1", "CUDA_VISIBLE_DEVICES": "", **self._variables()})
            if program.real:
                os.dup2(errors.fileno(), 2)  # native code warns when another rank stops first
            with (
                contextlib.redirect_stderr(errors),
                batches_of(
                    self._batch, lambda: self._shares() * program.is_decorated, program.steps if program.epochs else 0
                ),
                replaced(changes),
                self._observer.watching(),
            ):
                self._observer.here().seen.returned = numbers_in(self._start())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                self._world.error = _in_words(error)
        for seen in self._observer.seen.values():
            seen.has_ended = not self._world.error
        self._end()

    def _start(self) -> Any:
        """Run the program, and return what a function has returned."""
        program = self._program
        if program.function is not None:
            is_decorated = hasattr(program.function, "options")
            function = program.function if is_decorated else sys.modules["distwrap"].distributed()(program.function)
            return function(*program.arguments, **program.keywords)
        if program.is_decorated or program.real:
            runpy.run_path(program.script, run_name="__main__")
        elif failure := failure_of(program.script, self._world.ranks, sys.argv[1:]):
            raise LaunchError(failure)
        return None

    def _end(self) -> NoReturn:
        self._world.seen = self._observer.seen
        own = self._found[self._rank]
        for _ in range(2):
            torch.save(self._world, own.with_suffix(".part"))
            own.with_suffix(".part").replace(own)
            if self._world.error:
                break
            # The others may need this process.
            if wait_until(lambda: all(each.exists() for each in self._found), self._seconds):
                _exit(0)
            missing = [rank for rank, each in enumerate(self._found) if not each.exists()]
            self._world.error = (
                f"{named_ranks(missing)} stood still for {self._seconds:g} s when rank {self._rank} was done"
            )
        _exit(1)

    def _exact(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a way to prepare models with the mean of gradients that one process has."""

        def prepare(strategy: Any, model: Any, world: Any, wrapping: Wrapping) -> Any:
            self._seconds = min(_SECONDS, world.options.timeout)
            comm = wrapping.comm or strategy.comm
            if comm is not None and type(comm).__module__.startswith("distwrap.comm"):  # not one of the user's own
                self._observer.here().seen.switched_off.add(f"comm={type(comm).__name__}")
                wrapping = replace(wrapping, comm=AllReduce())
            return real(strategy, model, world, wrapping)

        return prepare

    def _variables(self) -> dict[str, str]:
        own, ranks = str(self._rank), str(self._world.ranks)
        if not self._program.real:
            return {"DISTWRAP_SIMULATE": ranks}
        numbers = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        numbers["OMP_NUM_THREADS"] = "1"  # the threads of OpenMP are not here after the fork, and would be waited for
        return {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), torchrun.AGENT: "prove"}

    def _batch(self, said: int, data: Any) -> int:
        self._world.sizes.add(said)
        is_whole = length(data) in self._program.evaluated and not self._program.is_decorated
        return (self._program.batch or common_batch(said)) // (1 if is_whole else self._shares())

    def _shares(self) -> int:
        """Return among how many the data are divided: ranks that divide a model's layers have one share together."""
        world = active_world()
        return self._world.ranks if world is None else world.layout.size

    def _rank_now(self) -> int:
        running: Any = simulated.running
        return self._rank if running is None else int(running.rank())

    def _enough(self) -> None:
        """Let this rank stand still after its steps, and end the world where all have made them."""
        self._done.add(self._rank_now())
        if (running := simulated.running) is None or len(self._done) >= self._world.ranks:
            self._end()
        running.scheduler.wait(bool, "the other ranks of a proof, which has seen enough")

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise an error where this process would change something outside of its folder."""
        changes = args[2] & _WRITES if event == "open" else event in _CHANGES
        for each in args[_CHANGES.get(event, slice(0, 1))] if changes else ():
            text = os.path.abspath(os.fsdecode(each)) if isinstance(each, _PATHS) else str(each)
            if isinstance(each, int) or text.startswith(self._allowed) or "__pycache__" in text:
                continue  # an integer is a file that is open already
            raise PermissionError(
                f"distwrap prove: the loop would {event.rpartition('.')[2]} {text}. A proof changes nothing outside of "
                "its own folder: give the loop a relative path, or say --allow-writes."
            )

    def _looking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's save, which writes without an audit event, with a look at the path."""

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, _PATHS):
                self._look("os.mkdir", (f,))
            real(obj, f, *args, **kwargs)

        return save


def _shard(loader: Any, mode: Any, batch_size: Any, order: Any, split: Any, **options: Any) -> Any:
    """Shard a loader so that each step's samples are those of one process."""
    shuffles = isinstance(loader, DataLoader) and isinstance(innermost(loader), RandomSampler)
    if order == "auto" and shuffles:
        order = "torch"
    if mode == "auto" and shuffles:
        mode = "drop"
    return shard(loader, mode, "per_rank", order if shuffles else "auto", split, **options)


def _in_words(error: BaseException) -> str:
    """Return an error's type and message, and the line of the user's that has raised it."""
    words = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = [each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)]
    if isinstance(error, DistwrapError) or not frames:
        return words
    if isinstance(error, FileNotFoundError):
        words += "; a proof runs in a folder of its own: read data by Path(__file__).parent"
    return f"{words} (at {place(frames[-1].filename, frames[-1].lineno or 0)})"
