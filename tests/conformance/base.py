"""The table of all behaviours, and the check of a strategy against them.

Ten of them are `distwrap.testing`'s own; each theme has a file, which registers its own here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import torch

from distwrap import Strategy
from distwrap.options import Options
from distwrap.testing import behaviours, conformance
from distwrap.testing.behaviours import Behaviour
from distwrap.testing.nets import computing_in
from distwrap.testing.ranks import launch_ranks

BEHAVIOURS: dict[str, Behaviour] = dict(behaviours.BEHAVIOURS)
# Those that start ranks of their own: the body gets a function that does.
LAUNCHING: dict[str, Callable[[Callable[..., list[Any]]], None]] = {}

Body = TypeVar("Body", bound=Callable[..., None])


def behaviour(*, may_refuse: bool = False, launches: bool = False) -> Callable[[Body], Body]:
    """Register a behaviour under its function's name; see `Behaviour` for `may_refuse`."""

    def register(body: Body) -> Body:
        if launches:
            LAUNCHING[body.__name__] = body
        else:
            BEHAVIOURS[body.__name__] = Behaviour(body, may_refuse)
        return body

    return register


def check(
    strategy: str | Strategy,
    nprocs: int = 2,
    only: Collection[str] | None = None,
    refuses: Collection[str] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[tuple[str, str], ...]:
    """Check a strategy as `check_strategy` does, against all behaviours, or against those named."""
    asked = {*BEHAVIOURS, *LAUNCHING} if only is None else set(only)
    for name in asked & LAUNCHING.keys():
        computing_in(dtype, LAUNCHING[name], partial(_launch, dtype, strategy, nprocs=nprocs))
    found = asked - LAUNCHING.keys()
    refused = [name for name in refuses if name in asked]
    return conformance.check_behaviours(BEHAVIOURS, strategy, nprocs, found, refused, dtype=dtype)


def _launch(
    dtype: torch.dtype, strategy: str | Strategy, fn: Callable[..., Any], *args: Any, nprocs: int, **more: Any
) -> list[Any]:
    options = Options().updated({"strategy": strategy, "timeout": 40, "returns": "all", **more})
    return launch_ranks(nprocs, options, 60, computing_in, dtype, fn, *args)
