"""Save and load checkpoints: the public functions."""

import os
from pathlib import Path
from typing import Any

from distwrap.checkpoint import files, retention
from distwrap.checkpoint.background import Writer
from distwrap.checkpoint.formats import CheckpointIO, Streamed, choose
from distwrap.checkpoint.loading import any_divided, load_into, read
from distwrap.checkpoint.meeting import ALONE, TOGETHER, SaveMeetings, failure
from distwrap.checkpoint.pieces import in_pieces, leaves
from distwrap.checkpoint.safetensors_format import is_folder_of
from distwrap.checkpoint.writing import Save
from distwrap.errors import CheckpointError, OptionError
from distwrap.group.collective_guard import CollectiveGuard, check_collectives_allowed
from distwrap.group.failures import is_secondary
from distwrap.group.world import current_world
from distwrap.model.checks.drift import Drift
from distwrap.model.wrapped_models import bound_strategy
from distwrap.nesting import rebuilt
from distwrap.stopwatch import Part
from distwrap.supervision.activity import Activity


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    background: bool = False,
    io: str | CheckpointIO = "auto",
    alone: bool = False,
) -> None:
    """Together on all ranks, write a checkpoint, completely or not at all.

    Every rank calls. Rank 0 writes, all of them wait until the file is written, and all get an error if that failed.
    One rank saves by itself with ``alone=True``, as under ``if rank() == 0``, or within `rank_zero_only`. The tensors
    of a divided model come to rank 0 one at a time, so that no rank holds all of it. Models, optimizers,
    schedulers, loaders, `run_state` and any other object with a ``state_dict`` may stand anywhere in `state`; their
    state dicts are written without a wrapper's prefix.

    Args:
        state: tensors, numbers, strings and objects with a ``state_dict``, in dicts, lists and tuples.
        path: the file, the same on all ranks; a time or a temporary folder in it would differ between them. The old
            file is replaced in one step when the new one is safely on disk. A symbolic link stays, and the file that it
            leads to is replaced.
        keep: how many checkpoints to keep; ``None`` removes nothing. In a numbered series, as ``step-100.pt``, those
            with the highest numbers are kept, and a link ``step-latest.pt`` moves to the new one before an older one is
            removed. A name is of a series if it ends in a number after one of ``-_.=``, or has a number after a word
            such as step or epoch; ``resnet50.pt`` is not. For any other name the file's predecessors are kept, as
            ``last.pt.1``; a folder has none, and needs a numbered name.
        background: copy the state, return, and write the copy in a thread. The next call waits for it. A failure is
            raised by the next call, by `wait_for_saves`, or at the end of the decorated function; else it ends the
            program.
        io: ``"file"`` (torch's own format), ``"safetensors"`` (the default for that suffix; for a model alone; an
            extra; under another suffix a folder, as Hugging Face keeps large models), ``"sharded"`` (a folder to which
            every rank writes its part, by torch's distributed checkpoint), or a `CheckpointIO`.
        alone: this rank writes by itself, and no other one need call. Not for what all ranks put together: an object
            that a strategy divides, `run_state`, a folder of parts.

    Raises:
        CheckpointError: the checkpoint could not be written; or another rank does not come; or `state` holds something
            that the safe loader would refuse, which the message names; or the path is a device, or differs between
            ranks. Raised on every rank that calls.
        OptionError: `keep` is wrong, or is given for a folder without a number; or a format of your own cannot be
            written in the background.

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
    current_world().count("saves")
    path = Path(path)
    chosen = choose(format_of(io), path)
    if keep is not None and (chosen.collective or is_folder_of(chosen, path)) and retention.latest_of(path) is None:
        raise OptionError(
            f"save(keep={keep}): {path.name} is a folder, and a later one of the same name replaces it, so "
            "none could be kept: give it a name with a number, as 'step-100', or leave keep out."
        )
    current_world().part(Drift).pause()
    if background and chosen.collective and not hasattr(chosen, "over"):
        raise OptionError(
            f"save(background=True): all ranks write a {type(chosen).__name__} together, and cannot train "
            "meanwhile. Leave background out."
        )
    alone = _is_alone(alone)
    with current_world().part(Activity).part(Part.CHECKPOINT):
        differs, way_out = "", ALONE
        if chosen.collective or _needs_all_ranks(state):
            check_collectives_allowed("save() of what all ranks hold together")
            if alone:
                raise CheckpointError(
                    f"rank {current_world().placement.rank} called save(alone=True) for {path}, which one rank cannot "
                    f"write. {TOGETHER}"
                )
            way_out = TOGETHER
        if not alone:
            differs = current_world().part(SaveMeetings).meet(f"save {path}", way_out)
            state = _with_collective_states(state, chosen)
        Save(state, path, keep, chosen, alone=alone).run(differs=differs, background=background)


def wait_for_saves(*, alone: bool = False) -> None:
    """Together on all ranks, wait until everything that ``save(background=True)`` writes is on disk.

    Args:
        alone: this rank waits by itself for what it has saved alone; so it does within `rank_zero_only`.

    Raises:
        CheckpointError: a checkpoint could not be written; raised on every rank.
    """
    what, problem, cause = "wait for saves", ("", False), None
    meetings, writer = current_world().part(SaveMeetings), current_world().part(Writer)
    if _is_alone(alone):
        writer.wait()
        return
    differs = meetings.meet(what)
    try:
        writer.wait()
        problem = (differs, False)
    except CheckpointError as error:
        cause, problem = error, (str(error), is_secondary(error))
    first, follows, _ = meetings.agree(what, problem)
    if first:
        raise failure(first, follows) from cause


def load(
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    into: Any = None,
    io: str | CheckpointIO = "auto",
    strict: bool = True,
) -> Any:
    """Read a checkpoint with torch's safe loader, by default onto the CPU, so that the ranks do not crowd one device.

    Args:
        path: the file; or the folder of a sharded checkpoint, which every rank must then load.
        map_location: the same as for ``torch.load``.
        into: objects in the nesting in which they were saved: models (wrapped, compiled or plain), optimizers,
            schedulers, loaders, `run_state`. Their ``load_state_dict`` is called with the saved state; anything else
            that was saved is only returned. Of an object that a strategy divides, each rank reads only its own pieces.
        io: the same as for `save`.
        strict: whether a model in `into` must have exactly the names that were saved. With ``False`` a model takes the
            names that it has, an object that was not saved stays as it is, and a line says which these are. A tensor of
            another shape is an error in any case.

    Returns:
        The saved state, with objects as their state dicts; for a divided object in `into`, this rank's pieces of it.

    Raises:
        CheckpointError: the file is not a checkpoint, holds objects that only an unsafe loader would take, or lacks an
            object that is in `into`.
        FileNotFoundError: there is no such file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "last.pt"
        >>> save({"lr": 0.1, "model": torch.nn.Linear(1, 1)}, path)
        >>> model = torch.nn.Linear(1, 1)
        >>> load(path, into={"model": model})["lr"]
        0.1
    """
    with current_world().part(Activity).part(Part.CHECKPOINT):
        state = read(files.found(Path(path)), into, map_location=map_location, io=format_of(io))
        if into is not None:
            load_into(into, state, strict=strict)
    return state


def format_of(io: str | CheckpointIO) -> str | CheckpointIO:
    """Return the format, or that of the strategy if the call leaves it open."""
    strategy = current_world().options.strategy
    return io if io != "auto" or isinstance(strategy, str) else strategy.checkpoint_io()


def _is_alone(alone: bool) -> bool:
    """Return whether this rank does something by itself: it says so, or is within a function that others do not run."""
    return alone or bool(current_world().part(CollectiveGuard).function)


def _needs_all_ranks(state: Any) -> bool:
    """Return whether an object in a nesting has a state that all ranks put together."""
    takes_part = (getattr(type(part), "on_all_ranks", False) is True for part in leaves(state, object))
    return any(takes_part) or any_divided(state)


def _with_collective_states(state: Any, io: CheckpointIO) -> Any:
    """Replace objects by states that all ranks put together, or by this rank's pieces; a collective."""
    in_parts = io.collective or isinstance(io, Streamed)

    def replaced(leaf: Any, path: tuple[Any, ...]) -> Any:
        if getattr(type(leaf), "on_all_ranks", False) is True:
            return leaf.state_dict()
        strategy = bound_strategy(leaf)
        parts = strategy.parts(leaf) if strategy is not None and in_parts else None
        if parts is not None:
            from distwrap.checkpoint.sharded import check_parts  # imports torch's distributed checkpoint

            checked = check_parts(parts, leaf, type(strategy).__name__)
            return checked if io.collective else in_pieces(checked)
        return strategy.state(leaf) if strategy is not None and strategy.is_divided(leaf) else leaf

    return rebuilt(state, replaced)
