"""Strip the prefixes of wrappers from the keys of every state dict in a checkpoint file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from distwrap.checkpoint import files
from distwrap.checkpoint.formats import FileIO
from distwrap.checkpoint.safetensors_format import SUFFIX, SafetensorsIO
from distwrap.checkpoint.streaming import safetensors
from distwrap.checkpoint.untrusted import check_regular, load_file
from distwrap.errors import CheckpointError
from distwrap.model.state_dict import strip_module_prefix
from distwrap.nesting import rebuilt
from distwrap.wording import first_line


def read_file(path: Path, *, unsafe: bool = False) -> tuple[Any, dict[str, str] | None]:
    """Return the state and the metadata of a file; tensors are memory-mapped if the format allows it.

    Raises:
        CheckpointError: it is not a checkpoint, or needs an unsafe load.
        FileNotFoundError: it does not exist.
    """
    try:
        if path.suffix == SUFFIX:
            unsafe = True  # the format has no code, so the hint would not help
            check_regular(path)
            with safetensors().safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        if unsafe:
            can_map = is_zipfile(path)  # as torch's files are since 1.6
            return torch.load(path, map_location="cpu", mmap=can_map, weights_only=False), None
        return load_file(path, "cpu", mapped=True), None
    except (FileNotFoundError, CheckpointError):
        raise
    except Exception as error:
        hint = "" if unsafe else " If you trust where it comes from, say --unsafe: reading it may run code in it."
        raise CheckpointError(f"cannot read {path}: {first_line(error).rstrip('. ')}.{hint}") from error


def write_file(state: Any, metadata: dict[str, str] | None, path: Path) -> None:
    """Write a file completely, or not at all."""
    io = SafetensorsIO(metadata) if path.suffix == SUFFIX else FileIO()
    files.write_atomically(files.place_of(path), lambda temporary: io.save(state, temporary))


def strip_prefixes(
    state: Any, wanted: dict[str, Any] | None = None
) -> tuple[Any, list[tuple[str, str, Any]], list[dict[str, Any]]]:
    """Strip the prefixes from every state dict in a nesting.

    Args:
        state: a state dict, or dicts and lists that contain some.
        wanted: the model's own state dict, whose names are the right ones.

    Returns:
        The nesting with stripped state dicts; the renames, as old name, new name and tensor; and the state dicts.
    """
    renames: list[tuple[str, str, Any]] = []
    dicts: list[dict[str, Any]] = []

    def stripped(state_dict: dict[str, Any], place: str) -> dict[str, Any]:
        result = strip_module_prefix(state_dict, target=wanted)
        dicts.append(result)
        pairs = zip(state_dict, result, strict=True)
        renames.extend((place + old, place + new, result[new]) for old, new in pairs if old != new)
        return result

    return replace_state_dicts(state, stripped), renames, dicts


def replace_state_dicts(value: Any, replace: Callable[[dict[str, Any], str], Any]) -> Any:
    """Replace each state dict in a nesting by the result of a function of it and its position."""

    def replaced(part: Any, path: tuple[Any, ...]) -> Any:
        return replace(part, "".join(f"{key}/" for key in path)) if _is_state_dict(part) else part

    return rebuilt(value, replaced)


def _is_state_dict(value: Any) -> bool:
    """Return whether a value is a state dict of a model: names with some tensors, and no containers."""
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        return False
    tensors = sum(isinstance(item, torch.Tensor) for item in value.values())
    return tensors > 0 and not any(isinstance(item, (dict, list)) for item in value.values())
