"""The first difference between a world of one process and a world of several ranks, and what may be its cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import torch

from distwrap.prove.catalogue import BY_NAME, CATALOGUE, is_ignored
from distwrap.prove.observer import Seen, Sketch, Step
from distwrap.prove.world import World
from distwrap.wording import named_ranks

_EPSILONS = 4000.0  # of the type of numbers, by which tensors may differ in the first step
_LEAST = 1e-7  # also in float64, where optimizers divide rounding by small numbers
_SMALL = 1e-2  # of what a step changes, by which that may differ
_UNEVEN = (
    "uneven-mean",
    "samples-twice",
    "samples-missing",
    "other-samples",
)  # how a last batch differs of which some have more
_SHARE = 1e-3  # of the largest gradient of a step, below which one is as good as zero


@dataclass
class Difference:
    """First difference of a world.

    Attributes:
        mistake: its name in the catalogue; empty where nothing differs.
        step: the optimizer's step, from 1; 0 where it is in none.
        place: the line of the user's.
        what: the tensor or number.
        how: in words.
        size: as a share of what differs, but for one more in the last printed digit; 1 where it has none.
        ratio: to one process, where it is one number for all of them.
        is_ignored: whether a comment on the line says so.
    """

    mistake: str = ""
    step: int = 0
    place: str = ""
    what: str = ""
    how: str = ""
    size: float = 1.0
    ratio: float | None = None
    is_ignored: bool = False


@dataclass
class Comparison:
    """Two worlds, compared.

    Attributes:
        ranks: of the second.
        difference: the first one; its name is empty where all is equal.
        steps: how many steps were compared.
        compared: how many of each kind.
        notes: what differs and is no mistake, and what was not seen.
        is_comparable: whether the ranks have trained on the data of one process.
        resumed: number of ranks of the world that the second has gone on from; 0 where there is none.
    """

    ranks: int
    difference: Difference = field(default_factory=Difference)
    steps: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    is_comparable: bool = True
    resumed: int = 0

    @property
    def name(self) -> str:
        """The number of ranks, in words."""
        return f"{self.resumed} and then {self.ranks} ranks" if self.resumed else f"{self.ranks} ranks"


class _Apart(NamedTuple):
    """How a tensor of a rank differs: its ratio to one process's, NaN where it is no multiple, and by what share."""

    ratio: float
    share: float


_Differing = dict[str, dict[int, _Apart]]  # by the tensors' names, and by ranks


def compare(one: World, several: World, resumed: int = 0) -> Comparison:
    """Compare a world of several ranks with that of one process.

    Args:
        one: of one process, which was not interrupted.
        several: of several ranks.
        resumed: number of ranks of the world from whose checkpoint these go on; 0 where they begin anew.
    """
    found = Comparison(several.ranks, resumed=resumed)
    difference = found.difference = _first(one, several, found)
    if resumed and difference.mistake not in ("", "failed"):
        difference.mistake, difference.size = "state-lost", 0.0
    if known := BY_NAME.get(difference.mistake):
        comments = [seen.comments.get(difference.place, "") for world in (one, several) for seen in world.seen.values()]
        difference.is_ignored = any(is_ignored(each, known.id) for each in comments)
    if difference.is_ignored and difference.step:
        found.notes.append(f"after what is ignored in step {difference.step} nothing was compared")
    return found


def _first(one: World, several: World, found: Comparison) -> Difference:
    """Return the first difference, and write down what was compared."""
    ranks = [several.seen.get(rank, Seen()) for rank in range(several.ranks)]
    alone, start = one.seen.get(0, Seen()), 0
    if found.resumed:
        begun = [seen.steps[0] for seen in ranks if seen.steps]
        starts = [step for step, each in enumerate(alone.steps) if begun and not _differing("begun", each, begun, step)]
        start = min(starts, key=lambda step: _distance(begun[0], alone.steps[step]), default=0)
        found.is_comparable = start > 0
        if begun and not starts:
            return Difference("state-lost", what="the weights, which one process has in no step")
        if not start:
            found.notes.append(f"{found.name} did not go on from a step: did the loop save, and resume?")
            return Difference()
    whole = max((sum(step.samples.values()) for step in alone.steps), default=0)
    for number, step in enumerate(alone.steps[start:], start):
        theirs = [seen.steps[number - start] for seen in ranks if number - start < len(seen.steps)]
        if len(theirs) < len(ranks) or (several.error and not all(each.weights for each in theirs)):
            break
        difference = _of_step(number + 1, step, theirs, found, alone)
        size, shares = sum(step.samples.values()), len({each.share for each in theirs})
        if difference is None:
            found.steps += 1
        elif not difference.mistake:
            found.is_comparable = False
            found.notes.append(
                f"in step {number + 1} the ranks train on data, or draw random numbers, that one process never sees: "
                "from there on nothing can be compared"
            )
            return difference
        elif difference.mistake in _UNEVEN and size % shares and size < whole:
            found.notes.append(f"a last batch of {size} samples has uneven parts, from where nothing was compared")
            return Difference()
        else:
            return difference
    counts = [len(seen.steps) for seen in ranks]
    if several.error:
        named = [each.name for each in CATALOGUE if f"({each.id})" in several.error]
        return Difference((*named, "failed")[0], found.steps + 1, what="an error", how=several.error)
    if found.resumed:
        goes_on = alone.has_ended and max(counts) > len(alone.steps) - start
        what = "steps, which go on past the end of one process"
        return Difference("state-lost", what=what) if goes_on else Difference()
    if {*counts} != {len(alone.steps)}:
        made = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        place = alone.steps[0].place if alone.steps else ""
        return Difference("steps", 0, place, "steps", f"{len(alone.steps)} in one process, {made}")
    return _of_output(alone, ranks, found)


def _of_step(number: int, one: Step, several: list[Step], found: Comparison, alone: Seen) -> Difference | None:
    """Return how a step differs, without a mistake where it cannot be compared; ``None`` where it does not."""
    place = several[0].place

    def of_weights(kind: str, words: str, size: float | None = None) -> Difference | None:
        if not (differ := _differing(kind, one, several, number)):
            return None
        wrong = {rank for each in differ.values() for rank in each}
        how = f"on {named_ranks(wrong)}" if len(wrong) < len(several) else "on all ranks"
        what = words.format(_names(list(differ), getattr(one, kind)))
        return Difference("weights-apart", number, place, what, how, _size(differ) if size is None else size)

    for name, numbers in one.options.items():
        for rank, step in enumerate(several):
            if apart := _apart_in_numbers(numbers, step.options.get(name, []), 1e-5, rank):
                what = "the learning rate" if name == "lr" else f"the optimizer's {name}"
                return Difference("learning-rate", number, place, what, *apart)
    found.compared["learning rates"] += len(one.options.get("lr", []))
    samples = _of_samples(one, several, found, alone)
    if difference := of_weights("begun", "the weights of {}, before"):
        return difference
    if difference := _of_gradients(number, one, several, samples, alone):
        return difference
    found.compared["gradients"] += len(one.gradients)
    # Adam makes steps of any size from gradients that are zero but for rounding: float64 decides.
    if difference := of_weights("changes", "what the step changes in {}", 0.0):
        return difference
    found.compared["weights"] += len(one.weights)
    if difference := of_weights("buffers", "the buffers {}"):
        return difference
    if alone.statistics:
        found.notes.append("running statistics of BatchNorm are those of a rank's part")
    found.compared["buffers"] += len(one.buffers)
    tolerance = _tolerance(number, one.weights.values())
    for name, numbers in one.state.items():
        for rank, step in enumerate(several):
            theirs = step.state.get(name, [])  # which a rank may not hold, or hold otherwise
            if len(theirs) == len(numbers) and (apart := _apart_in_numbers(numbers, theirs, tolerance, rank)):
                return Difference("weights-apart", number, place, f"the optimizer's state of {name}", apart[0], 0.0)
    found.compared["optimizer state"] += len(one.state)
    loss = sum(sum(each.losses) for each in several) / len(several)
    found.compared["losses"] += bool(one.losses) and not _apart_in_numbers([sum(one.losses)], [loss], tolerance, 0)
    return None


def _of_samples(one: Step, several: list[Step], found: Comparison, alone: Seen) -> str:
    """Return how the samples of a step differ: the name of a mistake, "unknown" where they cannot be told, or ""."""
    shares: dict[int, Counter[int]] = {}
    for step in several:  # ranks that have one share of the data see the same samples, which count once
        shares[step.share] = shares.get(step.share, Counter()) | step.samples
    together: Counter[int] = sum(shares.values(), Counter())
    if together == one.samples:
        found.compared["samples"] += sum(together.values())
        return ""
    owners = Counter(digest for samples in shares.values() for digest in samples)
    if any(owners[digest] > 1 and together[digest] > one.samples.get(digest, 0) for digest in owners):
        return "samples-twice"
    if not together.keys() <= {digest for step in alone.steps for digest in step.samples}:
        return "unknown"
    return "samples-missing" if not together - one.samples else "other-samples"


def _of_gradients(number: int, one: Step, several: list[Step], samples: str, alone: Seen) -> Difference | None:
    """Return how the gradients of a step differ, without a mistake where they cannot be compared."""
    at_step, before = (_differing(kind, one, several, number) for kind in ("gradients", "after_backward"))
    by_hand = _are_apart("after_backward", before, several)  # an exchange by hand comes after the backward
    if not at_step and (by_hand or not before):
        return None
    draws = 2 * sum(each.draws for each in alone.steps) >= len(alone.steps)
    if (samples == "unknown" or draws) and _common_ratio(at_step or before) is None:
        return Difference()
    differ = at_step if by_hand or not before else before
    ratio = _common_ratio(differ)
    losses = [sum(each.losses) for each in several]
    own = ", ".join(f"{each:.4g}" for each in losses)
    is_apart = len(set(losses)) > 1 and _are_apart("gradients", at_step, several)
    causes = (
        ("not-exchanged", is_apart, f"each rank has its own (loss {own})"),
        ("gradients-changed", not before, "they were alike after the backward, and are not in the step"),
        ("multiplied-by-ranks", math.isclose(ratio or 0.0, len(several), rel_tol=0.01), ""),
        ("divided-by-ranks", math.isclose((ratio or 0.0) * len(several), 1.0, rel_tol=0.01), ""),
        (samples, samples in BY_NAME, "they are of other samples"),
        ("batch-statistics", alone.statistics, "the ranks' parts of a batch are normalized apart"),
        ("uneven-mean", True, "they are no multiple of those of one process"),
    )
    mistake, how = next((name, words) for name, holds, words in causes if holds)
    if ratio is not None and not is_apart:
        how = f"{ratio:.3f} times those of one process"
    what = f"the gradients of {_names(list(differ), one.gradients)}"
    place = several[0].backward or several[0].place
    return Difference(mistake, number, place, what, how, _size(differ), ratio)


def _of_output(alone: Seen, ranks: list[Seen], found: Comparison) -> Difference:
    """Compare what was returned and printed."""
    returned, weights = ranks[0].returned, [each for step in alone.steps for each in step.weights.values()]
    tolerance = _tolerance(found.steps, weights)
    if alone.returned is not None and returned is not None:
        if apart := _apart_in_numbers(alone.returned, returned, tolerance, 0):
            return Difference("number-of-a-part", 0, "", "what the function returned", *apart)
        found.compared["returned numbers"] += len(returned)
    rank, theirs = next(((rank, seen.printed) for rank, seen in enumerate(ranks) if seen.printed), (0, []))
    if theirs and alone.printed and [len(each) for _, each in theirs] != [len(each) for _, each in alone.printed]:
        found.notes.append("the ranks print other lines than one process, which were not compared")
        return Difference()
    for (place, printed), (_, texts) in zip(alone.printed, theirs, strict=False):
        one = [float(text) for text in printed]
        # A loop may print its number of ranks.
        several = [1.0 if (a, b) == (str(len(ranks)), "1") else float(a) for a, b in zip(texts, printed, strict=True)]
        digits = [10.0 ** int(Decimal(text).as_tuple().exponent) for text in printed]
        if apart := _apart_in_numbers(one, several, tolerance, rank, digits):
            return Difference("number-of-a-part", 0, place, "what was printed", *apart)
        found.compared["printed numbers"] += len(one)
    return Difference()


def _differing(kind: str, one: Step, several: list[Step], number: int) -> _Differing:
    """Return the tensors of a kind that differ on some ranks."""
    mine, theirs = getattr(one, kind), [getattr(each, kind) for each in several]
    least = _SHARE * max(map(_norm, mine.values()), default=0.0)
    differ: _Differing = {}
    for name, tensor in mine.items():
        if kind == "changes":  # which may be too little to be seen in the weight itself
            limit = _SMALL * _norm(tensor) + 16 * tensor.epsilon * _norm(one.weights[name])
        else:
            limit = _relative(tensor, number) * max(_norm(tensor), least)
        there = {rank: each[name] for rank, each in enumerate(theirs) if name in each}
        if not there and kind != "changes" and _norm(tensor) > least:
            there = {0: tensor._replace(values=torch.zeros_like(tensor.values))}
        if apart := {rank: found for rank, each in there.items() if (found := _apart(tensor, each, limit))}:
            differ[name] = apart
    return differ


def _apart(one: Sketch, other: Sketch, limit: float) -> _Apart | None:
    if one.shape != other.shape:
        return _Apart(float("nan"), 1.0)
    a, b = one.values, other.values
    size, difference = float(a.norm()), float((a - b).norm())
    if difference <= limit:
        return None
    ratio = float(a @ b) / size**2 if size else float("nan")
    is_multiple = size and float((b - ratio * a).norm()) <= 50 * limit / size * float(b.norm())
    return _Apart(ratio if is_multiple else float("nan"), min(1.0, difference / max(size, 1e-30)))


def _are_apart(kind: str, names: Iterable[str], several: list[Step]) -> bool:
    """Return whether tensors differ from rank to rank."""
    for name in names:
        there = [getattr(each, kind)[name] for each in several if name in getattr(each, kind)]
        if any(_apart(there[0], each, _relative(each, 1) * _norm(there[0])) for each in there[1:]):
            return True
    return False


def _apart_in_numbers(
    one: Sequence[float], other: Sequence[float], tolerance: float, rank: int, digits: Sequence[float] = ()
) -> tuple[str, float] | None:
    """Return in words the first number that differs, and its size; ``None`` where all are alike.

    Args:
        one: numbers of one process.
        other: those of a rank.
        tolerance: by which share they may differ.
        rank: its number.
        digits: what one more in the last digit that is printed of each is; those with 1, integers, are exact.
    """
    if len(one) != len(other):
        return f"{len(other)} numbers on rank {rank}, {len(one)} in one process", 1.0
    for mine, theirs, digit in zip(one, other, digits or [0.0] * len(one), strict=True):
        difference, larger = abs(mine - theirs), max(abs(mine), abs(theirs))
        share = 0.0 if digit == 1.0 else tolerance
        if mine == theirs or (mine != mine and theirs != theirs) or difference <= share * max(larger, 1e-6):
            continue
        ratio = f", {theirs / mine:.3f} times" if mine else ""
        size = min(1.0, max(0.0, difference - 1.01 * digit) / max(larger, _SHARE))
        return f"{theirs:.6g} on rank {rank}, {mine:.6g} in one process{ratio}", size
    return None


def _common_ratio(differ: _Differing) -> float | None:
    ratios = [apart.ratio for each in differ.values() for apart in each.values()]
    return ratios[0] if all(abs(ratio - ratios[0]) <= 1e-3 * abs(ratios[0]) for ratio in ratios) else None


def _size(differ: _Differing) -> float:
    return max(apart.share for each in differ.values() for apart in each.values())


def _distance(one: Step, other: Step) -> float:
    pairs = [(each, other.begun[name]) for name, each in one.begun.items() if name in other.begun]
    return sum(float((a.values - b.values).norm()) for a, b in pairs if a.shape == b.shape)


def _tolerance(number: int, weights: Iterable[Sketch]) -> float:
    """Return by which share numbers may differ: in float64 by less, also where some are computed in float32."""
    epsilon = max((each.epsilon for each in weights), default=1.0)
    return (1e-3 if epsilon > 1e-9 else 1e-5) * math.sqrt(number + 1)


def _relative(tensor: Sketch, number: int) -> float:
    return max(_EPSILONS * tensor.epsilon, _LEAST) * (number + 1) if tensor.epsilon else 0.0


def _norm(tensor: Sketch) -> float:
    return float(tensor.values.norm())


def _names(differ: list[str], everything: Iterable[str]) -> str:
    """Return names of tensors, in short: all, those of one part of the model, or the first of them."""
    if {*differ} == {*everything}:
        return "all parameters" if len(differ) > 1 else differ[0]
    top = differ[0].partition(".")[0]
    if len(differ) > 1 and {*differ} == {name for name in everything if name.partition(".")[0] == top}:
        return f"only {top}.*"
    return f"only {', '.join(differ[:3])}{' and others' if len(differ) > 3 else ''}"
