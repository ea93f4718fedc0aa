"""Locations of ranks in the user's code, in words; without torch, so that `where` starts at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from distwrap.wording import named_ranks

if TYPE_CHECKING:
    from distwrap.supervision.waits import Wait

LEFT = "has left the function"
NO_ANSWER = "does not answer: native code holds the interpreter, or it is gone"


class Location(NamedTuple):
    """Location of a rank in the user's code.

    Attributes:
        what: the function that the user's code has called, as ``all_reduce``; empty if the code itself computes.
        where: the file and line in the user's code.
        step: the number of batches that the innermost loader has given, or ``None``.
        last: the last helper of distwrap that ran, and its place, if any.
        wait: the wait for other ranks in which the rank is, in an answer.
        begun: the number of collectives that the rank has begun, in an answer.
    """

    what: str
    where: str
    step: int | None = None
    last: str = ""
    wait: Wait | None = None
    begun: int = 0

    def __str__(self) -> str:
        place = f"in {self.what} at {self.where}" if self.what else f"at {self.where}"
        return place if self.step is None else f"{place}, step {self.step}"


def seen_at(moment: float, location: Location) -> str:
    """Return in words where a rank was at a time of day."""
    after = f", after {location.last}" if location.last else ""
    return f"; {max(0.0, time.time() - moment):.0f} s ago it was {location}{after}"


def merge(locations: Mapping[int, Location | str]) -> str:
    """Return a list of where all ranks are, with ranks at the same place in one line.

    Args:
        locations: the location of each rank, or words if it gives none.

    Example:
        >>> there = Location("all_reduce", "train.py:88", step=812)
        >>> print(merge({0: there, 1: Location("DataLoader", "train.py:81"), 2: there}))
          ranks 0, 2 in all_reduce at train.py:88, step 812
          rank 1 in DataLoader at train.py:81
    """
    together: dict[str, list[int]] = {}
    for rank, location in sorted(locations.items()):
        together.setdefault(str(location), []).append(rank)
    return "\n".join(
        f"  {named_ranks(members)} {where if len(members) == 1 else of_several(where)}"
        for where, members in together.items()
    )


def of_several(where: str) -> str:
    """Return words about one rank as words about several ranks."""
    verb, _, rest = where.partition(" ")
    plural = {"does": "do", "has": "have"}.get(verb, verb)
    return f"{plural} {rest}"
