"""The safetensors format: a model in one file, or as in Hugging Face in a folder of files with an index.

Source: https://huggingface.co/docs/safetensors
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from distwrap.checkpoint.pieces import Later
from distwrap.checkpoint.streaming import INDEX, SINGLE, safetensors, write_folder, write_safetensors
from distwrap.checkpoint.untrusted import check_regular
from distwrap.errors import CheckpointError, OptionError

SUFFIX = ".safetensors"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LARGEST_INDEX = 2**26  # bytes


class SafetensorsIO:
    """A flat dict of tensors as a ``.safetensors`` file, or under another suffix as a folder of them.

    The folder has ``model.safetensors``, or ``model-00001-of-00003.safetensors``, … and
    ``model.safetensors.index.json``. Needs the ``safetensors`` extra.

    Args:
        metadata: strings to store beside the tensors.
        max_shard_size: the size of the tensors in each file of a folder, in bytes or as ``"5GB"`` or ``"5GiB"``.

    Raises:
        OptionError: `max_shard_size` is not a size.

    Source: https://huggingface.co/docs/transformers/main/big_models
    """

    collective = False

    def __init__(self, metadata: dict[str, str] | None = None, *, max_shard_size: int | str = "5GB") -> None:
        self._metadata = metadata or {"format": "pt"}
        self._max_shard_size = _bytes(max_shard_size)

    def save(self, state: Any, path: Path) -> None:
        """Write with safetensors, which stores only tensors; other values need a file of torch's."""
        _check_flat(state)
        if path.is_dir():
            write_folder(_apart(state), path, iter(()), self._metadata, self._max_shard_size)
        else:
            safetensors().save_file(_apart(state), path, metadata=self._metadata)

    def stream(self, state: Any, path: Path, wholes: Iterator[torch.Tensor]) -> None:
        """Write tensors of which some come one at a time, and are `Later` in the state."""
        _check_flat(state)
        here = _apart({name: leaf for name, leaf in state.items() if isinstance(leaf, torch.Tensor)})
        state = {name: here.get(name, leaf) for name, leaf in state.items()}
        if path.is_dir():
            write_folder(state, path, wholes, self._metadata, self._max_shard_size)
        else:
            write_safetensors(state, path, wholes, self._metadata)

    def load(self, path: Path, map_location: Any) -> Any:
        """Read the tensors with safetensors, memory-mapped."""
        device = "cpu" if map_location is None else str(torch.device(map_location))
        state: dict[str, torch.Tensor] = {}
        for file, names in _files(path).items():
            loaded = safetensors().load_file(file, device=device)
            state.update(loaded if names is None else {name: _of(loaded, name, file) for name in names})
        return state

    def mapped(self, path: Path) -> dict[str, torch.Tensor]:
        """Return the tensors, whose numbers are read from the files when they are used."""
        state: dict[str, torch.Tensor] = {}
        for file, names in _files(path).items():
            with safetensors().safe_open(file, framework="pt") as opened:
                held = opened.keys()
                for name in held if names is None else names:
                    if name not in held:
                        _of({}, name, file)
                    state[name] = opened.get_tensor(name)
        return state


def is_folder_of(io: object, path: Path) -> bool:
    """Return whether a format is safetensors, and writes a folder for a path."""
    return isinstance(io, SafetensorsIO) and path.suffix != SUFFIX


def is_folder_of_safetensors(path: Path) -> bool:
    """Return whether a path is a folder with a safetensors model, or the index of one."""
    return path.name.endswith(f"{SUFFIX}.index.json") or (path / INDEX).exists() or (path / SINGLE).exists()


def check_replaceable(path: Path) -> None:
    """Refuse to replace a folder that holds other files than a model's, such as a tokenizer.

    Raises:
        CheckpointError: there is such a file, which the message names.
    """
    for file in path.iterdir() if path.is_dir() else ():
        if not re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX), file.name):
            raise CheckpointError(f"{path} holds {file.name}, which would be lost with it: give another name")


def _files(path: Path) -> dict[Path, list[str] | None]:
    """Return the files of a path with the names of the tensors to read from each; ``None`` for all.

    Raises:
        CheckpointError: the index is not valid, or leads out of its folder.
    """
    index = path if path.name.endswith(".json") else path / INDEX
    if not path.is_dir() and index != path:
        check_regular(path)
        return {path: None}
    if not index.exists() and (path / SINGLE).exists():
        check_regular(path / SINGLE)
        return {path / SINGLE: None}
    check_regular(index)
    if index.stat().st_size > _LARGEST_INDEX:
        raise CheckpointError(f"cannot load {path}: {index.name} is too large for an index of names.")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"cannot load {path}: {index.name} has no 'weight_map' of names and files.") from error
    files: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        if os.path.basename(file) != file or not file.endswith(SUFFIX):
            raise CheckpointError(f"cannot load {path}: {index.name} says that {name!r} is in {file!r}.")
        names = files.setdefault(index.parent / file, [])
        assert names is not None
        names.append(name)
    for each in files:
        if not each.exists():
            raise CheckpointError(f"cannot load {path}: {each.name} is missing, which {index.name} names.")
        check_regular(each)
    return files


def _of(loaded: Mapping[str, torch.Tensor], name: str, file: Path) -> torch.Tensor:
    if name not in loaded:
        raise CheckpointError(f"cannot load {file}: it has no {name!r}, which the index says.")
    return loaded[name]


def _check_flat(state: Any) -> None:
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, (torch.Tensor, Later)) for key, value in state.items()
    ):
        raise CheckpointError(
            "a .safetensors file holds a dict of names and tensors, as a model or its state_dict(), and nothing "
            "else; save the whole state to a .pt file"
        )


def _apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors with separate memory, since the format has no shared tensors."""
    apart = {name: value.detach().resolve_conj().resolve_neg().contiguous() for name, value in state.items()}
    owner: dict[int, str] = {}
    for name, value in apart.items():
        if value.numel() and owner.setdefault(value.untyped_storage().data_ptr(), name) != name:
            apart[name] = value.clone()
    return apart


def _bytes(size: int | str) -> int:
    text = re.fullmatch(r"\s*([\d_]+)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    if text is None or text[2].upper() not in _UNITS or not int(text[1]):
        raise OptionError(f"max_shard_size={size!r} is not a size: give bytes, or a text such as '5GB' or '500MB'.")
    return int(text[1]) * _UNITS[text[2].upper()]
