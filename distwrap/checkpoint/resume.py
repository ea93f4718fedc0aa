"""Resume from the newest checkpoint on any node, and restore the state of the run.

This state is what a run has beside the loop's objects: random numbers, the scale of fp16, exchanges' states.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distwrap.checkpoint import files, retention
from distwrap.checkpoint.formats import choose
from distwrap.checkpoint.loading import load_into, read, sent
from distwrap.checkpoint.meeting import first_problem
from distwrap.checkpoint.saving import format_of
from distwrap.comm.weights import WeightExchanges
from distwrap.devices.kinds import kind_of
from distwrap.devices.selection import visible_devices
from distwrap.errors import CheckpointError, DistwrapError
from distwrap.group.collectives import gather_object
from distwrap.group.world import current_world, say_once
from distwrap.precision import LossScaling
from distwrap.seeding import RandomState, RankGenerators
from distwrap.wording import named_ranks


def resume_from(path: str | os.PathLike[str], into: Any = None) -> Any | None:
    """Load the checkpoint that `save` wrote last to a path; return ``None`` on every rank if there is none yet.

    Call it before the loop, and a run that is started again, by `max_restarts`, as a requeued job or by hand,
    continues. The nodes need no common disk: if they have different files, the newest is sent to all ranks, tensor by
    tensor. A folder to which all ranks have written parts must be on a common disk.

    Args:
        path: the path that the loop gives to `save`; in a numbered series, the link to its latest checkpoint.
        into: objects in the nesting in which they were saved, into which their state is loaded, as in `load`.

    Returns:
        The state, on the CPU, or ``None``.

    Raises:
        CheckpointError: the file exists and cannot be loaded; or it is a folder of parts that some rank does not see;
            or `path` is a pattern of names. Raised on all ranks.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "last.pt")
        >>> resume_from(path) is None
        True
        >>> from distwrap import save
        >>> save({"epoch": 3}, path)
        >>> resume_from(path)
        {'epoch': 3}
    """
    if any(sign in Path(path).name for sign in "*?"):
        raise CheckpointError(
            f"resume_from({str(path)!r}) takes the name of one checkpoint, and no pattern: the name that "
            "save() was given, or the link to the latest of a numbered series."
        )
    path, written = Path(path), None
    failed: Exception | None = None
    try:
        path = _newest(path)
        written = _written(path)
    except (CheckpointError, OSError) as error:
        failed = error
    if (problem := first_problem(failed, gather_object)) is not None:
        raise problem from failed
    times = gather_object(written)
    newest = max((time for time in times if time is not None), default=None)
    if newest is None:
        return None
    source, rank = times.index(newest), current_world().placement.rank
    others = [number for number, time in enumerate(times) if time != newest]
    state = None
    if not others or rank == source:
        try:
            state = _opened(path, others) if others else read(path, into, io=format_of("auto"))
        except (CheckpointError, FileNotFoundError) as error:
            failed = error
    if (problem := first_problem(failed, gather_object)) is not None:
        raise problem from failed
    if others:
        state = sent(state, into, source)
    if into is not None:
        load_into(into, state)
    return state


class RunState:
    """State of the current run, which `save` and `load` handle like any object with a ``state_dict``.

    Its ``state_dict`` is a collective, so `save` must be called by every rank.
    """

    on_all_ranks = True

    def state_dict(self) -> dict[str, Any]:
        """Return the random numbers of all ranks, the seed, and the states of the gradient scaler and exchanges."""
        world = current_world()
        scaling = world.part(LossScaling)
        scaling.update()
        scaler = scaling.scaler
        scale = None if scaler is None else scaler.state_dict()
        comm = world.part(WeightExchanges).states()
        return {"random": gather_object(_random()), "seed": world.options.seed, "scaler": scale, "comm": comm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, with this rank's random numbers; a rank that is new takes those of rank 0.

        Its generators of `rank_generator` keep their own numbers, which shall differ from those of rank 0.

        Raises:
            CheckpointError: it is not the state of a run, or was saved in another precision.
        """
        try:
            self._go_on_from(state)
        except DistwrapError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"this is not a state that run_state() has returned ({why}).") from error

    def _go_on_from(self, state: dict[str, Any]) -> None:
        world = current_world()
        mine = state["random"][world.placement.rank if world.placement.rank < len(state["random"]) else 0]
        _restore(mine)
        world.part(RankGenerators).load_states(_generators(mine, state["random"]))
        world.options = replace(world.options, seed=state["seed"])
        scaling = world.part(LossScaling)
        if (state["scaler"] is None) != (scaling.scaler is None):
            raise CheckpointError(
                f"the run was saved {'without' if state['scaler'] is None else 'with'} a gradient scaler, and this one "
                f"has precision={world.options.precision!r}: wrap the model in the same precision before you load."
            )
        if scaling.scaler is not None:
            scaling.update()
            scaling.forget()
            scaling.scaler.load_state_dict(state["scaler"])
        world.part(WeightExchanges).load_states(state.get("comm", []))


def run_state() -> RunState:
    """Return an object with the state of the run: all random numbers, the seed, and the gradient scaler of fp16.

    Save it together with models, optimizers, schedulers and loaders, and a run that resumes continues bit for bit as if
    it had not stopped. The random numbers are those of all ranks: of torch, `random`, numpy, and the generators that
    `rank_generator` has made in the run. A generator that the loop makes itself is not in it. With ``comm=`` the object
    also holds the count of steps and DiLoCo's outer state. State that differs between ranks is not in it, such as error
    feedback, or weights that differ under ``comm=``: from these a run continues with the mean over the ranks.

    Example:
        >>> state = run_state().state_dict()
        >>> sorted(state)
        ['comm', 'random', 'scaler', 'seed']
    """
    return RunState()


def _opened(path: Path, others: list[int]) -> Any:
    """Return the state of a file that other ranks lack; its numbers are memory-mapped if the format allows it."""
    chosen = choose(format_of("auto"), path)
    if chosen.collective:
        raise CheckpointError(
            f"{path} is a checkpoint in parts, which every rank reads, and {named_ranks(others)} of "
            f"{current_world().placement.world_size} see another one there, or none: put it on a disk that all "
            "nodes see, or save with io='file'"
        )
    return read(path, io=chosen, mapped=True)


def _newest(path: Path) -> Path:
    """Return the checkpoint of a path; if the latest of a series was removed, that with the highest number."""
    if path.is_symlink() and not path.exists():
        path = next(iter(retention.series_of(path)), path)
    return files.found(path)


def _written(path: Path) -> tuple[int, int] | None:
    """Return a file's time of modification in seconds, and its size in bytes; ``None`` if it does not exist."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:  # no permission, or a link to itself
        raise CheckpointError(f"rank {current_world().placement.rank} cannot read {path}: {error}") from error
    return int(stat.st_mtime), stat.st_size


def _random() -> dict[str, Any]:
    """Return this process's random states as tensors and plain values."""
    state = RandomState.capture()
    version, words, gauss = state.python
    found: dict[str, Any] = {"torch": state.torch, "python": [version, torch.tensor(words), gauss]}
    if state.numpy is not None:
        name, keys, *rest = state.numpy
        found["numpy"] = [str(name), torch.tensor(keys.tolist()), int(rest[0]), int(rest[1]), float(rest[2])]
    for name, device in _devices():
        state_of_device = kind_of(device).random_state(device)
        if state_of_device is not None:
            found[name] = state_of_device
    if generators := current_world().part(RankGenerators).states():
        found["generators"] = {"share": current_world().layout.rank, "states": generators}
    return found


def _generators(mine: dict[str, Any], of_ranks: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the saved states of the generators of this rank's share; none where it is new, or the checkpoint is older.

    Args:
        mine: the random states that this rank takes.
        of_ranks: those of all ranks that have saved.
    """
    saved = [found["generators"] for found in (mine, *of_ranks) if "generators" in found]
    share = current_world().layout.rank
    return next((each["states"] for each in saved if each["share"] == share), [])


def _devices() -> list[tuple[str, torch.device]]:
    """Return the devices of this process with their names in a state; its own device is named by its type."""
    own, strategy = current_world().device, current_world().strategy
    count = 1 if strategy.launches == "device" or own.type == "cpu" else visible_devices().count
    others = [torch.device(own.type, index) for index in range(count) if index != own.index]
    return [(own.type, own), *((str(other), other) for other in others)]


def _restore(found: dict[str, Any]) -> None:
    version, words, gauss = found["python"]
    numpy = None
    if "numpy" in found and "numpy" in sys.modules:
        name, keys, *rest = found["numpy"]
        if not 0 <= rest[0] <= len(keys):  # numpy reads at this index without a check
            raise ValueError(f"numpy's random state cannot stand at place {rest[0]}")
        numpy = (name, sys.modules["numpy"].array(keys.tolist(), dtype="uint32"), *rest)
    python = (version, tuple(words.tolist()), gauss)
    replace(RandomState.capture(), torch=found["torch"].cpu(), python=python, numpy=numpy).restore()
    for name, device in _devices():
        if name in found:
            kind_of(device).set_random_state(device, found[name])
        elif kind_of(device).random_state(device) is not None:
            say_once(
                f"no random numbers of {name}",
                f"the run was saved on other devices, so it has no random state for {name}: random numbers "
                "that are drawn there from now on are not those of the saved run",
            )
