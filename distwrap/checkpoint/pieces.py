"""Tensors of which each rank has a piece, put together on rank 0 one at a time: no rank ever holds all of a state.

The pieces travel over a gloo group of their own, so that they may do so in the background, beside a training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from distwrap.errors import CheckpointError
from distwrap.group.collectives import gather_object
from distwrap.group.tensors_apart import as_bytes
from distwrap.group.world import RunPart, World, current_world
from distwrap.nesting import rebuilt

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in each dimension, and how long it is
_LINE = 1000  # bytes


@dataclass(frozen=True, eq=False)
class Later:
    """Place of a tensor in a state, whose numbers come later."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all its numbers."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Piece(Later):
    """Place of a divided tensor in a state, with what this rank has of it.

    Attributes:
        local: this rank's numbers, perhaps none.
        begin: where they begin in each dimension of the whole.
    """

    local: torch.Tensor
    begin: tuple[int, ...]


class PieceGroup(RunPart):
    """Process group over which pieces travel; made with the first checkpoint that needs it, by all ranks.

    It ends with the others, after the `Writer` has used it for the last time.
    """

    def __init__(self, world: World) -> None:
        self.group: dist.ProcessGroup | None = None
        if world.placement.world_size > 1:
            self.group = world.new_cpu_group()

    def gather_text(self, text: str) -> list[str]:
        """Return a line of every rank, on every rank; a longer one is cut off."""
        if self.group is None:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode()[:_LINE].ljust(_LINE)), dtype=torch.uint8)
        lines = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(lines, mine, group=self.group)
        return [bytes(line.tolist()).decode(errors="replace").strip() for line in lines]


class Gathering:
    """Plan by which rank 0 gets whole tensors, in one order on all ranks; every rank makes it, with alike names.

    Args:
        pieces: this rank's.

    Raises:
        CheckpointError: the pieces of all ranks are not the whole of a tensor; on every rank.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._group = current_world().part(PieceGroup).group
        self._rank = current_world().placement.rank
        everyone: list[list[Box]] = gather_object([(piece.begin, tuple(piece.local.shape)) for piece in pieces])
        self._owners: list[dict[Box, int]] = []
        for piece, *boxes in zip(pieces, *everyone, strict=True):
            owners: dict[Box, int] = {}
            for rank, box in enumerate(boxes):
                if prod(box[1]):
                    owners.setdefault(box, rank)
            held = sum(prod(size) for _, size in owners)
            if held != piece.shape.numel():
                raise CheckpointError(
                    f"the pieces of a tensor of shape {tuple(piece.shape)} have {held} numbers together, which "
                    "is not its size."
                )
            self._owners.append(owners)

    def run(self, pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
        """Yield the whole of each piece's tensor on the CPU of rank 0; the other ranks send, and yield nothing.

        Where a tensor cannot be sent or taken, all others are, so that no rank waits, and no number is left on the way
        for the next checkpoint to take for its own.

        Args:
            pieces: as the plan was made for, or copies of them.

        Raises:
            Exception: what has failed first on this rank, at the end.
        """
        failed: list[Exception] = []
        for piece, owners in zip(pieces, self._owners, strict=True):
            if self._rank:
                self._send(piece, owners, failed)
            elif failed:
                self._discard(piece, owners)
            else:
                try:
                    yield self._received(piece, owners)
                except Exception as error:  # noqa: BLE001 - raised at the end
                    failed.append(error)
        if failed:
            raise failed[0]

    def _send(self, piece: Piece, owners: dict[Box, int], failed: list[Exception]) -> None:
        for box, owner in owners.items():
            if owner == self._rank and box[0] == piece.begin:
                try:
                    numbers = _bytes_of(piece.local)
                except Exception as error:  # noqa: BLE001 - raised at the end
                    failed.append(error)
                    numbers = torch.zeros(prod(box[1]) * piece.dtype.itemsize, dtype=torch.uint8, device="cpu")
                dist.send(numbers, 0, group=self._group)

    def _received(self, piece: Piece, owners: dict[Box, int]) -> torch.Tensor:
        if set(owners.values()) == {0} and len(owners) == 1:
            return piece.local.detach().cpu()
        to_come = dict(owners)
        try:
            whole = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
            for (begin, size), owner in owners.items():
                place = part_of(whole, begin, size)
                own = owner == 0 or place.is_contiguous()
                come = place if own else torch.empty(size, dtype=piece.dtype, device="cpu")
                del to_come[begin, size]
                if owner == 0:
                    place.copy_(piece.local.detach())
                    continue
                dist.recv(as_bytes(come), owner, group=self._group)
                if come is not place:
                    place.copy_(come)
        except Exception:
            self._discard(piece, to_come)
            raise
        return whole

    def _discard(self, piece: Piece, owners: dict[Box, int]) -> None:
        for (_, size), owner in owners.items():
            if owner:
                numbers = torch.empty(prod(size) * piece.dtype.itemsize, dtype=torch.uint8, device="cpu")
                dist.recv(numbers, owner, group=self._group)


def in_pieces(state: Any) -> Any:
    """Return a state with a `Piece` in the place of each ``DTensor``.

    Raises:
        CheckpointError: one is a sum that the ranks have not added up yet.
    """
    from torch.distributed.tensor import DTensor  # takes long to import

    def piece(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if any(placement.is_partial() for placement in leaf.placements):
            raise CheckpointError(
                f"state[{path[-1]!r}] is a DTensor whose sums are not added up yet (its placement is Partial): "
                "save what its redistribute() returns."
            )
        begin, _ = box_of(leaf)
        with torch.no_grad():
            return Piece(leaf.shape, leaf.dtype, leaf.to_local(), begin)

    return rebuilt(state, piece)


def box_of(tensor: Any) -> Box:
    """Return which box of the whole a ``DTensor`` has on this rank."""
    for chunk in tensor.__create_chunk_list__():
        return tuple(chunk.offsets), tuple(chunk.sizes)
    return (0,) * tensor.dim(), (0,) * tensor.dim()


def part_of(tensor: torch.Tensor, begin: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, in the same memory."""
    for dimension, (first, length) in enumerate(zip(begin, size, strict=True)):
        tensor = tensor.narrow(dimension, first, length)
    return tensor


def leaves(state: Any, kind: type | tuple[type, ...] = Later) -> list[Any]:
    """Return the parts of a state that are of a kind, in their order: by default those whose numbers come later."""
    found: list[Any] = []

    def note(leaf: Any, _: tuple[Any, ...]) -> Any:
        if isinstance(leaf, kind):
            found.append(leaf)
        return leaf

    rebuilt(state, note)
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return as_bytes(tensor.detach().cpu().contiguous())
