"""How long a test waits for what should come at once, and which cases of a test are slow."""

from __future__ import annotations

from typing import Any

import pytest

# A guard against an end by some other, longer limit (of a collective, a sleep, a grace), and no measure of speed: what
# a test holds to it takes a second or two on an idle machine, and must pass on one whose cores are busy.
SOON = 60.0

INTERPRETERS = "starts interpreters, each of which imports torch"
MORE_RANKS = "the same again on more ranks than there are cores"


def slow(*values: Any, why: str) -> Any:
    """Return one case of a parametrised test, which is for `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow(why))
