"""Read an untrusted folder of torch's distributed checkpoint."""

import io
import pickle
from dataclasses import is_dataclass
from enum import Enum, EnumMeta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future

from distwrap._internals.python import PATH_MODULES, unpickler
from distwrap._internals.torch import LAYOUT_FUNCTION
from distwrap.checkpoint.pieces import part_of
from distwrap.checkpoint.untrusted import check_regular, load_tensor, load_value
from distwrap.errors import CheckpointError


def bytes_in(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.iterdir())


def local_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a ``DTensor``, or any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SafeReader(FileSystemReader):
    """Reader of an untrusted folder.

    It runs no code in torch's pickled table of contents, and reads only files in the folder.

    Attributes:
        missing: the count of numbers of each tensor that have not been read.
    """

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(path)
        self._folder = path
        table = io.BytesIO(self._inside(".metadata").read_bytes())
        self._contents = _Contents(table).load()
        if type(self._contents) is not Metadata:
            raise CheckpointError(f"cannot load {path}: its .metadata is not a checkpoint's table of contents.")
        self.missing = {name: local_numbers(tensor).numel() for name, tensor in tensors.items()}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: Metadata = self._contents
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"cannot load {self._folder}: it is compressed, as distwrap.save() writes none.")
            path = self._inside(info.relative_path)
            with open(path, "rb") as file:
                tensor = load_tensor(file, info.offset, info.length, path)
            for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dimension, begin, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(target.shape)}"
                raise CheckpointError(f"cannot load {path}: a piece of {item.dest_index.fqn} has the shape {shapes}.")
            target.copy_(tensor)
            planner.commit_tensor(item, target)
            self.missing[item.dest_index.fqn] -= target.numel()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the folder by name, without numbers.

        Raises:
            CheckpointError: they would be larger than the folder.
        """
        found = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in self._contents.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        needed, held = sum(each.nbytes for each in found.values()), bytes_in(self._folder)
        if needed > held:
            raise CheckpointError(
                f"cannot load {self._folder}: it should hold {needed} bytes, and has {held}. Was it cut off?"
            )
        return found

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor, put together from its pieces.

        Raises:
            CheckpointError: a piece is missing.
        """
        entry = self._contents.state_dict_metadata[name]
        result = torch.empty(entry.size, dtype=entry.properties.dtype)
        missing = result.numel()
        for index, info in self._stored[name]:
            path = self._inside(info.relative_path)
            with open(path, "rb") as file:
                tensor = load_tensor(file, info.offset, info.length, path)
            part_of(result, index.offset or (0,) * tensor.dim(), tensor.shape).copy_(tensor)
            missing -= tensor.numel()
        if missing:
            raise CheckpointError(
                f"cannot load {self._folder}: it lacks {missing} numbers of {name}. Is a file of it missing?"
            )
        return result

    def values(self) -> dict[str, Any]:
        """Return the values that are not tensors by name, if torch wrote the folder; with torch's safe loader."""
        found: dict[str, Any] = {}
        for name, entry in self._contents.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                for _, info in self._stored[name]:
                    path = self._inside(info.relative_path)
                    with open(path, "rb") as file:
                        found[name] = load_value(file, info.offset, info.length, path)
        return found

    def paths(self) -> dict[str, tuple[Any, ...]]:
        """Return the path of keys of each name in a state that torch wrote, or the name itself."""
        known = self._contents.planner_data
        known = known if isinstance(known, dict) else {}
        return {name: tuple(known.get(name) or (name,)) for name in self._contents.state_dict_metadata}

    @cached_property
    def _stored(self) -> dict[str, list[tuple[MetadataIndex, Any]]]:
        stored: dict[str, list[tuple[MetadataIndex, Any]]] = {name: [] for name in self._contents.state_dict_metadata}
        for index, info in self._contents.storage_data.items():
            stored[index.fqn].append((index, info))
        return stored

    def _inside(self, name: str) -> Path:
        """Return the path of a file in the folder.

        Raises:
            CheckpointError: the name, or a symbolic link of this name, leads out of the folder.
        """
        path = (self._folder / name).resolve()
        if path.parent != self._folder.resolve():
            raise CheckpointError(
                f"cannot load {self._folder}: its {name} is a link to {path}, outside of the folder. Copy the "
                "file into it."
            )
        check_regular(path)
        return path


class _Contents(unpickler()):  # type: ignore[misc]
    """Unpickler that allows only the classes of a table of contents."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's table of contents")

    def load_build(self) -> None:
        """Set attributes of the table's dataclasses only; on a class or function it would affect the whole process."""
        if not is_dataclass(changed := self.stack[-2]) or isinstance(changed, type):
            raise pickle.UnpicklingError(f"{changed!r} has no place in a checkpoint's table of contents")
        super().load_build()

    dispatch = {**getattr(unpickler(), "dispatch", {}), pickle.BUILD[0]: load_build}


def _member(kind: Any, name: str) -> Enum:
    """Return a member of an enumeration, which early releases of Python 3.11 pickle as an attribute of the class.

    Source: https://github.com/python/cpython/issues/103479
    """
    if isinstance(kind, EnumMeta) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{name!r} of {kind!r} has no place in a checkpoint's table of contents")


_METADATA = Metadata.__module__
_CLASSES = {
    _METADATA: {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    FileSystemReader.__module__: {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    LAYOUT_FUNCTION[0]: {LAYOUT_FUNCTION[1]},
    **{module: {"PosixPath"} for module in PATH_MODULES},
}
