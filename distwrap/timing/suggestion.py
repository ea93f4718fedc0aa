"""A piece of advice, and words that advice on one rank and advice on all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from distwrap.timing.analysis import Analysis

_MOST_WORKERS = 8


@dataclass(frozen=True)
class Suggestion:
    """One piece of advice.

    Attributes:
        text: what was seen, and what to do.
        gain: share of a step that it saves at most; ``None`` where nobody has measured that.
    """

    text: str
    gain: float | None


def cpus_of_rank(found: Analysis) -> int:
    """Return how many CPUs a rank has where all ranks of its node share them."""
    first = found.ranks[0]
    return first.settings.cpus // sum(rank.host == first.host for rank in found.ranks)


def add_workers(found: Analysis) -> str:
    """Advise as many workers as a rank has CPUs, but at least two, since workers mostly wait for the disk."""
    workers = min(_MOST_WORKERS, max(2, cpus_of_rank(found)))
    return f"DataLoader(..., num_workers={workers}, persistent_workers=True) reads ahead in processes of its own."


def counted(number: float, what: str) -> str:
    """Put a number of things into words.

    Example:
        >>> counted(1, "CPU"), counted(4, "thread")
        ('1 CPU', '4 threads')
    """
    return f"{number:.0f} {what}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Put a share into words."""
    return f"{100 * share:.0f} %"


def ms(seconds: float) -> str:
    """Put seconds into milliseconds."""
    return f"{1e3 * seconds:.1f} ms"
