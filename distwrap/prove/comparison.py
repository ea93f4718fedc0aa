"""The first difference between a world of one process and a world of several ranks, and what may be its cause."""

from __future__ import annotations

import linecache
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from distwrap.places import place
from distwrap.prove.catalogue import BY_NAME, CATALOGUE, is_ignored
from distwrap.prove.observer import Seen, Sketch, Step
from distwrap.prove.world import World
from distwrap.wording import first_names, named_ranks

_EPSILONS = 4000.0  # of the type of numbers, by which tensors may differ in the first step
_LEAST = 1e-7  # also in float64, where optimizers divide rounding by small numbers
_SHARE = 1e-3  # of the largest gradient of a step, below which one is as good as zero
# How a last batch differs of which some have more.
_UNEVEN = ("uneven-mean", "samples-twice", "samples-missing", "other-samples")


class _Kind(NamedTuple):
    """One kind of what a step records, and what it is if it differs.

    Attributes:
        name: as in `Step.tensors`.
        counted: what it is called where it is counted; empty for what is not.
        words: for what differs, around the names of tensors.
        mistake: its name in the catalogue.
        share: by which one may differ; by default it follows the type of numbers, and grows with the steps.
        follows: whether it follows from what is compared before: a rank may not hold it, and float64 decides, since
            Adam makes steps of any size from gradients that are zero but for rounding.
    """

    name: str
    counted: str = ""
    words: str = ""
    mistake: str = "weights-apart"
    share: float | None = None
    follows: bool = False


_BEGUN = _Kind("begun", "", "the weights of {}, before")
_AFTER_BACKWARD = _Kind("after_backward")
_GRADIENTS = _Kind("gradients", "gradients")
_OF_STEP = (
    _Kind("options", "learning rates and options", "the optimizer's options, {}", "learning-rate", 1e-5),
    _BEGUN,
    _GRADIENTS,
    _Kind("changes", "weights", "what the step changes in {}", share=1e-2, follows=True),
    _Kind("buffers", "buffers", "the buffers {}"),
    _Kind("state", "optimizer state", "the optimizer's state of {}", follows=True),
)
_RETURNED = _Kind("returned", "returned numbers", "what the function returned", "number-of-a-part")
_OF_OUTPUT = (_RETURNED, _Kind("printed", "printed numbers", "what was printed", "number-of-a-part"))


@dataclass
class Comparison:
    """Two worlds, compared, and the first difference.

    Attributes:
        ranks: of the second.
        resumed: number of ranks of the world that the second has gone on from; 0 where there is none.
        mistake: name of the difference in the catalogue; empty where all is equal.
        step: the optimizer's step that differs, from 1; 0 where it is in none.
        place: the line of the user's.
        what: the tensor or number.
        how: in words.
        size: as a share of what differs, but for one more in the last printed digit; 1 where it has none.
        is_ignored: whether a comment on the line says so.
        is_refused: whether the second has failed before any step.
        is_comparable: whether the ranks have trained on the data of one process.
        steps: how many steps were compared.
        compared: how many of each kind.
        notes: what differs and is no mistake, and what was not seen.
    """

    ranks: int
    resumed: int = 0
    mistake: str = ""
    step: int = 0
    place: str = ""
    what: str = ""
    how: str = ""
    size: float = 1.0
    is_ignored: bool = False
    is_refused: bool = False
    is_comparable: bool = True
    steps: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The number of ranks, in words."""
        return f"{self.resumed} and then {self.ranks} ranks" if self.resumed else f"{self.ranks} ranks"

    def differs(
        self, mistake: str, what: str, how: str = "", step: int = 0, place: str = "", size: float = 1.0
    ) -> bool:
        """Write down the difference, after which nothing is compared: return that it is over."""
        self.mistake, self.what, self.how, self.step, self.place, self.size = mistake, what, how, step, place, size
        return True

    def ends(self, note: str) -> bool:
        """Write down why nothing can be compared from here on: return that it is over."""
        self.notes.append(note)
        return True


class _Apart(NamedTuple):
    """How a tensor of a rank differs.

    Attributes:
        name: its own.
        rank: the rank.
        ratio: to one process's, NaN where it is no multiple.
        share: by which it differs.
        numbers: both, where it is a single number.
    """

    name: str
    rank: int
    ratio: float
    share: float
    numbers: str = ""


def compare(one: World, several: World, resumed: int = 0) -> Comparison:
    """Compare a world of several ranks with that of one process.

    Args:
        one: of one process, which was not interrupted.
        several: of several ranks.
        resumed: number of ranks of the world from whose checkpoint these go on; 0 where they begin anew.
    """
    found = Comparison(several.ranks, resumed)
    _compare(one, several, found)
    if resumed and found.mistake not in ("", "failed"):
        found.mistake, found.size = "state-lost", 0.0
    file, _, line = found.place.rpartition(":")
    if file:
        linecache.checkcache(file)
        found.is_ignored = is_ignored(linecache.getline(file, int(line)), BY_NAME[found.mistake].id)
        found.place = place(file, int(line))
    if found.is_ignored and found.step:
        found.notes.append(f"after what is ignored in step {found.step} nothing was compared")
    return found


def _compare(one: World, several: World, found: Comparison) -> bool:
    ranks = [several.seen.get(rank, Seen()) for rank in range(several.ranks)]
    alone, start = one.seen.get(0, Seen()), 0
    alone.statistics &= any(seen.statistics for seen in ranks)  # else each rank's are those of all batches
    if found.resumed:
        begun = [seen.steps[0] for seen in ranks if seen.steps]
        start = min(
            range(len(begun and alone.steps)), key=lambda step: _distance(begun[0], alone.steps[step]), default=0
        )
        found.is_comparable = start > 0
        if begun and _differing(_BEGUN, alone.steps[start], begun, start):
            return found.differs("state-lost", "the weights, which one process has in no step")
        if not start:
            return found.ends(f"{found.name} did not go on from a step: did the loop save, and resume?")
    for number, step in enumerate(alone.steps[start:], start):
        theirs = [seen.steps[number - start] for seen in ranks if number - start < len(seen.steps)]
        if len(theirs) < len(ranks) or (several.error and not all(each.tensors["changes"] for each in theirs)):
            break
        if _of_step(number + 1, step, theirs, found, alone):
            return True
        found.steps += 1
    counts = [len(seen.steps) for seen in ranks]
    if several.error:
        if not any(counts):
            found.is_refused = True
            found.notes.append(f"{found.name} fail before their first step: {several.error.splitlines()[-1]}")
        named = [each.name for each in CATALOGUE if f"({each.id})" in several.error]
        return found.differs((*named, "failed")[0], "an error", several.error, found.steps + 1)
    if found.resumed:
        goes_on = one.has_ended and max(counts) > len(alone.steps) - start
        return goes_on and found.differs("state-lost", "steps, which go on past the end of one process")
    if {*counts} != {len(alone.steps)}:
        made = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        place = alone.steps[0].place if alone.steps else ""
        return found.differs("steps", "steps", f"{len(alone.steps)} in one process, {made}", place=place)
    return _of_output(alone, ranks, found)


def _of_step(number: int, one: Step, several: list[Step], found: Comparison, alone: Seen) -> bool:
    """Compare a step, and return whether it differs, or nothing can be compared from here on."""
    for kind in _OF_STEP:
        if kind is _GRADIENTS:
            if _of_gradients(number, one, several, found, alone):
                return True
        elif _of_kind(kind, number, one, several, found):
            return True
    if alone.statistics:
        found.notes.append("running statistics of BatchNorm are those of a rank's part")
    loss = sum(sum(each.losses) for each in several) / len(several)
    found.compared["losses"] += bool(one.losses) and math.isclose(sum(one.losses), loss, rel_tol=1e-2)
    return False


def _of_kind(kind: _Kind, number: int, one: Step, several: list[Step], found: Comparison) -> bool:
    """Compare tensors of a kind, and return whether some differ; else they are counted."""
    differ, names = _differing(kind, one, several, number), one.tensors[kind.name]
    if not differ:
        found.compared[kind.counted] += len(names) if kind.counted else 0
        return False
    wrong, ratio, size = {each.rank for each in differ}, _common_ratio(differ), max(each.share for each in differ)
    how = differ[0].numbers or ("on all ranks" if len(wrong) == len(several) else f"on {named_ranks(wrong)}")
    how += f", {ratio:.3f} times" if ratio is not None else ""
    what, line = kind.words.format(_names(differ, names)), differ[0].name.rpartition("#")[0]
    place = line if kind in _OF_OUTPUT else several[0].place
    return found.differs(kind.mistake, what, how, number, place, 0.0 if kind.follows else size)


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


def _of_gradients(number: int, one: Step, several: list[Step], found: Comparison, alone: Seen) -> bool:
    """Compare gradients after the backward and in the step, and find a cause, as `_of_step` does."""
    samples = _of_samples(one, several, found, alone)
    at_step, before = (_differing(kind, one, several, number) for kind in (_GRADIENTS, _AFTER_BACKWARD))
    before = [each for each in before if each.name in one.tensors["gradients"]]  # which are those of this optimizer
    by_hand = _are_apart(_AFTER_BACKWARD, before, several)  # an exchange by hand comes after the backward
    if not at_step and (by_hand or not before):
        found.compared["gradients"] += len(one.tensors["gradients"])
        return False
    differ = at_step if by_hand or not before else before
    draws = 2 * sum(each.draws for each in alone.steps) >= len(alone.steps)
    if (samples == "unknown" or draws) and _common_ratio(at_step or before) is None:
        found.is_comparable = False
        words = "the ranks train on data, or draw random numbers, that one process never sees: from there on nothing"
        return found.ends(f"in step {number} {words} can be compared")
    ratio, own = _common_ratio(differ), [sum(each.losses) for each in several]
    is_apart = len(set(own)) > 1 and _are_apart(_GRADIENTS, at_step, several)
    causes = (
        ("not-exchanged", is_apart, f"each rank has its own (loss {', '.join(f'{each:.4g}' for each in own)})"),
        ("gradients-changed", not before, "they were alike after the backward, and are not in the step"),
        ("multiplied-by-ranks", math.isclose(ratio or 0.0, len(several), rel_tol=0.01), ""),
        ("divided-by-ranks", math.isclose((ratio or 0.0) * len(several), 1.0, rel_tol=0.01), ""),
        (samples, samples in BY_NAME, "they are of other samples"),
        ("batch-statistics", alone.statistics, "the ranks' parts of a batch are normalized apart"),
        ("uneven-mean", True, "they are no multiple of those of one process"),
    )
    mistake, how = next((name, words) for name, holds, words in causes if holds)
    size, whole = (max(sum(step.samples.values()) for step in steps) for steps in ([one], alone.steps))
    if mistake in _UNEVEN and size < whole and size % len({each.share for each in several}):
        return found.ends(f"a last batch of {size} samples has uneven parts, from where nothing was compared")
    if ratio is not None and not is_apart:
        how = f"{ratio:.3f} times those of one process"
    what, place = (
        f"the gradients of {_names(differ, one.tensors['gradients'])}",
        several[0].backward or several[0].place,
    )
    return found.differs(mistake, what, how, number, place, max(each.share for each in differ))


def _of_output(alone: Seen, ranks: list[Seen], found: Comparison) -> bool:
    """Compare what was returned, and what the first rank has printed that prints."""
    for kind in _OF_OUTPUT:
        one, everywhere = alone.output.tensors[kind.name], [each.output.tensors[kind.name] for each in ranks]
        rank, theirs = next(((rank, each) for rank, each in enumerate(everywhere) if each), (0, one))
        if one and one.keys() != theirs.keys() and kind is _RETURNED:
            return found.differs(kind.mistake, kind.words, "it has other numbers than that of one process")
        if one and one.keys() != theirs.keys():
            return found.ends("the ranks print other lines than one process, which were not compared")
        for name, each in one.items() if kind is not _RETURNED else ():  # a loop may print its number of ranks
            if (each.digit, each.norm, theirs[name].norm) == (1.0, 1.0, len(ranks)):
                theirs[name] = each
        several = [*[Step()] * rank, ranks[rank].output]
        if several[-1].tensors[kind.name] and _of_kind(kind, math.isqrt(found.steps), alone.output, several, found):
            return found.differs(kind.mistake, found.what, found.how, 0, found.place, found.size)
    return False


def _differing(kind: _Kind, one: Step, several: list[Step], number: int) -> list[_Apart]:
    """Return the tensors of a kind that differ on some ranks."""
    mine, theirs, found = one.tensors[kind.name], [each.tensors[kind.name] for each in several], list[_Apart]()
    least = 1e-6 if kind in _OF_OUTPUT else _SHARE * max((each.norm for each in mine.values()), default=0.0)
    for name, tensor in mine.items():
        there = {rank: each[name] for rank, each in enumerate(theirs) if name in each}
        if kind.follows:
            there = {rank: each for rank, each in there.items() if each.shape == tensor.shape}
        elif not there and tensor.norm > least:
            there = {0: tensor._replace(values=torch.zeros_like(tensor.values))}
        by_type = max(_EPSILONS * tensor.epsilon, _LEAST) * (number + 1) if tensor.epsilon else 0.0
        limit = (kind.share or by_type) * max(tensor.norm, least) + tensor.rounding
        found += filter(None, (_apart(name, rank, tensor, each, limit) for rank, each in there.items()))
    return found


def _apart(name: str, rank: int, one: Sketch, other: Sketch, limit: float) -> _Apart | None:
    """Return how a tensor of a rank differs; ``None`` where it is within the limit."""
    if one.shape != other.shape:
        return _Apart(name, rank, math.nan, 1.0)
    a, b, size = one.values, other.values, one.norm
    difference = float((a - b).norm())
    if difference <= limit:
        return None
    ratio = float(a @ b) / size**2 if size else math.nan
    is_multiple = size and float((b - ratio * a).norm()) <= 50 * limit / size * other.norm
    share = max(0.0, difference - 1.01 * one.digit) / max(size, _SHARE if one.digit else 1e-30)
    numbers = f"{float(b):.6g} on rank {rank}, {float(a):.6g} in one process" if len(a) == 1 else ""
    return _Apart(name, rank, ratio if is_multiple else math.nan, min(1.0, share), numbers)


def _are_apart(kind: _Kind, differ: list[_Apart], several: list[Step]) -> bool:
    """Return whether tensors differ from rank to rank."""
    first = Step()
    for step in reversed(several):
        first.tensors[kind.name] |= step.tensors[kind.name]
    return not {each.name for each in differ}.isdisjoint(each.name for each in _differing(kind, first, several, 1))


def _common_ratio(differ: list[_Apart]) -> float | None:
    first = differ[0].ratio
    return first if all(abs(each.ratio - first) <= 1e-3 * abs(first) for each in differ) else None


def _distance(one: Step, other: Step) -> float:
    pairs = [(each, other.tensors["begun"].get(name)) for name, each in one.tensors["begun"].items()]
    return sum(float((a.values - b.values).norm()) for a, b in pairs if b and a.shape == b.shape)


def _names(differ: list[_Apart], everything: Iterable[str]) -> str:
    """Return names of tensors, in short: all, those of one part of the model, or the first of them."""
    names = list(dict.fromkeys(each.name for each in differ))
    if {*names} == {*everything}:
        return "all parameters" if len(names) > 1 else names[0]
    top = names[0].partition(".")[0]
    if len(names) > 1 and {*names} == {name for name in everything if name.partition(".")[0] == top}:
        return f"only {top}.*"
    return f"only {first_names(names)}"
