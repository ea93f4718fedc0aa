"""One world: a program on so many simulated ranks, in a child process and a folder of its own, and what they did."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, RandomSampler

from distwrap import launch, locked_folder, simulated
from distwrap._internals.torch import replaced
from distwrap._internals.torch_prove import batches_of
from distwrap.comm.gradients import AllReduce
from distwrap.data import loader as loaders
from distwrap.data.sharded import innermost
from distwrap.environments import torchrun
from distwrap.errors import DistwrapError, LaunchError
from distwrap.group.world import active_world
from distwrap.launch.worker import bind_to_parent
from distwrap.prove.observer import Observer, Seen, length, plain
from distwrap.strategies.ddp import DDPStrategy
from distwrap.supervision import stacks
from distwrap.testing.simulation.simulation import failure_of
from distwrap.wording import named_ranks

_KIND = "proof"  # of our temporary folders
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PATHS = (str, bytes, os.PathLike)
# Events of an audit hook that change something; their first two arguments say where.
_CHANGES = {"open", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree", "os.rename", "os.link"}
_CHANGES |= {"os.symlink", "socket.connect", "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"}
_CHANGES |= {"sqlite3.connect"}
_SECONDS = 600.0  # for a world
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no second
_torch_save, _prepare_model = torch.save, DDPStrategy.prepare_model
_shard, _start = loaders.shard, launch.start


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
        seconds: for which ranks that have done their steps wait for others.
        has_ended: whether it has come to the end of the program.
    """

    ranks: int
    seen: dict[int, Seen] = field(default_factory=dict)
    error: str = ""
    sizes: set[int] = field(default_factory=set)
    seconds: float = _SECONDS
    has_ended: bool = False


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
        evaluated: lengths of data over which one process makes no step: where a rank has as many, in a loader without a
            sampler that nobody shards, it takes whole batches of them.
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


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a folder for a ``with``, removed also by SIGTERM and SIGHUP; the next one removes that of a killed process.

    This process then ends by the signal, as it would have without a folder.
    """

    def stop(number: int, frame: object) -> NoReturn:
        atexit.register(os.kill, os.getpid(), number)
        raise SystemExit

    locked_folder.remove_abandoned(_KIND)
    made = locked_folder.make(_KIND)
    with contextlib.ExitStack() as stack:
        stack.callback(locked_folder.remove, made)
        for number in _SIGNALS:
            with contextlib.suppress(ValueError):  # another thread than the main one gets no signals
                if signal.getsignal(number) == signal.SIG_DFL:
                    stack.callback(signal.signal, number, signal.signal(number, stop))
        yield made.resolve()


def run(program: Program, ranks: int, folder: Path) -> World:
    """Run a program in a world of its own, in children of this process, and return what its ranks did.

    Args:
        program: what is run.
        ranks: how many.
        folder: in which it runs.

    Raises:
        LaunchError: a child has ended without a word, or none in time.
    """
    folder.mkdir(exist_ok=True)
    fork, world, port = multiprocessing.get_context("fork"), World(ranks), 0
    if program.real:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    with contextlib.ExitStack() as stack:
        missing: dict[Any, int] = {}  # ranks, by the pipes through which they tell
        for rank in range(ranks if program.real else 1):
            told, tells = fork.Pipe(duplex=False)
            child = fork.Process(target=_Child(program, World(ranks), rank, folder, port, tells).run)
            child.start()
            stack.callback(_end, child)
            tells.close()
            missing[told] = rank
        deadline = time.monotonic() + _SECONDS
        while missing and not world.error:  # the others may wait for one that has failed
            ready: list[Any] = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready and not world.seen:
                raise LaunchError(f"the world of {ranks} ranks was not done in {_SECONDS} s: look at fewer --steps.")
            if not ready:
                world.error = (
                    f"{named_ranks(missing.values())} stood still for {world.seconds:g} s when others were done"
                )
            for each in ready:
                try:
                    its = torch.load(io.BytesIO(each.recv_bytes()), weights_only=False)  # of our own process
                except EOFError:
                    raise LaunchError(f"rank {missing[each]} of {ranks} has ended without a word.") from None
                world = replace(its, seen=world.seen | its.seen, error=world.error or its.error)
                deadline = min(deadline, time.monotonic() + its.seconds)
                del missing[each]
    return world


def _end(child: Any) -> None:
    child.kill()
    with contextlib.suppress(OSError):  # it had no time to become a group of its own, or has left nothing
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    child.close()


class _Child(Observer):
    """A child process: a world of simulated ranks, or one rank of a world of processes.

    Args:
        program: what it runs.
        world: its own, to be filled.
        rank: its own number.
        folder: in which it runs.
        port: at which ranks meet that are processes.
        pipe: through which it tells its parent what its ranks did.
    """

    def __init__(self, program: Program, world: World, rank: int, folder: Path, port: int, pipe: Connection) -> None:
        super().__init__(rank, program.steps, program.epochs, double=program.double)
        self._program, self._world, self._folder, self._port, self._pipe = program, world, folder, port, pipe
        self._done, self._whole = set[int](), weakref.WeakSet[Any]()  # ranks, and loaders that are not to be divided
        meeting = ("('127.0.0.1'",) if program.real else ()  # of its ranks
        self._allowed = (str(folder), os.devnull, "/dev/shm", "/proc/self", *meeting)

    def run(self) -> NoReturn:
        """Run the program, and wait for the end of this process."""
        program = self._program
        bind_to_parent()
        os.register_at_fork(after_in_child=self._pipe.close)  # whose end is that of this process
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.chdir(self._folder)
        tempfile.tempdir = str(self._folder)
        torch.set_num_threads(1)  # the parent's threads are not here after the fork
        if program.double:
            torch.set_default_dtype(torch.float64)
        os.environ.update({"DISTWRAP_QUIET": "1", "CUDA_VISIBLE_DEVICES": ""})  # CUDA does not work after a fork
        os.environ.update(self._variables())
        changes: list[tuple[Any, str, Any]] = [
            (launch, "start", self._call),
            (loaders, "shard", self._shard),
            (DDPStrategy, "prepare_model", lambda *given: self._prepare_model(*given)),
        ]
        if not program.allow_writes:
            sys.addaudithook(self._look)
            changes.append((torch, "save", self._save))
        for stream in (0, 2):  # nobody sees what a debugger asks, and native code warns when another rank stops first
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        most = program.steps if program.epochs else 0
        try:
            with batches_of(self._batch, most), replaced(changes), self.watching():
                self._start()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                self._world.error = _in_words(error)
        self._world.has_ended = not self._world.error
        self._tell()

    def _start(self) -> None:
        program, function = self._program, self._program.function
        if function is not None:
            function = function if hasattr(function, "options") else sys.modules["distwrap"].distributed()(function)
            function(*program.arguments, **program.keywords)
        elif program.real:
            sys.argv = [program.script, *map(str, program.arguments)]
            sys.path.insert(0, str(Path(program.script).parent))
            runpy.run_path(program.script, run_name="__main__")
        elif failure := failure_of(program.script, self._world.ranks, [*map(str, program.arguments)]):
            raise LaunchError(failure)

    def _variables(self) -> dict[str, str]:
        """Return what says to a function that it is simulated, or to a process which rank it is."""
        own, ranks = str(self.number), str(self._world.ranks)
        if not self._program.real:
            return {"DISTWRAP_SIMULATE": ranks} if self._program.function else {}
        numbers = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        numbers["OMP_NUM_THREADS"] = "1"  # the threads of OpenMP are not here after the fork, and would be waited for
        return {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), torchrun.AGENT: "prove"}

    def enough(self) -> None:
        """Let this rank stand still after its steps, and tell where all have made them."""
        self._done.add(self.rank())
        if (running := simulated.running) is None or len(self._done) >= self._world.ranks:
            self._tell()
        running.scheduler.wait(bool, "the other ranks of a proof, which has seen enough")

    def _tell(self) -> NoReturn:
        """Tell the parent what was done, and wait for it to end this process: other ranks may need it until then."""
        buffer, self._world.seen = io.BytesIO(), self.seen
        if (world := active_world()) is not None:
            self._world.seconds = min(_SECONDS, world.options.timeout)
        _torch_save(self._world, buffer)
        self._pipe.send_bytes(buffer.getbuffer())
        while True:
            signal.pause()

    def _call(self, task: Any) -> Any:
        """Call a decorated function, and keep the numbers that it returns."""
        value = _start(task)
        if task.options.returns != "all":
            self.here().seen.note_numbers("returned", "", plain(value))
        return value

    def _batch(self, loader: Any, said: int, data: Any) -> tuple[int, int]:
        """Return the size of a rank's batches, and among how many ranks data are divided; 0 where they stay whole."""
        self._world.sizes.add(said)
        world, shares = active_world(), self._world.ranks
        if world is not None:
            shares = world.layout.size  # ranks that divide a model's layers have one share together
        if length(data) in self._program.evaluated:
            self._whole.add(loader)
            shares = 1
        return (self._program.batch or common_batch(said)) // shares, shares if world is not None else 0

    def _shard(self, loader: Any, mode: Any, batch_size: Any, order: Any, split: Any, **options: Any) -> Any:
        """Shard a loader so that each step's samples are those of one process."""
        shuffles = isinstance(loader, DataLoader) and isinstance(innermost(loader), RandomSampler)
        order = "auto" if not shuffles else "torch" if order == "auto" else order
        mode = "drop" if shuffles and mode == "auto" else mode
        return _shard(loader, mode, "global" if loader in self._whole else "per_rank", order, split, **options)

    def _prepare_model(self, strategy: Any, model: Any, world: Any, wrapping: Any) -> Any:
        """Prepare a model with the mean of gradients that one process has."""
        comm = wrapping.comm or strategy.comm
        if comm is not None and type(comm).__module__.startswith("distwrap.comm"):  # not one of the user's own
            self.here().seen.switched_off.add(f"comm={type(comm).__name__}")
            wrapping = replace(wrapping, comm=AllReduce())
        return _prepare_model(strategy, model, world, wrapping)

    def _save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Save by torch, which writes without an audit event."""
        if isinstance(f, _PATHS):
            self._look("os.mkdir", (f,))
        _torch_save(obj, f, *args, **kwargs)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise an error where this process would change something outside of its folder."""
        if event not in _CHANGES or (event == "open" and not args[2] & _WRITES):
            return
        for each in args[:1] if event == "open" else args[:2]:
            text = os.path.abspath(os.fsdecode(each)) if isinstance(each, _PATHS) else str(each)
            is_place = isinstance(each, (*_PATHS, tuple))  # an integer is a file that is open already
            if is_place and not text.startswith(self._allowed) and "__pycache__" not in text:
                raise PermissionError(
                    f"distwrap prove: the loop would {event.rpartition('.')[2]} {text}. A proof changes nothing "
                    "outside of its own folder: give the loop a relative path, or say --allow-writes."
                )


def _in_words(error: BaseException) -> str:
    """Return an error's type and message, and the line of the user's that has raised it."""
    words = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, FileNotFoundError):
        words += "; a proof runs in a folder of its own: read data by Path(__file__).parent"
    line = stacks.locate(stacks.of_traceback(error.__traceback__))[1]
    return words if isinstance(error, DistwrapError) else f"{words} (at {line})"
