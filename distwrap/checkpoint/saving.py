"""Write and read checkpoints: whole or not at all, known to all ranks, and safe to load."""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import format_exception_only
from typing import Any

import torch

from distwrap.checkpoint import files, retention
from distwrap.checkpoint.background import Writer
from distwrap.checkpoint.formats import CheckpointIO, choose
from distwrap.checkpoint.plain import plain
from distwrap.errors import CheckpointError, CollectiveError, OptionError
from distwrap.group.collective_guard import CollectiveGuard, check_collectives_allowed
from distwrap.group.wait_for_rank import share_result
from distwrap.group.world import current_world
from distwrap.model import unwrap_model
from distwrap.model.drift import Drift
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.wrapped_models import bound_strategy
from distwrap.nesting import rebuilt
from distwrap.supervision.hang_report import Activity


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    background: bool = False,
    io: str | CheckpointIO = "auto",
) -> None:
    """Write a checkpoint on rank 0: whole, or not at all.

    When every rank calls, all of them wait until the file is there, and learn of a failure; rank 0 may also call it
    alone. The two are told apart by the line that calls: let all ranks call from one line, and rank 0 alone from
    another, or under `rank_zero_only`. Models, optimizers, schedulers, loaders, `run_state` and whatever else has a
    ``state_dict`` may stand anywhere in `state`; their state dicts are written, without a wrapper's prefix.

    Args:
        state: tensors, numbers, strings and objects with a ``state_dict``, in dicts, lists and tuples.
        path: the file, the same on all ranks: no time in it, and no temporary folder, which are each rank's own. It is
            replaced in one step, after the new one is safely on disk; a symbolic link stays, and what it leads to is
            replaced.
        keep: how many checkpoints to keep. Of a series, as ``step-100.pt``, those with the highest numbers; a link
            ``step-latest.pt`` moves to the new one when it is complete, before an older one goes. A series is a name
            that ends in a number after one of ``-_.=``, or has one after a word like step or epoch: ``resnet50.pt`` is
            none. Of another name, the file's predecessors, as ``last.pt.1``. ``None`` removes nothing.
        background: copy the state, return, and write the copy in a thread. The next call waits for it; a failure is
            raised there, by `wait_for_saves`, at the end of the decorated function, or ends the program.
        io: ``"file"`` (torch's own), ``"safetensors"`` (by default for that suffix; a model alone; an extra),
            ``"sharded"`` (a folder to which every rank writes a part, by torch's distributed checkpoint), or a
            `CheckpointIO`.

    Raises:
        CheckpointError: it could not be written, or holds what the safe loader would refuse; names it. On every rank
            that calls. Or the path is a device, or has the rank in it: rank 0 writes one file for all.
        OptionError: a wrong `keep`, or a sharded checkpoint in the background.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> save({"model": torch.nn.Linear(1, 1), "epoch": 3}, folder / "last.pt")
        >>> load(folder / "last.pt")["epoch"]
        3
        >>> for step in (10, 20, 30):
        ...     save({"step": step}, folder / f"step-{step}.pt", keep=2)
        >>> sorted(file.name for file in folder.glob("step-*"))
        ['step-20.pt', 'step-30.pt', 'step-latest.pt']
    """
    retention.check_keep(keep)
    path = Path(path)
    chosen = choose(_format_of(io), path)
    current_world().part(Drift).pause()
    state = _with_collective_states(state, in_parts=chosen.collective)
    if chosen.collective:
        if background:
            raise OptionError("save(background=True): a sharded checkpoint is written by all ranks, and not meanwhile.")
        _save_parts(state, path, keep, chosen)
    else:
        _save_file(state, path, keep, chosen, background=background)


def wait_for_saves() -> None:
    """Wait until what ``save(background=True)`` is writing is on disk; every rank must call.

    Raises:
        CheckpointError: it could not be written; on every rank.
    """
    _do_on_ranks(current_world().part(Writer).wait, "a checkpoint written in the background", "wait for saves")


def load(
    path: str | os.PathLike[str], *, map_location: Any = "cpu", into: Any = None, io: str | CheckpointIO = "auto"
) -> Any:
    """Read a checkpoint with torch's safe loader, onto the CPU, so that the ranks do not crowd one device.

    Args:
        path: the file, or folder of a sharded one; then every rank must call.
        map_location: as for ``torch.load``.
        into: objects in the nesting in which they were saved, whose ``load_state_dict`` is called with what is there:
            models wrapped, compiled or plain, optimizers, schedulers, loaders, `run_state`. What was saved beside them
            is only returned.
        io: as for `save`.

    Returns:
        What was saved, objects as their state dicts.

    Raises:
        CheckpointError: the file is no checkpoint, holds objects that only an unsafe load would take, or lacks one that
            is in `into`.
        FileNotFoundError: it is not there.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "last.pt"
        >>> save({"lr": 0.1, "model": torch.nn.Linear(1, 1)}, path)
        >>> model = torch.nn.Linear(1, 1)
        >>> load(path, into={"model": model})["lr"]
        0.1
    """
    path = files.found(Path(path))
    chosen = choose(_format_of(io), path)
    if chosen.collective:
        check_collectives_allowed("load() of a sharded checkpoint")
    try:
        state = chosen.load(path, map_location)
    except (FileNotFoundError, CheckpointError):
        raise
    except Exception as error:
        place = current_world().placement
        why = format_exception_only(error)[0].splitlines()[0].rstrip(". ")  # with its type: "101" says nothing
        raise CheckpointError(
            f"rank {place.rank} cannot load {os.fspath(path)}: {why}. "
            f"Save it again with distwrap.save(), or, if you trust where it comes from, read it with "
            f"torch.load(path, weights_only=False)."
        ) from error
    if into is not None:
        load_into(into, state)
    return state


def load_into(into: Any, state: Any, where: str = "") -> None:
    """Hand each object in a nesting what was saved in its place.

    Raises:
        CheckpointError: nothing was; names the place.
    """
    strategy, target = bound_strategy(into), into
    if strategy is not None:
        strategy.load_state(into, state)
        return
    if isinstance(into, torch.nn.Module):
        target = unwrap_model(into)
        state = strip_module_prefix(state, target=target)
    if callable(getattr(target, "load_state_dict", None)):
        target.load_state_dict(state)
    elif isinstance(into, Mapping):
        for key, item in into.items():
            if not isinstance(state, Mapping) or key not in state:
                there = ", ".join(map(repr, state)) if isinstance(state, Mapping) else type(state).__name__
                raise CheckpointError(f"the checkpoint has no state{where}[{key!r}]. It has: {there}.")
            load_into(item, state[key], f"{where}[{key!r}]")
    elif isinstance(into, (list, tuple)):
        if not isinstance(state, (list, tuple)) or len(state) != len(into):
            raise CheckpointError(f"the checkpoint's state{where} is no list of {len(into)}.")
        for index, item in enumerate(into):
            load_into(item, state[index], f"{where}[{index}]")


def _save_file(state: Any, path: Path, keep: int | None, io: CheckpointIO, *, background: bool) -> None:
    def write(plain_state: Any, place: Path) -> None:
        files.write_atomically(
            place, lambda temporary: io.save(plain_state, temporary), lambda: retention.keep_predecessors(place, keep)
        )
        retention.prune(place, keep)

    def work() -> None:
        writer, place = current_world().part(Writer), files.place_of(path)
        plain_state = rebuilt(plain(state), _refuse_piece)
        if background:
            writer.write(plain_state, lambda copy: write(copy, place), f"the checkpoint {path}")
        else:
            writer.wait()  # a later state must not be overtaken by an earlier one
            write(plain_state, place)

    _do_on_ranks(work, f"the checkpoint {path}", f"save {path}")


def _save_parts(state: Any, path: Path, keep: int | None, io: CheckpointIO) -> None:
    check_collectives_allowed("save() of a sharded checkpoint")
    what, name = f"the checkpoint {path}", f"save {path}"
    everybody = range(current_world().placement.world_size)
    plain_state: list[Any] = []
    place = Path(os.path.realpath(path))
    temporary = place.parent / f".{place.name}.tmp"

    def make_room() -> None:
        files.place_of(path)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    def finish() -> None:
        files.put_folder(temporary, place)
        retention.prune(place, keep)

    _do_on_ranks(make_room, what, name)
    # Before a rank begins to write, which it may do together with the others.
    _do_on_ranks(lambda: plain_state.append(plain(state)), what, f"{name} state", everybody)
    _do_on_ranks(lambda: io.save(plain_state[0], temporary), what, f"{name} part", everybody)
    _do_on_ranks(finish, what, name)


def _do_on_ranks(work: Callable[[], object], what: str, name: str, workers: Sequence[int] = (0,)) -> None:
    """Do some work on some ranks, and raise a failure of one of them on every rank.

    Where only some ranks are, as in `rank_zero_only`, the others learn of nothing.

    Args:
        work: writes something.
        what: is written, for the error.
        name: of the work, alike on every rank. The ranks meet in calls of one line and one name.
        workers: the ranks that do it.

    Raises:
        CheckpointError: names the rank and the host; or this rank's name has its rank in it.
    """
    rank, host = current_world().placement.rank, socket.gethostname()
    activity = current_world().part(Activity)
    activity.record(name)
    problem: str = ""
    cause: BaseException | None = None
    if rank in workers:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever is raised, all ranks raise
            problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            cause = error
    for worker in workers:
        its_host, its_problem = host, problem
        if not current_world().part(CollectiveGuard).function:
            mine = json.dumps([name, host, problem]).encode() if rank == worker else None
            its_name = ""
            while its_name != name:  # of what that rank has saved alone, or to a path of its own
                its_name, its_host, its_problem = _told_by(worker, mine, name, activity.site, its_name)
                if its_name != name:
                    _refuse_own_name(rank, name, worker, its_name)
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        if its_problem:
            raise CheckpointError(
                f"{what} was not written by rank {worker} on {its_host}: {its_problem}. What was there before is "
                f"untouched."
            ) from (cause if rank == worker else None)


def _told_by(worker: int, mine: bytes | None, name: str, site: str, before: str) -> list[str]:
    """Return what a rank tells of its work in this line: the name, its host, and the problem.

    Args:
        worker: that rank.
        mine: what this rank tells, if it is that one.
        name: of the work on this rank.
        site: the line.
        before: another name that the rank told there meanwhile, for the error and the hang report.

    Raises:
        CheckpointError: it has left without coming to this line.
    """
    waits_for = f"{name} (rank {worker} did {before!r} there)" if before else name
    try:
        return json.loads(share_result(waits_for, worker, mine, turn=f"save at {site}"))  # type: ignore[no-any-return]
    except CollectiveError as error:
        why = "with the same path" if before else f"which rank {worker} did not reach"
        raise CheckpointError(
            f"{waits_for!r} at {site}: {error} All ranks must call it from one line, {why}."
        ) from error


def _refuse_own_name(rank: int, name: str, worker: int, its_name: str) -> None:
    """Raise an error where two ranks' names differ in their ranks: each means to write a file of its own."""
    mine, its = (re.split(r"(\d+)", each) for each in (name, its_name))
    differ = [pair for pair in zip(mine, its, strict=False) if pair[0] != pair[1]]
    if len(mine) == len(its) and all(one.isdigit() and (int(one), int(two)) == (rank, worker) for one, two in differ):
        raise CheckpointError(
            f"rank {rank} called {name!r}, and rank {worker} {its_name!r}. Only rank {worker} writes, for all ranks, "
            f"so all must give the same name. For a file of each rank's own use torch.save(), or else io='sharded'."
        )


def _refuse_piece(leaf: Any, path: tuple[Any, ...]) -> Any:
    if hasattr(leaf, "full_tensor") and any(  # as a DTensor has, whose class takes long to import
        ranks > 1 and not placement.is_replicate()
        for placement, ranks in zip(leaf.placements, leaf.device_mesh.shape, strict=True)
    ):
        where, rank = "".join(f"[{key!r}]" for key in path), current_world().placement.rank
        raise CheckpointError(
            f"state{where} is a DTensor, of which rank {rank} has a piece. Save with io='sharded', or save what its "
            f"full_tensor() returns on every rank."
        )
    return leaf


def _format_of(io: str | CheckpointIO) -> str | CheckpointIO:
    """Return the strategy's own format where the call leaves the format open."""
    strategy = current_world().options.strategy
    return io if io != "auto" or isinstance(strategy, str) else strategy.checkpoint_io()


def _with_collective_states(state: Any, *, in_parts: bool) -> Any:
    """Replace objects whose state all ranks put together by what they have put together; every rank takes part."""

    def replaced(leaf: Any, path: tuple[Any, ...]) -> Any:
        if getattr(type(leaf), "on_all_ranks", False) is True:
            return leaf.state_dict()
        strategy = bound_strategy(leaf)
        parts = strategy.parts(leaf) if strategy is not None and in_parts else None
        if parts is not None:
            from distwrap.checkpoint.sharded import check_parts  # imports torch's distributed checkpoint

            return check_parts(parts, leaf, type(strategy).__name__)
        return strategy.state(leaf) if strategy is not None and strategy.shards else leaf

    return rebuilt(state, replaced)
