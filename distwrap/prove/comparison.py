"""The first difference between a world of one process and a world of several ranks, and what may be its cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distwrap.prove.catalogue import BY_NAME, CATALOGUE, is_ignored
from distwrap.prove.observer import Seen, Step
from distwrap.prove.world import World
from distwrap.wording import named_ranks

_EPSILONS = 4000.0  # of the type of numbers, by which tensors may differ in the first step
_LEAST = 1e-7  # also in float64, where optimizers divide rounding by small numbers
_SMALL = 1e-2  # of what a step changes, by which that may differ
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
        ratio: to one process, where it is one number for all of them.
        size: of the difference of tensors, as a share of the larger one; 1 where it is of no tensors.
        is_ignored: whether a comment on the line says so.
    """

    mistake: str = ""
    step: int = 0
    place: str = ""
    what: str = ""
    how: str = ""
    ratio: float | None = None
    size: float = 1.0
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


def compare(one: World, several: World, resumed: int = 0) -> Comparison:
    """Compare a world of several ranks with that of one process.

    Args:
        one: of one process, which was not interrupted.
        several: of several ranks.
        resumed: number of ranks of the world from whose checkpoint these go on; 0 where they begin anew.
    """
    found = Comparison(several.size.ranks, resumed=resumed)
    _compare(one, several, found)
    difference = found.difference
    if resumed and difference.mistake not in ("", "failed"):
        difference.mistake, difference.size = "state-lost", 0.0
    comments = {
        place: line for seen in (*one.seen.values(), *several.seen.values()) for place, line in seen.comments.items()
    }
    known = BY_NAME.get(difference.mistake)
    difference.is_ignored = known is not None and is_ignored(comments.get(difference.place, ""), known.id)
    if difference.is_ignored and difference.step:
        found.notes.append(f"after what is ignored in step {difference.step} nothing was compared")
    return found


def _compare(one: World, several: World, found: Comparison) -> None:
    ranks = [several.seen.get(rank, Seen()) for rank in range(several.size.ranks)]
    alone, start = one.seen.get(0, Seen()), 0
    if found.resumed:
        begun = [seen.steps[0].begun for seen in ranks if seen.steps]
        starts = [step for step, each in enumerate(alone.steps) if begun and not _of_tensors(begun, each.begun, step)]
        start = min(starts, key=lambda step: _distance(begun[0], alone.steps[step].begun), default=0)
        found.is_comparable = start > 0
        if begun and not starts:
            found.difference = Difference("state-lost", what="the weights, which one process has in no step")
            return
        if not start:
            found.notes.append(f"{found.name} did not go on from a step: did the loop save, and resume?")
            return
    for number, step in enumerate(alone.steps[start:], start):
        theirs = [seen.steps[number - start] for seen in ranks if number - start < len(seen.steps)]
        if len(theirs) < len(ranks) or (several.error and not all(each.weights for each in theirs)):
            break
        found.difference = _of_step(number + 1, step, theirs, found, alone)
        size = sum(step.samples.values())
        is_short = size % len(ranks) and size < max(sum(each.samples.values()) for each in alone.steps)
        if is_short and found.difference.mistake == "uneven-mean":
            found.notes.append(f"a last batch of {size} samples has uneven parts, from where nothing was compared")
            found.difference = Difference()
            return
        if found.difference.mistake:
            return
        if not found.is_comparable:
            found.notes.append(
                f"in step {number + 1} the ranks train on data, or draw random numbers, that one process never sees: "
                "from there on nothing can be compared"
            )
            return
        found.steps += 1
    counts = {len(seen.steps) for seen in ranks} | {len(alone.steps)}
    if several.error:
        named = [each.name for each in CATALOGUE if f"({each.id})" in several.error]
        found.difference = Difference((*named, "failed")[0], found.steps + 1, how=several.error)
    elif found.resumed:
        if alone.has_ended and any(len(seen.steps) > len(alone.steps) - start for seen in ranks):
            found.difference = Difference("state-lost", what="steps, which go on past the end of one process")
    elif len(counts) > 1:
        made = ", ".join(f"{len(seen.steps)} on rank {rank}" for rank, seen in enumerate(ranks))
        place = alone.steps[0].place if alone.steps else ""
        found.difference = Difference("steps", 0, place, "steps", f"{len(alone.steps)} in one process, {made}")
    else:
        found.difference = _of_numbers(alone, ranks, found)


def _of_step(number: int, one: Step, several: list[Step], found: Comparison, alone: Seen) -> Difference:
    place = several[0].place
    for rank, step in enumerate(several):
        for name, mine in one.options.items():
            if not _are_the_same(theirs := step.options.get(name, []), mine):
                what = "the learning rate" if name == "lr" else f"the optimizer's {name}"
                return Difference(
                    "learning-rate", number, place, what, f"{theirs} on rank {rank}, {mine} in one process"
                )
    found.compared["learning rates"] += len(one.options.get("lr", []))
    samples = _of_samples(one, several, found, alone)
    if apart := _of_weights(number, place, [each.begun for each in several], one.begun, ", before"):
        return apart
    at_step = _of_tensors([each.gradients for each in several], one.gradients, number)
    before = _of_tensors([each.after_backward for each in several], one.after_backward, number)
    by_hand = any(_are_apart([each.after_backward.get(name) for each in several]) for name in before)
    if at_step or (before and not by_hand):  # an exchange by hand comes after the backward
        draws = 2 * sum(each.draws for each in alone.steps) >= len(alone.steps)
        if (samples == "unknown" or draws) and _common_ratio(at_step or before) is None:
            found.is_comparable = False
            return Difference()
        differ = at_step if by_hand or not before else before
        ratio = _common_ratio(differ)
        mistake, how = _cause(before, at_step, samples, ratio, several, alone)
        what = f"the gradients of {_names(list(differ), one.gradients)}"
        those = [each.gradients if differ is at_step else each.after_backward for each in several]
        size = _size(those, one.gradients if differ is at_step else one.after_backward, differ)
        return Difference(mistake, number, several[0].backward or place, what, how, ratio, size)
    found.compared["gradients"] += len(one.gradients)
    # Adam makes steps of any size from gradients that are zero but for rounding: float64 decides.
    if apart := _of_weights(number, place, [each.weights for each in several], one.weights, size=0.0):
        return apart
    if changed := [name for name in one.weights if not all(_changes_alike(name, one, each) for each in several)]:
        what = f"what the step changes in {_names(changed, one.weights)}"
        return Difference("weights-apart", number, place, what, size=0.0)
    found.compared["weights"] += len(one.weights)
    if buffers := _of_tensors([each.buffers for each in several], one.buffers, number):
        return Difference("weights-apart", number, place, f"the buffers {_names(list(buffers), one.buffers)}")
    if alone.statistics:
        found.notes.append("running statistics of BatchNorm are those of a rank's part")
    found.compared["buffers"] += len(one.buffers)
    for name, sums in one.state.items():
        states = [each.state[name] for each in several if each.state.get(name)]
        wrong = [each for each in states if len(each) == len(sums) and not _near(each, sums, number)]
        if wrong:
            what = f"the optimizer's state of {name}"
            return Difference("weights-apart", number, place, what, f"{wrong[0]}, {sums}", size=0.0)
    found.compared["optimizer state"] += len(one.state)
    losses = [sum(each.losses) for each in several]
    if losses and one.losses and _near([sum(losses) / len(losses)], [sum(one.losses)], number):
        found.compared["losses"] += 1
    return Difference()


def _of_weights(
    number: int, place: str, several: list[dict[str, Tensor]], one: dict[str, Tensor], when: str = "", size: float = 1.0
) -> Difference | None:
    differ = list(_of_tensors(several, one, number))
    if not differ:
        return None
    how = _ranks_that_differ(several, one, differ[0], number)
    return Difference("weights-apart", number, place, f"the weights of {_names(differ, one)}{when}", how, size=size)


def _changes_alike(name: str, one: Step, other: Step) -> bool:
    """Return whether a step has changed a weight alike, which is too little to be seen in the weight itself."""
    if name not in one.begun or name not in other.begun or other.weights[name].shape != one.weights[name].shape:
        return True
    mine, theirs = (each.weights[name].double() - each.begun[name].double() for each in (one, other))
    kind = one.weights[name].dtype
    rounding = 16 * torch.finfo(kind if kind.is_floating_point else torch.float32).eps
    limit = _SMALL * float(mine.norm()) + rounding * float(one.weights[name].double().norm())
    return float((mine - theirs).norm()) <= limit


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    pairs = [(one[name].double(), other[name].double()) for name in one.keys() & other.keys()]
    return sum(float((a - b).norm()) for a, b in pairs if a.shape == b.shape)


def _of_samples(one: Step, several: list[Step], found: Comparison, alone: Seen) -> str:
    """Return how the samples of a step differ: the name of a mistake, "unknown" where they cannot be told, or ""."""
    together: Counter[int] = sum((each.samples for each in several), Counter())
    if together == one.samples:
        found.compared["samples"] += sum(together.values())
        return ""
    owners = Counter(digest for step in several for digest in step.samples)
    if any(owners[digest] > 1 and together[digest] > one.samples.get(digest, 0) for digest in owners):
        return "samples-twice"
    known = {digest for step in alone.steps for digest in step.samples}
    if not together.keys() <= known:
        return "unknown"
    return "samples-missing" if not together - one.samples else "other-samples"


def _of_tensors(several: list[dict[str, Tensor]], one: dict[str, Tensor], step: int) -> dict[str, list[float]]:
    """Return the tensors that differ, each with its ratio to one process on each rank; NaN where it is no number."""
    scale = max((float(each.double().norm()) for each in one.values()), default=0.0)
    differ: dict[str, list[float]] = {}
    for name, mine in one.items():
        theirs = [each[name] for each in several if name in each]
        ratios = [_ratio(mine, each, scale, step) for each in theirs]
        if not theirs and float(mine.double().norm()) > _SHARE * scale:
            ratios = [0.0]
        if any(ratio != 1.0 for ratio in ratios):
            differ[name] = ratios
    return differ


def _ratio(one: Tensor, other: Tensor, scale: float, step: int) -> float:
    """Return by which number a tensor is another's multiple: 1 where they are equal, NaN where there is none."""
    if one.shape != other.shape:
        return float("nan")
    a, b = one.double().flatten(), other.double().flatten()
    epsilon = torch.finfo(one.dtype if one.is_floating_point() else torch.float32).eps
    tolerance = max(_EPSILONS * epsilon, _LEAST) * (step + 1)
    size = float(a.norm())
    if float((a - b).norm()) <= tolerance * max(size, _SHARE * scale):
        return 1.0
    ratio = float(a @ b) / size**2 if size else float("nan")
    return ratio if size and float((b - ratio * a).norm()) <= 50 * tolerance * float(b.norm()) else float("nan")


def _size(several: list[dict[str, Tensor]], one: dict[str, Tensor], names: Iterable[str]) -> float:
    """Return the largest difference of some tensors, as a share of them."""
    shares = [
        float((each[name].double() - one[name].double()).norm() / max(float(one[name].double().norm()), 1e-30))
        for each in several
        for name in names
        if name in each and name in one and each[name].shape == one[name].shape
    ]
    return min(1.0, max(shares, default=1.0))


def _common_ratio(differ: Mapping[str, list[float]]) -> float | None:
    ratios = [ratio for each in differ.values() for ratio in each]
    first = ratios[0]
    return first if all(abs(ratio - first) <= 1e-3 * abs(first) for ratio in ratios) else None


def _cause(
    before: dict[str, list[float]],
    at_step: dict[str, list[float]],
    samples: str,
    ratio: float | None,
    several: list[Step],
    alone: Seen,
) -> tuple[str, str]:
    """Return the name of the mistake, and how the gradients differ."""
    size = len(several)
    apart = [name for name in at_step if _are_apart([each.gradients.get(name) for each in several])]
    if apart and len({tuple(step.losses) for step in several}) > 1:
        return (
            "not-exchanged",
            f"each rank has its own (loss {', '.join(f'{sum(each.losses):.4g}' for each in several)})",
        )
    words = "" if ratio is None else f"{ratio:.3f} times those of one process"
    if not before:
        return "gradients-changed", words or "they were alike after the backward, and are not in the step"
    if ratio is not None and abs(ratio - size) < 0.01 * size:
        return "multiplied-by-ranks", words
    if ratio is not None and abs(ratio * size - 1) < 0.01:
        return "divided-by-ranks", words
    if samples in ("samples-twice", "samples-missing", "other-samples"):
        return samples, words or "they are of other samples"
    if alone.statistics:
        return "batch-statistics", words or "the ranks' parts of a batch are normalized apart"
    return "uneven-mean", words or "they are no multiple of those of one process"


def _are_apart(tensors: Iterable[Tensor | None]) -> bool:
    there = [each for each in tensors if each is not None]
    return any(_ratio(there[0], each, 0.0, 1) != 1.0 for each in there[1:])


def _ranks_that_differ(several: list[dict[str, Tensor]], one: dict[str, Tensor], name: str, step: int) -> str:
    wrong = [
        rank for rank, each in enumerate(several) if name in each and _ratio(one[name], each[name], 0.0, step) != 1.0
    ]
    return f"on {named_ranks(wrong)}" if len(wrong) < len(several) else "on all ranks"


def _are_the_same(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(one, other, strict=True))


def _near(one: list[float], other: list[float], step: int) -> bool:
    tolerance = 1e-3 * (step + 1) ** 0.5
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a == b or (a != a and b != b) or abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-6) for a, b in pairs
    )


def _of_numbers(alone: Seen, ranks: list[Seen], found: Comparison) -> Difference:
    """Compare what was printed and returned."""
    if alone.returned is not None and ranks[0].returned is not None:
        if not _near(alone.returned, ranks[0].returned, found.steps):
            how = _numbers(ranks[0].returned, alone.returned, 0)
            return Difference("number-of-a-part", 0, "", "what the function returned", how)
        found.compared["returned numbers"] += len(alone.returned)
    theirs = [(seen.printed, rank) for rank, seen in enumerate(ranks) if seen.printed]
    if theirs and [len(numbers) for *_, numbers in theirs[0][0]] == [len(numbers) for *_, numbers in alone.printed]:
        for (place, mine), (_, printed) in zip(alone.printed, theirs[0][0], strict=True):
            # A loop may print its number of ranks.
            numbers = [b if (a, b) == (len(ranks), 1) else a for a, b in zip(printed, mine, strict=True)]
            if not _near(mine, numbers, found.steps):
                how = _numbers(numbers, mine, theirs[0][1])
                return Difference("number-of-a-part", 0, place, "what was printed", how)
        found.compared["printed numbers"] += sum(len(numbers) for *_, numbers in alone.printed)
    elif theirs and alone.printed:
        found.notes.append("the ranks print other lines than one process, which were not compared")
    return Difference()


def _numbers(several: list[float], one: list[float], rank: int) -> str:
    """Return in words how numbers differ, by the first that does."""
    for theirs, mine in zip(several, one, strict=False):
        if not _near([mine], [theirs], 0):
            ratio = f", {theirs / mine:.3f} times" if mine else ""
            return f"{theirs:.6g} on rank {rank}, {mine:.6g} in one process{ratio}"
    return f"{len(several)} numbers on rank {rank}, {len(one)} in one process"


def _names(differ: list[str], everything: Mapping[str, Tensor]) -> str:
    """Return names of tensors, in short: all, those of one part of the model, or the first of them."""
    if set(differ) == set(everything):
        return "all parameters" if len(differ) > 1 else differ[0]
    tops = {name.partition(".")[0] for name in differ}
    if (
        len(tops) == 1
        and all(name in differ for name in everything if name.partition(".")[0] in tops)
        and len(differ) > 1
    ):
        return f"only {next(iter(tops))}.*"
    return f"only {', '.join(differ[:3])}{' and others' if len(differ) > 3 else ''}"
