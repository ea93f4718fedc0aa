"""Convert a checkpoint to another format tensor by tensor, so that they need not all fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from distwrap.checkpoint import files
from distwrap.checkpoint.formats import FileIO, choose
from distwrap.checkpoint.pieces import Later, leaves
from distwrap.checkpoint.safetensors_format import SafetensorsIO, check_replaceable, is_folder_of
from distwrap.devices.cpus import return_freed_memory
from distwrap.errors import CheckpointError
from distwrap.nesting import rebuilt

TABLE = ".metadata"  # of torch's distributed checkpoint
_SMALL = 2**24  # bytes


class Stored:
    """State of a checkpoint whose numbers are still on disk.

    Attributes:
        state: the saved state; its tensors are memory-mapped, or have no numbers.
    """

    def __init__(self, path: Path) -> None:
        path = files.found(path)
        if not path.exists():
            raise CheckpointError(f"{path} is not there.")
        self._fetch: dict[int, Callable[[], torch.Tensor]] = {}  # for tensors that are not mapped, by their ids
        if path.is_dir() and (path / TABLE).exists():
            self.state, self._fetch = _open_parts(path)
            return
        if path.is_dir() and not isinstance(choose("auto", path), SafetensorsIO):
            raise CheckpointError(
                f"{path} is a folder without a checkpoint: it has neither torch's {TABLE}, nor "
                "model.safetensors or its index."
            )
        io: Any = choose("auto", path)
        self.state = io.mapped(path)

    def write(self, path: Path, io: Any) -> None:
        """Write the current state to a file or folder, completely or not at all.

        Args:
            path: the file or folder.
            io: the format.
        """
        return_freed_memory(torch.device("cpu"))  # one tensor after the other
        is_folder = is_folder_of(io, path)
        place = files.place_of(path, folder=io.collective or is_folder)
        if io.collective:
            io.check_replaceable(place)
            files.write_atomically(place, lambda temporary: io.save(self.state, temporary, self._whole), folder=True)
        elif isinstance(io, FileIO) and not self._fetch:
            files.write_atomically(place, lambda temporary: io.save(self.state, temporary))
        elif is_folder:
            check_replaceable(place)
            files.write_atomically(place, lambda temporary: self._stream(io, temporary), folder=True)
        else:
            files.write_atomically(place, lambda temporary: self._stream(io, temporary))

    def _stream(self, io: Any, path: Path) -> None:
        def later(leaf: Any, _: tuple[Any, ...]) -> Any:
            return Later(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

        io.stream(rebuilt(self.state, later), path, self._wholes())

    def _wholes(self) -> Iterator[torch.Tensor]:
        for leaf in leaves(self.state, torch.Tensor):
            yield self._whole(leaf)

    def _whole(self, leaf: torch.Tensor) -> torch.Tensor:
        fetch = self._fetch.get(id(leaf))
        if fetch is None and leaf.nbytes > max(leaf.untyped_storage().nbytes(), _SMALL):  # it has a stride of 0
            raise CheckpointError(
                f"the checkpoint holds fewer numbers of a tensor of shape {tuple(leaf.shape)} than it needs."
            )
        return leaf if fetch is None else fetch()


def _open_parts(path: Path) -> tuple[Any, dict[int, Callable[[], torch.Tensor]]]:
    """Return the state in a sharded checkpoint of distwrap's or torch's, and functions that read its tensors."""
    from distwrap.checkpoint.safe_reader import SafeReader  # imports torch's distributed checkpoint
    from distwrap.checkpoint.sharded import separated

    reader = SafeReader(path, {})
    stored = reader.tensors()
    if (path / files.SKELETON).exists():
        state = FileIO().load(path / files.SKELETON, "cpu")
        named = separated(state, lambda leaf: (leaf, leaf))[1]
    else:
        state, named = _put_together({**stored, **reader.values()}, reader.paths()), stored
    for name, leaf in named.items():
        if name not in stored or stored[name].shape != leaf.shape:
            raise CheckpointError(
                f"cannot read {path}: its {TABLE} lists no tensor {name!r} of shape {tuple(leaf.shape)}."
            )
    return state, {id(leaf): lambda name=name: reader.whole(name) for name, leaf in named.items()}  # type: ignore[misc]


def _put_together(values: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> Any:
    """Return the nesting that torch has flattened into names; numbers in a path are indices of a list."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        part = root
        for key in paths[name][:-1]:
            part = part.setdefault(key, {})
            if not isinstance(part, dict):
                raise CheckpointError(f"the checkpoint's table says that {name!r} is in {key!r}, which holds a value.")
        part[paths[name][-1]] = value
    return _with_lists(root)


def _with_lists(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    inside = {key: _with_lists(value) for key, value in part.items()}
    if inside and sorted(inside, key=str) == sorted(range(len(inside)), key=str):
        return [inside[index] for index in range(len(inside))]
    of_optimizer = inside.get("state"), inside.get("param_groups")
    if isinstance(of_optimizer[0], dict) and isinstance(of_optimizer[1], list):  # torch turns its numbers into strings
        inside["state"] = {int(key) if str(key).isdigit() else key: value for key, value in of_optimizer[0].items()}
    return inside
