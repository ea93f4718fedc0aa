"""Which cases of a test are slow, which are for `make test-exhaustive`, and reasons that several of them have."""

from __future__ import annotations

from typing import Any

import pytest

INTERPRETERS = "starts interpreters, each of which imports torch"
MORE_RANKS = "the same again on more ranks than there are cores"


def slow(*values: Any, why: str) -> Any:
    """Return one case of a parametrised test, which is for `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow(why))


def exhaustive(*values: Any, why: str) -> Any:
    """Return one case of a parametrised test, which is for `make test-exhaustive` alone, since others show it."""
    return pytest.param(*values, marks=pytest.mark.exhaustive(why))


def nightly(*values: Any, row: str, why: str) -> Any:
    """Return one case of a parametrised test, which is for a row of `make nightly` alone."""
    return pytest.param(*values, marks=pytest.mark.nightly(row=row, why=why))
