"""How long a test waits for what should come at once, and which cases of a test are slow."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

# A guard against an end by some other, longer limit (of a collective, a sleep, a grace), and no measure of speed: what
# a test holds to it takes a second or two on an idle machine, and must pass on one whose cores are busy.
SOON = 60.0

INTERPRETERS = "starts interpreters, each of which imports torch"
MORE_RANKS = "the same again on more ranks than there are cores"


def heart_and_rest(name: str, value: Any, asked: set[str], heart: Collection[str], why: str, rest: str) -> list[Any]:
    """Return a case of a test as its heart, for `make test`, and the rest, which is slow.

    Args:
        name: of the case.
        value: what it is of.
        asked: all that is asked of it.
        heart: what `make test` asks.
        why: all of it is slow, if it is.
        rest: why the rest is.
    """
    if why:
        return [pytest.param(value, asked, marks=pytest.mark.slow(why), id=name)]
    heart = asked.intersection(heart)
    return [
        pytest.param(value, heart, id=f"{name}, the heart"),
        pytest.param(value, asked - heart, marks=pytest.mark.slow(rest), id=name),
    ]


def slow(*values: Any, why: str) -> Any:
    """Return one case of a parametrised test, which is for `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow(why))
