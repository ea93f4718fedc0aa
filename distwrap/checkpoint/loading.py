"""Read checkpoints: everything, or only this rank's pieces of what a strategy divides."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from traceback import format_exception_only
from typing import Any

import torch

from distwrap.checkpoint.formats import CheckpointIO, Streamed, choose
from distwrap.checkpoint.pieces import Later, box_of, leaves, part_of
from distwrap.checkpoint.plain import Staging
from distwrap.errors import CheckpointError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.collectives import broadcast
from distwrap.group.tensors_apart import is_dense
from distwrap.group.world import current_world, say
from distwrap.model import unwrap_model
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.wrapped_models import bound_strategy
from distwrap.nesting import rebuilt
from distwrap.wording import first_names


def read(
    path: Path, into: Any = None, *, map_location: Any = "cpu", io: str | CheckpointIO = "auto", mapped: bool = False
) -> Any:
    """Return the state in a checkpoint, for `load_into`; on the CPU, only this rank's pieces of divided tensors.

    Args:
        path: the file or folder.
        into: the objects to load; for divided ones, this rank's pieces are returned as ``DTensor``.
        map_location: as for ``torch.load``.
        io: the format.
        mapped: leave the numbers in the file if the format allows it.

    Raises:
        CheckpointError: it is not a checkpoint.
        FileNotFoundError: it does not exist.
    """
    chosen = choose(io, path)
    if chosen.collective:
        check_collectives_allowed("load() of a sharded checkpoint")
    try:
        if mapped and isinstance(chosen, Streamed):
            return chosen.mapped(path)
        if not any_divided(into) or str(map_location) not in ("cpu", "None"):
            return chosen.load(path, map_location)
        if isinstance(chosen, Streamed):
            return _read_mapped(chosen.mapped(path), into)
        if hasattr(chosen, "load_pieces"):
            return chosen.load_pieces(path, map_location, lambda state: _with_pieces(state, into))
        return chosen.load(path, map_location)
    except (FileNotFoundError, CheckpointError):
        raise
    except Exception as error:
        place = current_world().placement
        why = format_exception_only(error)[0].splitlines()[0].rstrip(". ")  # with its type: "101" says nothing
        advice = _advice_on(map_location) or (
            "Save it again with distwrap.save(), or, if you trust where it comes from, read it with "
            "torch.load(path, weights_only=False)."
        )
        raise CheckpointError(f"rank {place.rank} cannot load {os.fspath(path)}: {why}. {advice}") from error


def _advice_on(map_location: Any) -> str:
    """Return advice if this process lacks the device of `map_location`, else an empty text."""
    if not isinstance(map_location, str | torch.device):
        return ""
    try:
        torch.empty(0, device=map_location)
    except (RuntimeError, AssertionError, ImportError):  # which one depends on torch's build
        return (
            f"Leave map_location={str(map_location)!r} out: load() reads onto the CPU, and into= onto the devices of "
            f"the models that it is given; distwrap.device() is this rank's."
        )
    return ""


def sent(state: Any, into: Any, source: int) -> Any:
    """Return one rank's opened state on every rank: tensors are sent one at a time, and each rank keeps its part.

    Args:
        state: the state on the source rank; its numbers may still be in a file.
        into: the objects to load, as for `read`.
        source: the rank that has the state.
    """
    tensors: dict[tuple[Any, ...], torch.Tensor] = {}

    def taken_out(leaf: Any, path: tuple[Any, ...]) -> Any:
        if type(leaf) is not torch.Tensor or not is_dense(leaf):
            return leaf
        tensors[path] = leaf
        return None

    rest = rebuilt(state, taken_out)
    outline = [(path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)) for path, leaf in tensors.items()]
    rest, outline = broadcast((rest, outline), source)
    empty = {path: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for path, dtype, shape in outline}
    wanted = _with_pieces(rebuilt(rest, lambda leaf, path: empty.get(path, leaf)), into)
    kept: dict[tuple[Any, ...], Any] = {}
    for path in empty:
        whole = broadcast(tensors.get(path), source)
        if isinstance(place := _at(wanted, path), torch.Tensor):
            kept[path] = _filled(place, whole) if hasattr(place, "to_local") else whole.clone()
    return rebuilt(wanted, lambda leaf, path: kept.get(path, leaf))


def load_into(into: Any, state: Any, where: str = "", *, strict: bool = True) -> None:
    """Load the saved state into each object of a nesting.

    Args:
        into: the objects.
        state: the saved state.
        where: the position in the nesting, for messages.
        strict: whether all names of a model, and all objects, must be in the state.

    Raises:
        CheckpointError: the state of an object is missing; the message names its position.
    """
    strategy, target = bound_strategy(into), into
    state = _with_tied_names(state, into)
    if strategy is not None:
        with nullcontext() if strict else _other_names_allowed(into, where):
            strategy.load_state(into, state)
        return
    if isinstance(into, torch.nn.Module):
        target = unwrap_model(into)
        state = strip_module_prefix(state, target=target)
    if callable(getattr(target, "load_state_dict", None)):
        with nullcontext() if strict else _other_names_allowed(into, where):
            target.load_state_dict(state)
    elif isinstance(into, Mapping):
        for key, item in into.items():
            if not isinstance(state, Mapping) or key not in state:
                there = first_names([*map(repr, state)], 12) if isinstance(state, Mapping) else type(state).__name__
                if strict:
                    raise CheckpointError(f"the checkpoint has no state{where}[{key!r}]. It has: {there}.")
                say(f"load(strict=False): the checkpoint has no state{where}[{key!r}], which stays as it is")
                continue
            load_into(item, state[key], f"{where}[{key!r}]", strict=strict)
    elif isinstance(into, (list, tuple)):
        if not isinstance(state, (list, tuple)) or len(state) != len(into):
            raise CheckpointError(f"the checkpoint's state{where} is not a list of {len(into)} entries.")
        for index, item in enumerate(into):
            load_into(item, state[index], f"{where}[{index}]", strict=strict)


def _with_tied_names(state: Any, into: Any) -> Any:
    """Return a model's state with all names of a tied parameter, of which Hugging Face's files have one."""
    if not isinstance(into, torch.nn.Module) or not isinstance(state, dict):
        return state
    model, names = unwrap_model(into), dict[int, str]()
    named = list(model.named_parameters(remove_duplicate=False))
    if len({id(parameter) for _, parameter in named}) == len(named):
        return state
    state = strip_module_prefix(state, target=model)
    for name, parameter in named:
        if name in state:
            names.setdefault(id(parameter), name)
    missing = {name: names[id(each)] for name, each in named if name not in state and id(each) in names}
    return {**state, **{name: state[twin] for name, twin in missing.items()}} if missing else state


@contextmanager
def _other_names_allowed(into: Any, where: str) -> Iterator[None]:
    """Let a model load a state with missing or unexpected names, and print these names.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html (register_load_state_dict_post_hook)
    """
    if not isinstance(into, torch.nn.Module):
        yield
        return

    def forgive(module: torch.nn.Module, keys: Any) -> None:
        what = f"{type(module).__name__}{f' in state{where}' if where else ''}"
        for names, words in ((keys.missing_keys, "checkpoint"), (keys.unexpected_keys, "model")):
            if names:
                say(f"load(strict=False): {what}: {len(names)} not in the {words}: {first_names(names)}")
            names.clear()

    handle = unwrap_model(into).register_load_state_dict_post_hook(forgive)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


def any_divided(objects: Any) -> bool:
    """Return whether a strategy divides any object in a nesting."""
    bound = ((bound_strategy(part), part) for part in leaves(objects, object))
    return any(strategy is not None and strategy.is_divided(part) for strategy, part in bound)


def _with_pieces(state: Any, into: Any) -> Any:
    """Return a state with what this rank needs of it, as `Strategy.parts_to_load` decides."""

    def replaced(part: Any, path: tuple[Any, ...]) -> Any:
        target = _at(into, path)
        strategy = bound_strategy(target)
        parts = strategy.parts_to_load(target, part) if strategy is not None and isinstance(part, dict) else None
        return part if parts is None else parts

    return rebuilt(state, replaced)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path of keys in a nesting; ``None`` if there is none."""
    for key in path:
        is_dict = isinstance(value, Mapping) and key in value
        if not is_dict and not (isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value)):
            return None
        value = value[key]
    return value


def _read_mapped(state: Any, into: Any) -> Any:
    """Return a state in memory from a memory-mapped one: this rank's pieces, and other tensors whole."""
    pieces: list[torch.Tensor] = []
    state = rebuilt(state, lambda part, path: _with_tied_names(part, _at(into, path)))

    def filled(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf is (mapped := _at(state, path)):
            return leaf
        pieces.append(_filled(leaf, mapped))
        return Later(leaf.shape, leaf.dtype)

    rest = Staging().copied(rebuilt(_with_pieces(state, into), filled))  # in memory, and not in the file
    found = iter(pieces)
    return rebuilt(rest, lambda leaf, _: next(found) if isinstance(leaf, Later) else leaf)


def _filled(piece: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Copy this rank's part of the whole tensor into a ``DTensor``, and return it."""
    with torch.no_grad():
        local: torch.Tensor = piece.to_local()  # type: ignore[attr-defined]
        if local.numel():
            local.copy_(part_of(whole, *box_of(piece)))
    return piece
