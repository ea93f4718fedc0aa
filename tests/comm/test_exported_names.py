"""The names of `distwrap.comm`."""

from __future__ import annotations

from distwrap import comm
from distwrap.registry import algorithms


def test_every_algorithm_is_a_name() -> None:
    """As the classes of the registry are."""
    assert {type(algorithms.make(name)).__name__ for name in algorithms.names()} <= set(vars(comm))
