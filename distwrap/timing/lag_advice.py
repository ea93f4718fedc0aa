"""Advice on ranks for which the others wait: their numbers, the part in which they are slower, and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from distwrap.stopwatch import Part
from distwrap.timing.analysis import Analysis, Lag
from distwrap.timing.suggestion import Suggestion, add_workers, counted, ms, percent
from distwrap.wording import named_ranks

_ALONE = 4  # times as long as on the others: a part that hardly any other rank has
_MUCH = 0.5  # of the time by which ranks are late
_CLEARLY = 0.1  # slower than others
_WITHOUT_REASON = 0.15  # of a step: processes that do the same differ by up to 10 % by where their memory lies
_UNEVEN = 0.05  # of the mean size of a batch
_PART_IN_WORDS = {  # but the exchange, in which the others wait
    Part.DATA: "waiting for data",
    Part.FORWARD: "the forward",
    Part.BACKWARD: "the backward",
    Part.OPTIMIZER: "the optimizer",
    Part.CHECKPOINT: "checkpoints",
    Part.EVALUATION: "evaluation",
    Part.OWN: "the loop's own code",
}

_LOOK_AT_TURNS = "Find out what takes longer in some steps than in others, and what else runs on these nodes."
_LOOK_AT_RANK = "Find out what else runs on its node, and what only this rank computes."


def on_lags(found: Analysis) -> Iterator[Suggestion]:
    """Yield advice on each lag; none on a short one for which no reason is seen."""
    for lag in found.lags:
        # Evaluation that is shared takes its part of the time on every rank.
        gain = lag.share * (1 - 1 / len(found.ranks)) if lag.part is Part.EVALUATION else lag.share
        why = _why_in_turns if lag.takes_turns else _why_always
        cure = _cure_of_part(lag) or " ".join(why(found, lag))
        if not cure and lag.share >= _WITHOUT_REASON:
            cure = _LOOK_AT_TURNS if lag.takes_turns else _LOOK_AT_RANK
        if cure:
            yield Suggestion(f"{_seen(found, lag)}. {cure}", gain)


def _seen(found: Analysis, lag: Lag) -> str:
    wait = f"{percent(lag.share)} of each step"
    part = _PART_IN_WORDS[lag.part]
    if lag.takes_turns:
        rest = "the others wait" if len(found.ranks) > 2 else "the other waits"
        return (
            f"a different rank is last each time, and {rest} {wait} for it: {part} takes {ms(lag.usual)} on "
            f"average, and {ms(lag.slower)} longer on the rank that is last"
        )
    who = f"{named_ranks(lag.ranks)} on {', '.join(sorted({found.by_number[rank].host for rank in lag.ranks}))}"
    one, others = len(lag.ranks) == 1, len(found.ranks) - len(lag.ranks)
    rest = "the others" if others > 1 else "the other"
    if lag.slower > (_ALONE - 1) * lag.usual:
        how = f"spend{'s' * one} {ms(lag.usual + lag.slower)} a step on {part}, and {rest} {ms(lag.usual)}"
    else:
        how = (
            f"{'is' if one else 'are'} {percent(lag.slower / lag.usual)} slower in {part} "
            f"({ms(lag.usual + lag.slower)} a step)"
        )
    return f"{who} {how}; {rest} wait{'s' * (others == 1)} {wait}"


def _cure_of_part(lag: Lag) -> str:
    """Return advice on a part that no rank needs to do alone; empty for other parts."""
    if lag.part is Part.EVALUATION:
        return "Let every rank evaluate its share: shard_loader(loader) for the evaluation too, and gather or mean."
    if lag.part is Part.CHECKPOINT:
        return "save(..., background=True) writes in a thread."
    return ""


def _why_in_turns(found: Analysis, lag: Lag) -> Iterator[str]:
    """Yield reasons why a different rank is late at each step, and what to do about them."""
    uneven = max(rank.unevenness for rank in found.ranks)
    if lag.part in (Part.FORWARD, Part.BACKWARD) and uneven > _UNEVEN:
        yield (
            f"The batches' sizes differ by {percent(uneven)}. "
            "Let samples of like length come together (sorted within windows), or give each batch as many tokens."
        )
    queued = [rank.queued for rank in found.ranks if rank.queued is not None]
    if queued and (mean := sum(queued) / len(queued)) > _MUCH * lag.slower:
        yield f"Each rank waits {ms(mean)} of a step for a free CPU: other programs use them too."
    elif lag.part is Part.DATA:
        yield f"Some batches take longer to read. {_read_ahead(found, lag)}"


def _why_always(found: Analysis, lag: Lag) -> Iterator[str]:
    """Yield reasons why the same ranks are late at every step, and what to do about them."""
    if lag.part is Part.DATA:
        yield f"Find out where its data come from. {_read_ahead(found, lag)}"
    elif lag.part is Part.OWN:
        yield "Find out what the loop does on that rank alone, as under `if is_rank_zero()`."
    else:
        yield from _why_slow(found, lag)


def _read_ahead(found: Analysis, lag: Lag) -> str:
    if any(found.by_number[rank].settings.workers for rank in lag.ranks):
        return "More workers, or a larger prefetch_factor, even out batches that take long now and then."
    return add_workers(found)


def _why_slow(found: Analysis, lag: Lag) -> Iterator[str]:
    """Yield the differences between a rank that computes more slowly and the others."""
    slow = found.by_number[lag.ranks[0]]
    others = [rank for rank in found.ranks if rank.rank not in lag.ranks]
    mine, theirs = slow.settings, [rank.settings for rank in others]
    if mine.cpus < (cpus := median(each.cpus for each in theirs)):
        yield f"It may run on {counted(mine.cpus, 'CPU')}, and the others on {cpus:.0f}: give it as many."
    if mine.threads < (threads := median(each.threads for each in theirs)):
        yield f"It computes with {counted(mine.threads, 'thread')}, and the others with {threads:.0f}."
    processors = {each.processor for each in theirs}
    if len(processors) == 1 and mine.processor not in processors:
        yield f"It computes on {mine.processor}, and the others on {theirs[0].processor}."
    clocks = [each.clock for each in theirs if each.clock]
    if mine.clock and clocks and mine.clock < (1 - _CLEARLY) * median(clocks):
        yield f"Its CPUs run at {mine.clock:.0f} MHz, and the others' at {median(clocks):.0f}."
    queued = [rank.queued for rank in others if rank.queued is not None]
    if slow.queued is not None and queued and (more := slow.queued - median(queued)) > _MUCH * lag.slower:
        yield (
            f"For {ms(more)} of that it waited for a CPU that was used by other programs, or by its own "
            "threads if it has more of them than CPUs: find out what else runs there."
        )
