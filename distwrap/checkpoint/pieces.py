"""Put tensors that are divided over the ranks together on rank 0, one at a time, so that no rank holds a whole state.

Pieces are sent over a gloo group of their own, so that this may run in the background during a training step.
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

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # its begin and its length in each dimension
_LINE = 1000  # bytes


@dataclass(frozen=True, eq=False)
class Later:
    """Placeholder in a state for a tensor whose numbers come later."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Piece(Later):
    """Placeholder in a state for a divided tensor, with this rank's piece.

    Attributes:
        local: this rank's numbers, possibly none.
        begin: their begin in each dimension of the whole tensor.
    """

    local: torch.Tensor
    begin: tuple[int, ...]


class PieceGroup(RunPart):
    """Process group for pieces, made by all ranks with the first checkpoint that needs it.

    It is closed with the other groups, after the `Writer` has used it for the last time.
    """

    def __init__(self, world: World) -> None:
        self.group: dist.ProcessGroup | None = None
        if world.placement.world_size > 1:
            self.group = world.new_group(backend="gloo")

    def gather_text(self, text: str) -> list[str]:
        """Return a line of text from every rank, on every rank; longer lines are cut off."""
        if self.group is None:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode()[:_LINE].ljust(_LINE)), dtype=torch.uint8)
        lines = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(lines, mine, group=self.group)
        return [bytes(line.tolist()).decode(errors="replace").strip() for line in lines]


class Gathering:
    """Plan by which rank 0 receives whole tensors in order. Every rank makes it with the same names.

    Args:
        pieces: this rank's pieces.

    Raises:
        CheckpointError: the pieces of all ranks do not make a whole tensor; raised on every rank.
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
        """Yield each whole tensor on the CPU of rank 0; the other ranks send, and yield nothing.

        If a tensor cannot be sent or received, the others still are, so that no rank waits, and no message is left for
        the next checkpoint.

        Args:
            pieces: the pieces of the plan, or copies of them.

        Raises:
            Exception: the first failure on this rank, raised at the end.
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
    """Return a state with a `Piece` instead of each ``DTensor``.

    Raises:
        CheckpointError: a ``DTensor`` is a sum that the ranks have not added up yet.
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
    """Return the box of the whole tensor that a ``DTensor`` has on this rank."""
    for chunk in tensor.__create_chunk_list__():
        return tuple(chunk.offsets), tuple(chunk.sizes)
    return (0,) * tensor.dim(), (0,) * tensor.dim()


def part_of(tensor: torch.Tensor, begin: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, as a view."""
    for dimension, (first, length) in enumerate(zip(begin, size, strict=True)):
        tensor = tensor.narrow(dimension, first, length)
    return tensor


def leaves(state: Any, kind: type | tuple[type, ...] = Later) -> list[Any]:
    """Return the parts of a state that are of a type, in order; by default those whose numbers come later."""
    found: list[Any] = []

    def note(leaf: Any, _: tuple[Any, ...]) -> Any:
        if isinstance(leaf, kind):
            found.append(leaf)
        return leaf

    rebuilt(state, note)
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return as_bytes(tensor.detach().cpu().contiguous())
