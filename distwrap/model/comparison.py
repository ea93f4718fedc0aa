"""Comparison of tensors between ranks over the side channel, without any rank waiting.

Each rank looks at its tensors at a position, publishes their digest, and compares it with another rank's when that has
come to the same position; at latest when the run ends. Of a divided model, a part is compared with the first rank that
has it too. Only where digests differ are the marks of all tensors asked for.
"""

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from distwrap.devices.kinds import kind_of
from distwrap.errors import DriftError
from distwrap.group.world import RunPart, World
from distwrap.model import in_sync
from distwrap.model.in_sync import Held, Mark

_KEPT = 4  # snapshots whose marks are still known
TRIES = 4  # after which a rank that has not come to a position will not

P = TypeVar("P")  # a position: its string is the same on ranks that have come equally far, and on no others


@dataclass
class Snapshot(Generic[P]):
    """This rank's tensors at one position.

    Attributes:
        position: to which the rank has come.
        held: the tensors, until they are published.
        numbers: those of `in_sync.numbers_of`, on the tensors' device.
        marks: what is published.
        tries: how often another rank's were not there yet.
    """

    position: P
    held: list[Held]
    numbers: torch.Tensor = field(init=False)
    marks: list[Mark] | None = None
    tries: int = 0

    def __post_init__(self) -> None:
        self.numbers = in_sync.numbers_of(self.held)


class Comparison(Generic[P]):
    """One set of tensors on this rank, compared with those of other ranks.

    Args:
        world: of the run.
        key: of these tensors on the side channel, alike on all ranks.
        ranks: which hold the tensors; the first is the one with which the others compare.
        explain: makes the error's message of a position, a difference and the last position at which they agreed.
    """

    def __init__(self, world: World, key: str, ranks: list[int], explain: Callable[[P, str, P | None], str]) -> None:
        run = world.part(Comparisons)
        self._channel, self._rank, self._processor = run.channel, run.rank, run.processor
        self._key, self._ranks, self._explain = key, ranks, explain
        self._open: list[Snapshot[P]] = []
        self._published: list[Snapshot[P]] = []
        self._agreed: P | None = None
        run.by_key[key] = self

    def __bool__(self) -> bool:
        """Return whether there is something left to publish or to compare."""
        return bool(self._open)

    def look(self, position: P, held: list[Held]) -> None:
        """Look at tensors now, without waiting for their device; `advance` publishes them."""
        self._open.append(Snapshot(position, held))

    def publish(self, position: P, held: list[Held]) -> None:
        """Look at tensors, and publish them at once."""
        if position not in [snapshot.position for snapshot in self._published]:
            self.look(position, held)
            self._publish(self._open[-1])

    def advance(self) -> None:
        """Go on with each snapshot by one step: publish it, then compare it, then forget it.

        Raises:
            DriftError: another rank's tensors differ.
        """
        for snapshot in list(self._open):
            if snapshot.marks is None:
                self._publish(snapshot)
                continue
            snapshot.tries += 1
            compared = [self._compare(snapshot, other) for other in self._firsts(snapshot) - {self._rank}]
            if all(compared) or snapshot.tries >= TRIES:
                self._open.remove(snapshot)

    def finish(self) -> None:
        """Compare what is published and not compared yet, on the first rank with all that have come as far.

        Raises:
            DriftError: another rank's tensors differ.
        """
        for snapshot in self._open:
            if snapshot.marks is None:
                continue
            firsts = self._firsts(snapshot)
            for other in self._ranks if self._rank in firsts else firsts:
                if other != self._rank:
                    self._compare(snapshot, other)
        self._open.clear()

    def forget(self) -> None:
        """Leave uncompared what is not compared yet."""
        self._open.clear()

    def published(self) -> dict[str, list[Mark] | None]:
        """Return the marks of the latest snapshots, by their positions; runs in the channel's thread."""
        return {str(snapshot.position): snapshot.marks for snapshot in self._published}

    def _publish(self, snapshot: Snapshot[P]) -> None:
        snapshot.marks, snapshot.held = in_sync.marks(snapshot.held, snapshot.numbers), []
        self._published = [*self._published[1 - _KEPT :], snapshot]
        digests = {str(each.position): self._digests(each.marks) for each in self._published}
        self._channel.note(f"alike/{self._key}", json.dumps([self._processor, digests]))

    def _firsts(self, snapshot: Snapshot[P]) -> set[int]:
        """Return the ranks with which this one compares a snapshot: of each part the first that has it."""
        parts = self._digests(snapshot.marks)
        return {self._ranks[0] if (first := in_sync.first_rank(part)) is None else first for part in parts}

    def _digests(self, marks: list[Mark] | None) -> dict[str, str]:
        """Return the digest of what is here of each part."""
        parts: dict[str, list[Mark]] = {}
        for mark in marks or ():
            parts.setdefault(in_sync.part_of(mark), []).append(mark)
        return {part: _digest(own) for part, own in parts.items()} or {"": ""}

    def _published_by(self, rank: int) -> tuple[str, dict[str, dict[str, str]]]:
        """Return what a rank computes on, and the digests that it has published last."""
        note = self._channel.noted(f"alike/{self._key}", rank)
        processor, digests = json.loads(note) if note else ("", {})
        return processor, digests

    def _compare(self, snapshot: Snapshot[P], other: int) -> bool:
        """Compare a snapshot with another rank's; return whether that was there."""
        processor, digests = self._published_by(other)
        theirs = digests.get(str(snapshot.position))
        if theirs is None:
            return False
        mine = self._digests(snapshot.marks)
        if any(mine[part] != theirs[part] for part in mine.keys() & theirs.keys()):
            marks = {rank: found for rank in self._ranks if (found := self._marks_of(rank, snapshot)) is not None}
            exact = processor == self._processor
            if other in marks:
                difference = in_sync.first_difference(list(marks.values()), exact=exact, ranks=list(marks))
            elif exact:  # it has gone on, and no longer knows them
                difference = f"ranks {other} and {self._rank} differ, but it is no longer known in which tensor"
            else:
                return False
            if difference is not None:
                raise DriftError(self._explain(snapshot.position, difference, self._agreed))
        self._agreed = snapshot.position
        return True

    def _marks_of(self, rank: int, snapshot: Snapshot[P]) -> list[Mark] | None:
        if rank == self._rank:
            return snapshot.marks
        if str(snapshot.position) not in self._published_by(rank)[1]:
            return None
        packed = self._channel.work.ask(f"alike/{rank}", rank, self._key)
        found: list[Mark] | None = json.loads(zlib.decompress(packed)).get(self._key, {}).get(str(snapshot.position))
        return found


class Comparisons(RunPart):
    """The comparisons of a run on one rank, of which its channel's thread tells the marks to ranks that ask.

    Attributes:
        channel: over which ranks tell each other.
        rank: this one.
        processor: what it computes on; between different ones the last bits of weights may differ.
        by_key: the comparisons that somebody holds.
    """

    def __init__(self, world: World) -> None:
        assert world.channel is not None
        self.channel, self.rank = world.channel, world.placement.rank
        self.processor = kind_of(world.device).processor(world.device)
        self.by_key: WeakValueDictionary[str, Comparison[Any]] = WeakValueDictionary()
        self.channel.work.serve(f"alike/{self.rank}", self._packed)

    def _packed(self, key: str | None, waited: float) -> bytes:
        """Return the marks of one comparison, if it still exists; when this rank leaves, those of all."""
        found = {each: self.by_key.get(each) for each in ([key] if key is not None else list(self.by_key))}
        marks = {each: comparison.published() for each, comparison in found.items() if comparison is not None}
        return zlib.compress(json.dumps(marks).encode())


def _digest(marks: list[Mark] | None) -> str:
    return hashlib.blake2b(json.dumps(marks).encode(), digest_size=12).hexdigest()
