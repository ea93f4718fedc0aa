"""Which cases of a test are slow, which are for a row of `make nightly`, and reasons that several of them have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

INTERPRETERS = "starts interpreters, each of which imports torch"
MORE_RANKS = "the same again on more ranks than there are cores"


def slow(*values: Any, why: str) -> Any:
    """Return one case of a parametrised test, which is for `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow(why))


def nightly(*values: Any, row: str, why: str) -> Any:
    """Return one case of a parametrised test, which is for a row of `make nightly` alone."""
    return pytest.param(*values, marks=pytest.mark.nightly(row=row, why=why))


def few(values: Iterable[Any], fast: int, *, why: str = "others of their kind are in `make test`") -> list[Any]:
    """Return the cases of a parametrised test, of which so many, spread over all, are part of `make test`.

    Example:
        >>> [case if isinstance(case, str) else "slow" for case in few("abcde", 2)]
        ['a', 'slow', 'slow', 'd', 'slow']
    """
    cases = list(values)
    chosen = {-(-index * len(cases) // fast) for index in range(fast)}
    has_marks = [isinstance(case, type(pytest.param())) for case in cases]
    return [case if index in chosen or has_marks[index] else slow(case, why=why) for index, case in enumerate(cases)]
