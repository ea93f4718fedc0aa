"""Comparison of tensors between ranks, bit by bit: by a collective on demand, or by notes, for which no rank waits.

For the notes each rank looks at its tensors at a position, publishes a hash of their digests, and compares it with
another rank's when that has come to the same position; at latest when the run ends. Of a divided model, a part is
compared with the first rank that has it too. Only where hashes differ are the digests of all tensors asked for.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn

from distwrap._internals.torch import names_ddp_ignores, norm_classes
from distwrap.devices.kinds import kind_of, widest
from distwrap.errors import DriftError, ModelError
from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import bound_strategy
from distwrap.protocols import ComparedTensor as ComparedTensor
from distwrap.seeding import mix
from distwrap.wording import named_ranks

_WORDS = 2**13  # numbers of 64 bits, for which memory is at hand: larger pieces would be asked of the system
_ROWS = 1024  # of so many at once, on a device that is quicker with more
_MASK = 2**63 - 1

# The name of a tensor; of what is here its bits, its size and the sum of its absolute values; and which part that is.
Digest = Sequence[Any]

# Between processors of different kinds, which may round the last bit differently.
_ROUNDING = 1e-6
_CHUNK = 2**14  # numbers, of which the absolute values fit into memory that is at hand
_KEPT = 4  # positions whose digests are still known
TRIES = 4  # after which a rank that has not come to a position will not

P = TypeVar("P")  # a position: its string is the same on ranks that have come equally far, and on no others

_multipliers: dict[torch.device, torch.Tensor] = {}


def fingerprint(tensor: torch.Tensor) -> int:
    """Hash a tensor's bits, shape and type into 63 bits.

    Example:
        >>> fingerprint(torch.ones(3)) == fingerprint(torch.ones(3))
        True
        >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
        False
    """
    return _with_type(int(_fold(tensor)), tensor)


def _with_type(folded: int, tensor: torch.Tensor) -> int:
    """Mix a tensor's shape and type into what `_fold` has made of its bits."""
    return (folded * 6364136223846793005 + mix(str(tensor.dtype), *tensor.shape)) & _MASK


def _fold(tensor: torch.Tensor) -> torch.Tensor:
    """Hash a tensor's bits into 64 of them, on its device and without waiting for it.

    A sum of products modulo 2**64 with fixed odd multipliers, chunk by chunk, and the same over the chunks' sums
    (multilinear hashing: Lemire and Kaser, https://arxiv.org/abs/1202.4961). It tells differing tensors apart, and is
    no defence against a forger.

    Returns:
        A scalar, int64.
    """
    with torch.no_grad():
        data = tensor.int_repr() if tensor.is_quantized else tensor.detach()  # of which torch gives no view as bytes
        data = data.resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = data.view(torch.uint8) if data.numel() else data.to(torch.uint8)
        words = raw.numel() // 8
        rest = raw.new_zeros(8)
        rest[: raw.numel() - 8 * words] = raw[8 * words :]
        if raw.data_ptr() % 8:
            raw = raw.clone()
        return _sum(raw[: 8 * words].view(torch.int64), rest.view(torch.int64))


def _sum(words: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    factors = _factors(words.device)
    whole = words.numel() // _WORDS * _WORDS
    blocks = words[:whole].view(-1, _WORDS).split(1 if words.device.type == "cpu" else _ROWS)  # type: ignore[no-untyped-call]
    sums = torch.cat([_products(block, factors) for block in (*blocks, words[whole:].view(1, -1))])
    return _sum(sums, rest) if len(sums) > 1 else sums[0] * factors[0] + _products(rest.view(1, -1), factors)[0]


def _products(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    # Folded first: of round numbers only the high bits differ, and a product keeps the low ones.
    return (rows >> 32).bitwise_xor_(rows).mul_(factors[: rows.shape[1]]).sum(1)


def _factors(device: torch.device) -> torch.Tensor:
    if device not in _multipliers:
        generator = torch.Generator().manual_seed(20240229)
        factors = torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator, device="cpu")
        _multipliers[device] = (2 * factors + 1).to(device)
    return _multipliers[device]


def assert_in_sync(model: nn.Module) -> None:
    """Check that all ranks hold the same weights and buffers, bit by bit; a collective, and a no-op in one process.

    Running statistics of norms are left out, since each rank has its own while it trains. Only fingerprints are sent.
    distwrap also compares weights by itself during the training.

    Args:
        model: a model, wrapped or not.

    Raises:
        ModelError: `model` is not a module.
        DriftError: a tensor differs; the message names the first one, and the ranks. Raised on every rank.

    Example:
        >>> assert_in_sync(nn.Linear(2, 1))
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"assert_in_sync() takes an nn.Module, not a {type(model).__qualname__}. To compare anything else, "
            "use gather_object(), or reduce() with op='min' and op='max'."
        )
    if current_world().placement.world_size == 1:
        return
    strategy = bound_strategy(model)
    held = tensors_of(model) if strategy is None else strategy.held(model)
    everyone = gather_object(fingerprints(list(held)))
    difference = first_difference(everyone)
    if difference is not None:
        raise DriftError(f"{type(unwrap_model(model)).__name__} is not the same on all ranks: {difference}.")


def tensors_of(model: nn.Module) -> list[ComparedTensor]:
    """Return a replicated model's parameters and buffers, but for running statistics."""
    net, own = unwrap_model(model), left_to_ranks(model)
    named = (*net.named_parameters(), *net.named_buffers())
    return [ComparedTensor(name, "", value) for name, value in named if name not in own]


def statistics_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are a norm's running statistics, and differ between ranks while training."""
    return {
        f"{prefix}.{key}" if prefix else key: value
        for prefix, part in model.named_modules()
        if isinstance(part, norm_classes())
        for key, value in part.named_buffers(recurse=False)
    }


def left_to_ranks(model: nn.Module) -> set[str]:
    """Name the tensors of which each rank has its own: running statistics, and what the user has told DDP to ignore."""
    net = unwrap_model(model)
    return {*statistics_of(net), *names_ddp_ignores(net)}


def fingerprints(compared: Sequence[ComparedTensor]) -> list[Digest]:
    """Return the digest of each tensor; this waits for their device."""
    tensors = [value for *_, value in compared if isinstance(value, torch.Tensor)]
    known = zip(_numbers(map(_fold, tensors)), _numbers(map(_size, tensors)), strict=True)
    found: list[Digest] = []
    for name, part, value in compared:
        if isinstance(value, torch.Tensor):
            folded, size = next(known)
            found.append((name, (_with_type(folded, value), value.numel(), size), part))
        else:
            found.append((name, (0, -1, float(value)), part))
    return found


def _numbers(computed: Iterable[torch.Tensor]) -> list[Any]:
    """Return numbers that were computed on a device, for which it waits once, and not for each."""
    found = list(computed)
    if len({number.device for number in found}) == 1:
        return torch.stack(found).tolist()
    return [number.item() for number in found]


def _size(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.zeros((), dtype=widest(tensor.device), device=tensor.device)
    with torch.no_grad():
        wide = tensor.detach().reshape(-1)
        chunks = wide.split(_CHUNK if tensor.device.type == "cpu" else max(1, wide.numel()))  # type: ignore[no-untyped-call]
        kind = torch.promote_types(wide[:0].abs().dtype, torch.float32)
        return torch.stack([chunk.abs().sum(dtype=kind).to(widest(tensor.device)) for chunk in chunks]).sum()


def first_difference(
    everyone: Sequence[Sequence[Digest]], *, exact: bool = True, ranks: Sequence[int] | None = None
) -> str | None:
    """Return which tensor is the first that differs between ranks, and on which ranks it is which.

    Args:
        everyone: each rank's `fingerprints`, in rank order.
        exact: whether a difference in the last bit counts.
        ranks: whose they are; by default 0, 1, ….
    """
    of_part: dict[str, dict[int, list[Digest]]] = {"": {rank: [] for rank in ranks or range(len(everyone))}}
    for rank, digests in zip(ranks or range(len(everyone)), everyone, strict=True):
        for digest in digests:
            of_part.setdefault(digest[2], {}).setdefault(rank, []).append(digest)
    return next(filter(None, (_difference_in(part, held, exact) for part, held in of_part.items())), None)


def _difference_in(part: str, held: dict[int, list[Digest]], exact: bool) -> str | None:
    """Return the first difference between ranks that hold the same tensors, or parts of them."""
    first, *others = held
    names = [name for name, *_ in held[first]]
    for rank in others:
        own = [name for name, *_ in held[rank]]
        if own != names:
            other = next((name for name in [*own, *names] if (name in own) != (name in names)), "their order")
            return f"rank {rank} does not hold the same tensors as rank {first} ({other})"
    for index, name in enumerate(names):
        groups: dict[tuple[float, ...], list[int]] = {}
        for rank, digests in held.items():
            groups.setdefault(tuple(digests[index][1]), []).append(rank)
        if len(groups) > 1 and (exact or not _is_rounding(list(groups))):
            seen = " and ".join(f"{named_ranks(ranks)} {_in_words(numbers)}" for numbers, ranks in groups.items())
            where = part.partition(":")[2].strip()
            return f"{name!r}{where and f' ({where})'} is the first that differs: {seen}"
    return None


def _in_words(numbers: tuple[float, ...]) -> str:
    return f"{numbers[2]:g}" if numbers[1] < 0 else f"one whose absolute values sum to {numbers[2]:.9g}"


def _is_rounding(found: list[tuple[float, ...]]) -> bool:
    sums = [numbers[2] for numbers in found]
    return len({each[1] for each in found}) == 1 and max(sums) - min(sums) <= _ROUNDING * max(map(abs, sums)) > 0


class Ledger:
    """Values that this rank has published under one key, each at a position, and those of other ranks.

    Args:
        world: of the run.
        key: alike on all ranks.
        ranks: that compare; by default all.
        keep: how many of the latest positions the others still find.
        owner: what is compared, if its values are of no use to others once it is gone.

    Attributes:
        own: what this rank has published, by the positions as text.
        others: the other ranks.
    """

    def __init__(
        self, world: World, key: str, ranks: Iterable[int] | None = None, *, keep: int = 64, owner: object = None
    ) -> None:
        assert world.channel is not None
        self._channel, self._key, self._keep, self._owner = world.channel, key, keep, owner
        place = world.placement
        self.own: dict[str, Any] = {}
        self.others = [rank for rank in (range(place.world_size) if ranks is None else ranks) if rank != place.rank]

    def publish(self, position: object, value: Any) -> None:
        """Let the other ranks read a value, of which JSON knows the type."""
        self.own.pop(str(position), None)
        self.own = dict([*self.own.items(), (str(position), value)][-self._keep :])
        self._channel.note(self._key, json.dumps(self.own), self._owner)

    def of(self, rank: int) -> dict[str, Any]:
        """Return what another rank has published, by position."""
        found: dict[str, Any] = json.loads(self._channel.noted(self._key, rank) or "{}")
        return found

    def at(self, position: object) -> dict[int, Any]:
        """Return what other ranks have published at one position, by rank."""
        found = {rank: self.of(rank) for rank in self.others}
        return {rank: theirs[str(position)] for rank, theirs in found.items() if str(position) in theirs}


class Comparison(Generic[P]):
    """One set of tensors on this rank, compared with those of other ranks.

    Args:
        world: of the run.
        key: of these tensors on the side channel, alike on all ranks.
        ranks: which hold the tensors; the first is the one with which the others compare.
        explain: makes the error's message of a position, a difference and the last position at which they agreed.
    """

    def __init__(self, world: World, key: str, ranks: list[int], explain: Callable[[P, str, P | None], str]) -> None:
        self._run, self._ledger = world.part(Comparisons), Ledger(world, f"alike/{key}", ranks, keep=_KEPT)
        self._key, self._ranks, self._rank, self._explain = key, ranks, world.placement.rank, explain
        self._open: dict[P, tuple[list[Digest], int]] = {}  # how often other ranks had not come to a position yet
        self.published: dict[str, list[Digest]] = {}  # at the latest positions; for the channel's thread
        self._agreed: P | None = None
        self._run.by_key[key] = self

    def __bool__(self) -> bool:
        """Return whether there is something left to compare."""
        return bool(self._open)

    def publish(self, position: P, compared: list[ComparedTensor]) -> None:
        """Look at tensors at a position to which this rank has come, and let the other ranks know their digests."""
        if str(position) not in self.published:
            digests = fingerprints(compared)
            self.published = dict([*self.published.items(), (str(position), digests)][-_KEPT:])
            self._ledger.publish(position, [self._run.processor, _hashes(digests)])
            self._open[position] = digests, 0

    def advance(self) -> None:
        """Compare what is published with ranks that have come as far; forget it after a few tries.

        Raises:
            DriftError: another rank's tensors differ.
        """
        for position, (digests, tries) in list(self._open.items()):
            compared = [self._compare(position, digests, other) for other in _firsts(digests, self._ranks)]
            self._open[position] = digests, tries + 1
            if all(compared) or tries + 1 >= TRIES:
                del self._open[position]

    def finish(self) -> None:
        """Compare what is not compared yet, on the first rank with all that have come as far, and forget it.

        Raises:
            DriftError: another rank's tensors differ.
        """
        for position, (digests, _) in self._open.items():
            firsts = _firsts(digests, self._ranks)
            for other in self._ranks if self._rank in firsts else firsts:
                self._compare(position, digests, other)
        self.forget()

    def forget(self) -> None:
        """Leave uncompared what is not compared yet."""
        self._open.clear()

    def _compare(self, position: P, digests: list[Digest], other: int) -> bool:
        """Compare digests with another rank's; return whether that has come as far."""
        if other == self._rank:
            return True
        if (published := self._ledger.of(other).get(str(position))) is None:
            return False
        mine, theirs, exact = _hashes(digests), published[1], published[0] == self._run.processor
        if any(mine[part] != theirs[part] for part in mine.keys() & theirs.keys()):
            known = {rank: self._run.ask(rank, self._key, position) for rank in self._ledger.at(position)}
            known = {rank: known.get(rank) for rank in self._ranks} | {self._rank: digests}
            everyone = {rank: each for rank, each in known.items() if each is not None}
            if other in everyone:
                difference = first_difference(list(everyone.values()), exact=exact, ranks=list(everyone))
            elif exact:  # it has gone on, and no longer knows them
                difference = f"ranks {other} and {self._rank} differ, but it is no longer known in which tensor"
            else:
                return False
            if difference is not None:
                raise DriftError(self._explain(position, difference, self._agreed))
        self._agreed = position
        return True


class Comparisons(RunPart):
    """The comparisons of a run on one rank, of which its channel's thread tells the digests to ranks that ask.

    Attributes:
        processor: what this rank computes on; between different ones the last bits of weights may differ.
        by_key: the comparisons that somebody holds.
    """

    def __init__(self, world: World) -> None:
        assert world.channel is not None
        self._work = world.channel.work
        self.processor = kind_of(world.device).processor(world.device)
        self.by_key: WeakValueDictionary[str, Comparison[Any]] = WeakValueDictionary()
        self._work.serve(f"alike/{world.placement.rank}", self._packed)

    def ask(self, rank: int, key: str, position: object) -> list[Digest] | None:
        """Return the digests that another rank has published; ``None`` where it no longer knows them."""
        found = json.loads(zlib.decompress(self._work.ask(f"alike/{rank}", rank, key)))
        return found.get(key, {}).get(str(position))  # type: ignore[no-any-return]

    def _packed(self, key: str | None, waited: float) -> bytes:
        """Return the digests of one comparison, if it still exists; when this rank leaves, those of all."""
        found = {each: self.by_key.get(each) for each in ([key] if key is not None else list(self.by_key))}
        digests = {each: comparison.published for each, comparison in found.items() if comparison is not None}
        return zlib.compress(json.dumps(digests).encode())


def _hashes(digests: list[Digest]) -> dict[str, str]:
    """Return the hash of what is here of each part."""
    parts: dict[str, list[Digest]] = {}
    for digest in digests:
        parts.setdefault(digest[2], []).append(digest)
    hashes = {part: hashlib.blake2b(json.dumps(own).encode(), digest_size=12) for part, own in parts.items()}
    return {part: found.hexdigest() for part, found in hashes.items()} or {"": ""}


def _firsts(digests: list[Digest], ranks: list[int]) -> set[int]:
    """Return the ranks with which digests are compared: of each part the first that has it."""
    return {int(part.partition(":")[0]) if part else ranks[0] for part in _hashes(digests)}


def is_power_of_two(number: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, …."""
    return number > 0 and number & (number - 1) == 0
