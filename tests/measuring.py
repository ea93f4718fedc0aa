"""Tests that measure: other processes may take the cores away just then."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def measured_again(test: Callable[P, None]) -> Callable[P, None]:
    """Let a test fail once of three: cores that were busy for a moment are no fault of what it measures."""

    @functools.wraps(test)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            test(*args, **kwargs)
        except AssertionError as error:
            print(f"measured again, twice: {error}")
            failed = True
        else:
            failed = False
        for _ in range(2 if failed else 0):
            test(*args, **kwargs)

    return repeated
