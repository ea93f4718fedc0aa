"""Dispatch: one rank alone reads a stream, and sends the others their batches.

For a source that only one process may read, as a queue or a connection, or that costs too much to read on every rank.
In a turn all ranks agree that nobody has left, then rank 0 reads a batch for each share, and sends each rank its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from distwrap.data.indices import Mode, share_size
from distwrap.data.votes import Votes
from distwrap.errors import CollectiveError, LoaderError, WorkerError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.setup import require_group
from distwrap.group.signing import only_plain, run_secret, sign, verify
from distwrap.group.tensors_apart import as_bytes, of_bytes, put_together, take_apart
from distwrap.group.world import RunPart, World, current_world
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity
from distwrap.wording import first_line

stacks.LOOPS[__file__] = "DataLoader"
READER = 0
_ALIGNED = 64  # bytes, at multiples of which each tensor of a message begins


class _Turn(IntEnum):
    """Message of rank 0 to another rank in a turn."""

    BATCH = 0  # here is a batch, and there may be more
    LAST = 1  # here is the last one
    END = 2  # there is none any more
    FAILED = 3  # here is the error of the reader


class DispatchGroup(RunPart):
    """Connection between the reader and the other ranks, for one run: of the CPUs, and of nothing else.

    Attributes:
        shares: which share of the data each rank takes.
    """

    def __init__(self, world: World) -> None:
        require_group("split='dispatch'")
        self._group = world.new_group(backend="gloo")
        self._votes, self._activity = Votes(), world.part(Activity)
        self.shares = [0] * world.placement.world_size
        shares = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in self.shares]
        dist.all_gather(shares, torch.tensor([world.layout.rank], device="cpu"), group=self._group)
        self.shares = [int(share) for share in shares]

    def has_anyone_left(self) -> bool:
        """Return whether a rank has left its loop by itself; every rank still in its loop asks before a turn."""
        self._activity.turns += 1
        left = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.all_reduce(left, op=dist.ReduceOp.MAX, group=self._group)
        return bool(left)

    def leave(self) -> None:
        """Let the other ranks end before their next turn, and wait for none of them."""
        if dist.is_initialized():
            self._activity.turns += 1
            self._votes.cast(torch.ones(1, dtype=torch.int64, device="cpu"), self._group)

    def wait(self) -> None:
        """Wait until the other ranks have heard that this one has left."""
        self._votes.wait()

    def send(self, rank: int, turn: _Turn, message: torch.Tensor | None = None) -> None:
        """Tell a rank what this turn brings it, and send it the message."""
        size = 0 if message is None else message.numel()
        dist.send(torch.tensor([turn, size], dtype=torch.int64, device="cpu"), dst=rank, group=self._group)
        if message is not None:
            dist.send(message, dst=rank, group=self._group)

    def receive(self) -> tuple[_Turn, torch.Tensor | None]:
        """Return what this turn brings, and the message."""
        head = torch.zeros(2, dtype=torch.int64, device="cpu")
        dist.recv(head, src=READER, group=self._group)
        turn, size = head.tolist()
        if not size:
            return _Turn(turn), None
        message = torch.empty(size, dtype=torch.uint8, device="cpu")
        dist.recv(message, src=READER, group=self._group)
        return _Turn(turn), message


@dataclass(frozen=True)
class Dispatch:
    """Dispatch of a loader's batches.

    Attributes:
        mode: what becomes of a last turn for which there are not enough batches.
    """

    mode: Mode

    @property
    def reads(self) -> bool:
        """Whether this rank is the one that reads."""
        return current_world().placement.rank == READER

    def length(self, batches: int, rank: int, world_size: int) -> int:
        """Return how many of a number of batches a rank gets."""
        return share_size(batches, rank, world_size, self.mode)

    def batches(self, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield this rank's batches; `read`, which is called on rank 0 alone, returns an iterator over all of them."""
        world = current_world()
        check_collectives_allowed("a loader with split='dispatch'")
        group, is_over = world.part(DispatchGroup), False
        stream = _lazily(read)
        try:
            while not is_over:
                if group.has_anyone_left():
                    is_over = True
                    return
                if self.reads:
                    turn, batch = self._read_turn(stream, group, world.layout.size)
                else:
                    turn, batch = _received(group)
                is_over = turn is not _Turn.BATCH
                if turn is _Turn.END:
                    return
                yield batch
        except GeneratorExit:  # the user's loop was left by itself, not by all ranks
            if not is_over and current_world() is world:
                group.leave()
            raise

    def _read_turn(self, stream: Iterator[Any], group: DispatchGroup, shares: int) -> tuple[_Turn, Any]:
        """Read a batch for each share, send them, and return what the turn brings rank 0 itself."""
        others = [rank for rank in range(len(group.shares)) if rank != READER]
        try:
            found = list(islice(stream, shares))
            turn = _Turn.BATCH if len(found) == shares else _Turn.LAST
            if turn is _Turn.LAST and self.mode != "exact":
                found = [found[share % len(found)] for share in range(shares)] if found and self.mode == "pad" else []
            messages = {share: _packed(batch) for share, batch in enumerate(found) if share in group.shares[1:]}
        except Exception as error:
            failure = _failure(error)
            for rank in others:
                group.send(rank, _Turn.FAILED, failure)
            raise
        for rank in others:
            message = messages.get(group.shares[rank])
            group.send(rank, _Turn.END if message is None else turn, message)
        own = group.shares[READER]
        return (turn, found[own]) if own < len(found) else (_Turn.END, None)


def _lazily(read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield batches, whose reader starts inside of a turn, so that all ranks get an error if that fails."""
    yield from read()


def _received(group: DispatchGroup) -> tuple[_Turn, Any]:
    turn, message = group.receive()
    if message is None:
        return turn, None
    if turn is not _Turn.FAILED:
        return turn, _unpacked(message)
    text, error = verify(message.numpy().tobytes(), run_secret(), READER)
    if error is None:
        raise LoaderError(text, secondary=True)
    raise error from WorkerError(text, rank=READER, secondary=True)  # the reader has failed first


def _failure(error: Exception) -> torch.Tensor:
    """Return the message with the reader's error, with its own type if it can be sent."""
    secret = run_secret()
    why = f"{type(error).__name__}: {first_line(error)}"
    text = f"rank {READER}, which reads for all ranks (split='dispatch'), failed: {why}"
    data = sign((text, None), secret)
    try:
        own = sign((text, error), secret)
        verify(own, secret, READER)
        data = own
    except Exception:  # noqa: BLE001 - whatever it is, the others hear of it in words
        pass
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _packed(batch: Any) -> torch.Tensor:
    """Return a batch in one message: the length of its head, the head, and the numbers of its tensors."""
    secret = run_secret()
    try:
        data, tensors = take_apart(batch, plain=only_plain(secret))
    except Exception as error:
        raise CollectiveError(
            f"rank {READER}: its batch, a {type(batch).__qualname__}, cannot be sent to the other ranks: "
            f"{type(error).__name__}: {error}"
        ) from error
    plain = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    head = sign((data, [(tensor.dtype, tensor.shape) for tensor in plain]), secret)
    length = torch.tensor([len(head)], dtype=torch.int64, device="cpu")
    parts = [as_bytes(length), torch.frombuffer(bytearray(head), dtype=torch.uint8), *map(as_bytes, plain)]
    message = torch.empty(sum(_room(part.numel()) for part in parts), dtype=torch.uint8, device="cpu")
    at = 0
    for part in parts:
        message[at : at + part.numel()] = part
        at += _room(part.numel())
    return message


def _unpacked(message: torch.Tensor) -> Any:
    secret = run_secret()
    length = int(message[:8].view(torch.int64))
    data, described = verify(message[_ALIGNED : _ALIGNED + length].numpy().tobytes(), secret, READER)
    at, tensors = _ALIGNED + _room(length), []
    for dtype, shape in described:
        size = shape.numel() * dtype.itemsize
        tensors.append(of_bytes(message[at : at + size], dtype, shape))
        at += _room(size)
    return put_together(data, tensors, plain=only_plain(secret))


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
