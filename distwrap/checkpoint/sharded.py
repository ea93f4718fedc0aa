"""The sharded format: a folder to which every rank writes its part with torch's distributed checkpoint.

Tensors that all ranks hold are divided among them, and of a ``DTensor`` each rank writes its piece. Any number of ranks
can read whole tensors back. The folder must be on a disk that all nodes see.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.tensor import DTensor

from distwrap.checkpoint.files import SKELETON
from distwrap.checkpoint.safe_reader import SafeReader, bytes_in
from distwrap.checkpoint.untrusted import load_file
from distwrap.devices.selection import visible_devices
from distwrap.errors import CheckpointError
from distwrap.group.collectives import gather_object
from distwrap.group.failures import is_secondary
from distwrap.model.checks.in_sync import ComparedTensor, fingerprints, first_difference, left_to_ranks
from distwrap.nesting import rebuilt


class ShardedIO:
    """Format with the tensors in torch's distributed checkpoint by name, and the rest for the safe loader."""

    collective = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def over(self, group: dist.ProcessGroup | None) -> "ShardedIO":
        """Return the format with another group, over which ranks agree who writes what."""
        return ShardedIO(group)

    def check_replaceable(self, path: Path) -> None:
        """Refuse to replace a folder that is not a checkpoint of this format.

        Raises:
            CheckpointError: it is not one.
        """
        if path.is_dir() and not (path / SKELETON).exists():
            for other in path.iterdir():
                raise CheckpointError(
                    f"{path} holds {other.name}, so it is not a sharded checkpoint, and is not replaced: give "
                    "another name"
                )

    def save(self, state: Any, path: Path, fetch: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Write this rank's part of the tensors; rank 0 also writes the other values.

        Args:
            state: plain values and tensors.
            path: an empty folder.
            fetch: returns the numbers of a tensor without any, called when each is about to be written.
        """
        skeleton, tensors = separated(state, lambda leaf: (leaf if fetch else leaf.detach(), _whole(leaf)))
        self._leave_unlike(tensors)
        with _as_checkpoint_error():
            writer, planner = FileSystemWriter(path, sync_files=False), _Fetching(fetch) if fetch else None
            save_parts(tensors, storage_writer=writer, planner=planner, process_group=self._group)
        if not dist.is_initialized() or dist.get_rank() == 0:  # alone, after the work of all ranks
            torch.save(skeleton, path / SKELETON)

    def _leave_unlike(self, tensors: dict[str, torch.Tensor]) -> None:
        """Leave undivided tensors that differ between ranks to rank 0, as in a file; ranks share others."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        own = {name: value for name, value in tensors.items() if not isinstance(value, DTensor)}
        marks = {one[0]: one[1] for one in fingerprints([ComparedTensor(key, "", part) for key, part in own.items()])}
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, marks, group=self._group)
        for name in own if dist.get_rank() else ():
            if any(each.get(name) != everyone[0].get(name) for each in everyone):
                del tensors[name]

    def load(self, path: Path, map_location: Any) -> Any:
        """Read everything, on every rank."""
        return self.load_pieces(path, map_location, lambda state: state)

    def load_pieces(self, path: Path, map_location: Any, choose: Callable[[Any], Any]) -> Any:
        """Read some tensors as a whole, and this rank's pieces of others.

        Args:
            path: the folder.
            map_location: as for ``torch.load``, for whole tensors.
            choose: takes the state with tensors that have no numbers, and replaces a tensor by a ``DTensor`` to read
                this rank's piece, or by ``None`` to leave it out.
        """
        skeleton = _opened(path)
        device = torch.device("cpu" if map_location is None else map_location)

        def place(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (leaf if isinstance(leaf, DTensor) else torch.empty_like(leaf, device=device),) * 2

        state, tensors = separated(choose(skeleton), place)
        reader = SafeReader(path, tensors)
        with _as_checkpoint_error():
            load_parts(tensors, storage_reader=reader)
        for name, count in reader.missing.items():
            if count:
                raise CheckpointError(
                    f"cannot load {path}: it lacks {count} numbers of {name}. Is a file of it missing?"
                )
        return state


class _Fetching(DefaultSavePlanner):
    """Save planner of torch's that gets the numbers of a tensor when it is about to be written."""

    def __init__(self, fetch: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._fetch = fetch
        self._last: torch.Tensor | None = None

    def lookup_object(self, index: Any) -> Any:
        """Return a tensor with its numbers, and free the last one, which torch has written and still holds."""
        stored = super().lookup_object(index)
        if self._last is not None and not visible_devices().count:  # with devices torch reads ahead
            self._last.untyped_storage().resize_(0)
        tensor = self._fetch(stored)
        self._last = None if tensor is stored else tensor
        return tensor.detach()


def _opened(path: Path) -> Any:
    """Return a folder's state without numbers; if one rank cannot, no rank goes on to read the numbers.

    Raises:
        CheckpointError: another rank cannot read it.
        Exception: this rank cannot read it.
    """
    try:
        skeleton = load_file(path / SKELETON)
        needed = sum(leaf.nbytes for leaf in separated(skeleton, lambda leaf: (leaf, leaf))[1].values())
        held = bytes_in(path)
        if needed > held:
            raise CheckpointError(
                f"cannot load {path}: it should hold {needed} bytes of numbers, and has {held}. Was it cut off?"
            )
    except Exception as error:
        gather_object(f"{type(error).__name__}: {error}")
        raise
    for rank, problem in enumerate(gather_object("")):
        if problem:
            raise CheckpointError(
                f"rank {rank} cannot open {path}, which must be on a disk that all nodes see: {problem}"
            )
    return skeleton


def check_parts(parts: dict[str, Any], thing: Any, strategy: str) -> dict[str, Any]:
    """Return the result of a strategy's `parts` if it can be put together; a collective.

    Raises:
        CheckpointError: ranks have different names, or a whole tensor differs; raised on every rank.
    """
    tensors = separated(parts, lambda leaf: (leaf, leaf))[1].items()
    own = left_to_ranks(thing) if isinstance(thing, nn.Module) else set()  # for which any rank's value will do
    empty = torch.empty(0)  # pieces are compared only by name and whole size
    held = [
        ComparedTensor(f"{name} {tuple(part.shape)}", "", empty if isinstance(part, DTensor) or name in own else part)
        for name, part in tensors
    ]
    difference = first_difference(gather_object(fingerprints(held)))
    if difference is not None:
        raise CheckpointError(
            f"{strategy}.parts() has returned parts that cannot be put together: {difference}. On every rank "
            "it must return all names, and each tensor that is divided over the ranks as a DTensor of the "
            "whole tensor's size."
        )
    return parts


def _whole(leaf: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with the shape of the whole tensor, without numbers."""
    if isinstance(leaf, DTensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return torch.empty_like(leaf, device="meta")


def separated(
    state: Any, divide: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a state with replaced tensors, and the tensors to write or read, by name.

    Args:
        state: plain values and tensors.
        divide: returns the tensor to write or read, and its replacement.
    """
    tensors: dict[str, torch.Tensor] = {}

    def change(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name = ""
        for key in path:  # a leading empty key leaves no dot, as in existing files
            name = f"{name}.{key}" if name else str(key)
        while name in tensors:  # {"a.b": x, "a": {"b": y}}
            name += "'"
        tensors[name], instead = divide(leaf)
        return instead

    return rebuilt(state, change), tensors


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Raise torch's failure, which is no ``Exception``, as CheckpointError, and silence two warnings of torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"torch\.distributed is (disabled|unavailable)")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's own use of it, in older versions
        try:
            yield
        except CheckpointException as error:
            failures = [(rank, failure) for rank, (failure, _) in error.failures.items()] or [(0, error)]
            rank, first = min(failures, key=lambda failure: is_secondary(failure[1]))
            raise CheckpointError(f"rank {rank}: {first}", secondary=is_secondary(first)) from error
