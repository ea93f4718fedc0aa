"""Tests of distributed code: a body on real or simulated ranks, a loop proven, the conformance of strategies."""

import importlib
from typing import TYPE_CHECKING

from distwrap.launch.forkserver import stop_server
from distwrap.testing.ranks import run_ranks, simulate

if TYPE_CHECKING:
    from distwrap.prove.proof import prove
    from distwrap.testing.conformance import check_strategy
    from distwrap.testing.plans import check_plan

__all__ = ["check_plan", "check_strategy", "prove", "run_ranks", "simulate", "stop_server"]

# What is imported when asked for: every rank of a test imports this package.
_LATER = {"check_plan": "testing.plans", "check_strategy": "testing.conformance", "prove": "prove.proof"}

if not TYPE_CHECKING:

    def __getattr__(name):
        if name in _LATER:
            return getattr(importlib.import_module(f"distwrap.{_LATER[name]}"), name)
        raise AttributeError(f"module 'distwrap.testing' has no attribute {name!r}")
