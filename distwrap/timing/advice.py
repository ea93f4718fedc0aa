"""Advice on a run from what was measured: with the figure on which each piece rests, and what it brings at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distwrap.stopwatch import Part
from distwrap.timing.analysis import Analysis, Lag
from distwrap.wording import as_size, named_ranks

_WORTH_CHANGING = 0.05  # of a step
_MUCH_EXCHANGE = 0.1  # of a step: less, and another way to train is no gain
_SMALL = 1_000_000  # bytes of gradients, for which no algorithm of exchange is faster
_MOST_WORKERS = 8
_MOSTLY = 0.5  # of the time by which ranks are late
_WITHOUT_REASON = 0.15  # of a step: processes that do the same differ by up to 10 % by where their memory lies

_OF_LATE_PART = {
    Part.EVALUATION: "Let every rank evaluate its share: shard_loader(loader) there too, then gather or mean.",
    Part.CHECKPOINT: "save(..., background=True) writes in a thread.",
    Part.OWN: "Look for what the loop does on one rank alone, as under `if is_rank_zero()`.",
}


@dataclass(frozen=True)
class Suggestion:
    """One piece of advice.

    Attributes:
        text: what was seen, and what to do.
        gain: share of a step that it saves at most.
    """

    text: str
    gain: float


def advise(found: Analysis) -> list[Suggestion]:
    """Return advice on what to change, the most worthwhile first; none if all is well."""
    looks = (_on_lags, _on_data, _on_link, _on_queues, _on_checkpoints, _on_own_code)
    pieces = [piece for look in looks for piece in look(found)] if found.step else []
    worth = [piece for piece in pieces if piece.gain >= _WORTH_CHANGING]
    return sorted(worth, key=lambda piece: -piece.gain)


def _on_lags(found: Analysis) -> Iterator[Suggestion]:
    """Advise on ranks for which the others wait; not on a short wait for which no reason is seen."""
    for lag in found.lags:
        why = _OF_LATE_PART.get(lag.part) or " ".join(_reasons(found, lag))
        # Evaluation that is shared takes its part of the time on every rank.
        gain = lag.share * (1 - 1 / len(found.ranks)) if lag.part is Part.EVALUATION else lag.share
        if why or lag.share >= _WITHOUT_REASON:
            who = "the last rank, another one at each step" if lag.takes_turns else named_ranks(lag.ranks)
            seen = (
                f"the others wait {_percent(lag.share)} of each step for {who}: {lag.part.name.lower()} takes "
                f"{_ms(lag.usual + lag.slower)} there, and {_ms(lag.usual)} elsewhere."
            )
            yield Suggestion(f"{seen} {why}".rstrip(), gain)


def _reasons(found: Analysis, lag: Lag) -> Iterator[str]:
    """Yield what may make late ranks late, of what was measured."""
    late = [rank for rank in found.ranks if rank.rank in lag.ranks]
    if lag.part is Part.DATA:
        has_workers = any(rank.workers for rank in late)
        yield "More workers, or a larger prefetch_factor, even it out." if has_workers else _add_workers(found)
    queued = sum(rank.queued or 0.0 for rank in late) / len(late)
    if queued > _MOSTLY * lag.slower:
        yield f"It waits {_ms(queued)} of a step for a free CPU: find out what else runs there."
    others = [rank.cpus for rank in found.ranks if rank not in late]
    if others and late[0].cpus < min(others):
        yield f"It may run on {late[0].cpus} CPU(s), and the others on {min(others)}."


def _on_data(found: Analysis) -> Iterator[Suggestion]:
    share, workers = _least(found, Part.DATA), max(rank.workers or 0 for rank in found.ranks)
    how = f"which reads in the loop itself. {_add_workers(found)}"
    if workers:
        how = (
            f"with {workers} worker(s), and {_cpus_of_rank(found)} CPU(s) for each rank. Take more workers where there "
            "are CPUs, or a larger prefetch_factor, or make each sample less work."
        )
    yield Suggestion(f"every rank waits {_percent(share)} of each step for its loader, {how}", share)


def _on_link(found: Analysis) -> Iterator[Suggestion]:
    """Advise on the exchange itself, for which even the last rank waits."""
    share, size = found.link / found.step, max(rank.gradient_bytes for rank in found.ranks)
    if share < _MUCH_EXCHANGE:
        return
    what, way = "the exchange", "A larger batch needs fewer exchanges for as many samples"
    if found.ranks[0].is_ddp:
        what = f"the exchange of {as_size(size)} of gradients, beyond what the backward hides"
        way = f"accumulate(loader, 4) exchanges a quarter as often ({_percent(share * 3 / 4)} of a step less)"
        if size > _SMALL:
            model = f"--weights {size / 4:.2g} --step-ms {1e3 * found.alone:.1f}"
            way += f"; `python -m distwrap doctor --comm {model}` measures what each algorithm of comm= saves"
    yield Suggestion(f"{_percent(share)} of each step goes to {what}. {way}.", share)


def _on_queues(found: Analysis) -> Iterator[Suggestion]:
    """Advise on threads that wait for a CPU on every rank."""
    share = min(rank.queued or 0.0 for rank in found.ranks) / found.step
    first = found.ranks[0]
    yield Suggestion(
        f"every rank waits {_percent(share)} of each step for a free CPU. Rank 0 computes with {first.threads} "
        f"thread(s), reads with {first.workers or 0} worker(s) and may run on {first.cpus} CPU(s), as may the "
        "other ranks of its node. Run fewer threads, workers, ranks or programs on them.",
        share,
    )


def _on_checkpoints(found: Analysis) -> Iterator[Suggestion]:
    share = _least(found, Part.CHECKPOINT)
    yield Suggestion(
        f"{_percent(share)} of the time goes to checkpoints, for which all ranks wait. save(..., background=True) "
        "copies the state, and writes it in a thread.",
        share,
    )


def _on_own_code(found: Analysis) -> Iterator[Suggestion]:
    usual, way = _least(found, Part.OWN), "Metrics, prints and `.item()` once in many steps cost less."
    if not any(rank.mean()[Part.FORWARD] for rank in found.ranks):
        way = "The forward is part of it, as for any model that was not wrapped by wrap_model()."
    if usual > 2 * _WORTH_CHANGING:
        yield Suggestion(
            f"{_percent(usual)} of each step is the loop's own code, beside data, forward, backward and the "
            f"optimizer. {way}",
            usual,
        )


def _least(found: Analysis, part: Part) -> float:
    """Return the share of a step that a part takes on the rank where it takes least."""
    return min(rank.mean()[part] for rank in found.ranks) / found.step


def _cpus_of_rank(found: Analysis) -> int:
    """Return how many CPUs a rank has where all ranks of its node share them."""
    first = found.ranks[0]
    return first.cpus // sum(rank.host == first.host for rank in found.ranks)


def _add_workers(found: Analysis) -> str:
    """Advise as many workers as a rank has CPUs, but at least two, since workers mostly wait for the disk."""
    workers = min(_MOST_WORKERS, max(2, _cpus_of_rank(found)))
    return f"DataLoader(..., num_workers={workers}, persistent_workers=True) reads ahead in processes of its own."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
