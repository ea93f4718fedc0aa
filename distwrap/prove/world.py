"""One world: a program on so many simulated ranks, in a child process and a folder of its own, and what they did."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.utils.data import DataLoader, RandomSampler

from distwrap import data, simulated
from distwrap._internals.torch_prove import batches_of
from distwrap._internals.torch_simulation import replaced
from distwrap.data import loader as loaders
from distwrap.data.sharded import innermost
from distwrap.errors import LaunchError
from distwrap.network.waiting import wait_until
from distwrap.prove.observer import Observer, Seen, numbers_in
from distwrap.testing.ranks import simulate
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


@dataclass(frozen=True)
class Size:
    """Size of a world.

    Attributes:
        ranks: how many.
        times: by how much the loop's own batch on a rank is multiplied; 0 where all ranks together take one batch
            that 2, 3 and 4 divide.
        batch: this one; by default the one that is nearest to the loop's.
    """

    ranks: int
    times: int = 0
    batch: int | None = None

    def of(self, said: int) -> int:
        """Return the batch size of one rank for what the loop has said."""
        return said * self.times if self.times else (self.batch or common_batch(said)) // self.ranks


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
    sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """What is proven: a script, or a function.

    Attributes:
        script: its path; empty for a function.
        arguments: of either.
        function: called on each rank.
        allow_writes: whether it may change files outside of its folder, and connect to other machines.
        double: whether it computes in float64.
    """

    script: str = ""
    arguments: Sequence[Any] = ()
    function: Callable[..., Any] | None = None
    allow_writes: bool = False
    double: bool = False

    @cached_property
    def is_decorated(self) -> bool:
        """Whether it launches its ranks itself, by distwrap."""
        if self.function is not None:
            return True
        names = {
            getattr(node, "attr", getattr(node, "id", ""))
            for node in ast.walk(ast.parse(Path(self.script).read_bytes()))
        }
        return (
            "distributed" in names
            and re.search(r"^\s*(import|from) distwrap", Path(self.script).read_text(), re.M) is not None
        )


def run(program: Program, size: Size, steps: int) -> World:
    """Run a program in a world of its own, in a child of this process, and return what its ranks did.

    Raises:
        LaunchError: the child has ended without a word, or in time; or the system has no fork.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("a proof runs each world in a fork of this process, which this system does not have.")
    with tempfile.TemporaryDirectory(prefix="distwrap-prove-") as folder:
        found = Path(folder) / "world.pt"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            try:
                _run_here(program, size, steps, Path(folder), found)
            except BaseException:  # noqa: BLE001 - whose caller is the parent's
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(1)
        ended = status = 0

        def has_ended() -> bool:
            nonlocal ended, status
            ended, status = os.waitpid(child, os.WNOHANG)
            return bool(ended)

        try:
            wait_until(has_ended, _SECONDS)
        finally:
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        if not ended:
            raise LaunchError(f"the world of {size.ranks} ranks was not done in {_SECONDS} s: look at fewer --steps.")
        if not found.exists():
            raise LaunchError(f"the world of {size.ranks} ranks has ended without a word (status {status}).")
        world: World = torch.load(found, weights_only=False)  # of our own process
        return world


def _run_here(program: Program, size: Size, steps: int, folder: Path, found: Path) -> NoReturn:
    """Be the child process, and end it."""
    world, said = World(size), set[int]()
    try:
        observer = Observer(_rank, steps, lambda: _enough(observer, size, steps, end), double=program.double)

        def end() -> NoReturn:
            world.seen, world.sizes = observer.seen, sorted(said)
            allowed.append(str(found))
            torch.save(world, found.with_suffix(".part"))
            found.with_suffix(".part").replace(found)
            os._exit(0)

        allowed = _guard(folder, program.allow_writes)
        output = open(os.devnull, "w")  # noqa: SIM115 - as long as the process

        def batch(given: int) -> int:
            said.add(given)
            return size.of(given)

        torch.set_num_threads(1)  # the parent's threads are not here after the fork
        if program.double:
            torch.set_default_dtype(torch.float64)
        # CUDA does not work after a fork.
        os.environ.update({"DISTWRAP_SIMULATE": str(size.ranks), "DISTWRAP_QUIET": "1", "CUDA_VISIBLE_DEVICES": ""})
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            batches_of(batch, 0 if size.times else size.ranks),
            _sharded_alike(),
            observer.watching(),
        ):
            returned = _start(program, size)
        for rank, seen in observer.seen.items():
            seen.has_ended = True
            if rank < len(returned):
                seen.returned = numbers_in(returned[rank])
    except BaseException as error:  # noqa: BLE001 - told to the parent
        world.error = _in_words(error)
    end()


def _start(program: Program, size: Size) -> list[Any]:
    """Run the program, and return what the first ranks have returned, where that is known."""
    if hasattr(program.function, "options"):  # it is decorated
        return [program.function(*program.arguments)]  # type: ignore[misc] # of rank 0
    if program.function is not None:
        return simulate(program.function, size.ranks, *program.arguments)
    with mock.patch.object(sys, "argv", [program.script, *map(str, program.arguments)]):
        if not program.is_decorated:
            if words := failure_of(program.script, size.ranks, list(map(str, program.arguments))):
                raise LaunchError(words)
        else:
            sys.path.insert(0, str(Path(program.script).parent.resolve()))
            try:
                runpy.run_path(program.script, run_name="__main__")
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
    return []


def _rank() -> int:
    running: Any = simulated.running
    return 0 if running is None else int(running.rank())


def _enough(observer: Observer, size: Size, steps: int, end: Callable[[], NoReturn]) -> None:
    """Let this rank stand still after its steps, and end the world where all have made them."""
    if sum(len(seen.steps) >= steps for seen in observer.seen.values()) >= size.ranks or simulated.running is None:
        end()
    running: Any = simulated.running
    running.condition().wait(words="the other ranks of a proof, which has seen enough")


@contextlib.contextmanager
def _sharded_alike() -> Any:
    """Let loaders be sharded within a ``with`` so that each step's samples are those of one process."""
    real = loaders.shard_loader

    def shard(loader: Any, **options: Any) -> Any:
        shuffles = isinstance(loader, DataLoader) and isinstance(innermost(loader), RandomSampler)
        if not shuffles:
            options.pop("order", None)
        elif options.get("order", "auto") == "auto":
            options["order"] = "torch"
        if shuffles and options.get("mode", "auto") == "auto":
            options["mode"] = "drop"
        return real(loader, **{**options, "batch_size": "per_rank"})

    with replaced([(owner, "shard_loader", shard) for owner in (sys.modules["distwrap"], data, loaders)]):
        yield


def _guard(folder: Path, allow_writes: bool) -> list[str]:
    """Stop this process where it would change something outside of a folder; return where else it may write."""
    os.chdir(folder)
    tempfile.tempdir = str(folder)
    allowed = [str(folder), os.devnull, "/dev/shm", "/proc/self"]
    if allow_writes:
        return allowed

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            places = args[:1] if args[2] & _WRITES and not isinstance(args[0], int) else ()
        else:
            places = args[_CHANGES[event]] if event in _CHANGES else ()
        texts = [os.path.abspath(os.fsdecode(each)) if isinstance(each, _PATHS) else str(each) for each in places]
        for text in texts:
            if text.startswith(tuple(allowed)) or "__pycache__" in text:
                continue
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
    return "".join(traceback.format_exception_only(type(error), error)).strip()
