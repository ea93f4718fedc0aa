"""A folder to which every rank writes its part, by torch's distributed checkpoint.

Tensors that all ranks hold alike are divided among them, and of a DTensor each rank writes its piece; any number of
ranks reads them back, whole. The folder must be on a disk that all nodes see.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.tensor import DTensor
from torch.futures import Future

from distwrap._internals.python import PATH_MODULES, unpickler
from distwrap._internals.torch import LAYOUT_FUNCTION
from distwrap.checkpoint.files import SKELETON
from distwrap.checkpoint.pickles import check_pickle
from distwrap.checkpoint.untrusted import check_regular, load_file, load_tensor
from distwrap.errors import CheckpointError
from distwrap.group.collectives import gather_object
from distwrap.model.in_sync import Held, fingerprints, first_difference, left_to_ranks
from distwrap.nesting import rebuilt


class ShardedIO:
    """torch's distributed checkpoint of the tensors, by their names; the safe loader reads the rest."""

    collective = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def over(self, group: dist.ProcessGroup | None) -> "ShardedIO":
        """Return the format with another group over which the ranks agree who writes what."""
        return ShardedIO(group)

    def save(self, state: Any, path: Path) -> None:
        """Write this rank's part of the tensors; rank 0 also writes what is no tensor."""
        skeleton, tensors = _separated(state, lambda leaf: (leaf.detach(), _whole(leaf)))
        with _as_checkpoint_error():
            save_parts(tensors, storage_writer=FileSystemWriter(path, sync_files=False), process_group=self._group)
        if not dist.is_initialized() or dist.get_rank() == 0:  # alone, so after what is done together
            torch.save(skeleton, path / SKELETON)

    def load(self, path: Path, map_location: Any) -> Any:
        """Read everything, on every rank."""
        return self.load_pieces(path, map_location, lambda state: state)

    def load_pieces(self, path: Path, map_location: Any, choose: Callable[[Any], Any]) -> Any:
        """Read the whole of some tensors, and this rank's pieces of others.

        Args:
            path: the folder.
            map_location: as for ``torch.load``, of what is whole.
            choose: gets the state with tensors that have no numbers, and puts a ``DTensor`` in the place of each tensor
                of which this rank reads its piece.
        """
        skeleton = load_file(path / SKELETON)
        needed = sum(leaf.nbytes for leaf in _separated(skeleton, lambda leaf: (leaf, leaf))[1].values())
        held = sum(file.stat().st_size for file in path.iterdir())
        if needed > held:
            raise CheckpointError(f"cannot load {path}: it should hold {needed} bytes of numbers, and has {held}.")
        device = torch.device("cpu" if map_location is None else map_location)

        def place(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (leaf if isinstance(leaf, DTensor) else torch.empty_like(leaf, device=device),) * 2

        state, tensors = _separated(choose(skeleton), place)
        reader = _SafeReader(path, tensors)
        with _as_checkpoint_error():
            load_parts(tensors, storage_reader=reader)
        for name, count in reader.missing.items():
            if count:
                raise CheckpointError(f"cannot load {path}: it lacks {count} numbers of {name}.")
        return state


def check_parts(parts: dict[str, Any], thing: Any, strategy: str) -> dict[str, Any]:
    """Return what a strategy's `parts` of a thing have returned, if it can be put together; every rank calls it.

    Raises:
        CheckpointError: ranks have other tensors, or one that is whole differs; names it, on every rank.
    """
    tensors = _separated(parts, lambda leaf: (leaf, leaf))[1].items()
    own = left_to_ranks(thing) if isinstance(thing, nn.Module) else set()  # of which any rank's is as good
    nothing = torch.empty(0)  # to be compared of pieces, beside their names and whole sizes
    held = [
        Held(f"{name} {tuple(value.shape)}", "", nothing if isinstance(value, DTensor) or name in own else value)
        for name, value in tensors
    ]
    difference = first_difference(gather_object(fingerprints(held)))
    if difference is not None:
        raise CheckpointError(
            f"{strategy}.parts() has returned what cannot be put together: {difference}. Every rank returns all names, "
            f"and a tensor of which each rank has another piece as a DTensor of the whole tensor's size."
        )
    return parts


def _whole(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor like the whole of this one, without numbers."""
    if isinstance(leaf, DTensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return torch.empty_like(leaf, device="meta")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _separated(
    state: Any, divide: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a state with other tensors, and the tensors to write or read, by their names.

    Args:
        state: plain values and tensors.
        divide: returns the tensor to write or read, and the one in its place.
    """
    tensors: dict[str, torch.Tensor] = {}

    def change(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name = ""
        for key in path:  # an empty key before the others leaves no dot, as in files until now
            name = f"{name}.{key}" if name else str(key)
        while name in tensors:  # {"a.b": x, "a": {"b": y}}
            name += "'"
        tensors[name], instead = divide(leaf)
        return instead

    return rebuilt(state, change), tensors


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Raise torch's failure, which is no ``Exception``, as one, and keep torch from warning in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"torch\.distributed is (disabled|unavailable)")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's own use of it, before 2.7
        try:
            yield
        except CheckpointException as error:
            first = next(iter(error.failures.items()), (0, (error, None)))
            raise CheckpointError(f"rank {first[0]}: {first[1][0]}") from error


class _SafeReader(FileSystemReader):
    """Reader of a folder that a stranger may have made.

    It runs nothing that is in torch's pickled table of contents, and reads no number that is not in the folder.

    Attributes:
        missing: how many numbers of each tensor have not been read.
    """

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(path)
        self._folder = path
        table = io.BytesIO(self._inside(".metadata").read_bytes())
        check_pickle(table, path / ".metadata")
        table.seek(0)
        self._contents = _Contents(table).load()
        if type(self._contents) is not Metadata:
            raise CheckpointError(f"cannot load {path}: its .metadata is no table of contents.")
        self.missing = {name: _local(tensor).numel() for name, tensor in tensors.items()}

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
                raise CheckpointError(f"cannot load {path}: a piece of {item.dest_index.fqn} is {shapes}.")
            target.copy_(tensor)
            planner.commit_tensor(item, target)
            self.missing[item.dest_index.fqn] -= target.numel()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _inside(self, name: str) -> Path:
        """Return the path of a file in the folder.

        Raises:
            CheckpointError: the name, or a symbolic link of this name, leads out of it.
        """
        path = (self._folder / name).resolve()
        if path.parent != self._folder.resolve():
            raise CheckpointError(f"cannot load {self._folder}: its {name} is {path}, outside of it. Copy it there.")
        check_regular(path)
        return path


class _Contents(unpickler()):  # type: ignore[misc]
    """Unpickler that knows the classes of a table of contents, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's table of contents")

    def load_build(self) -> None:
        """Fill an object of the table's: of a class, or a function, it would change what the whole process uses."""
        if not is_dataclass(changed := self.stack[-2]) or isinstance(changed, type):
            raise pickle.UnpicklingError(f"{changed!r} has no place in a checkpoint's table of contents")
        super().load_build()

    dispatch = {**getattr(unpickler(), "dispatch", {}), pickle.BUILD[0]: load_build}


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
