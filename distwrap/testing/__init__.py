"""Tests of distributed code on real ranks: running a test body on several, and the conformance suite of strategies."""

import typing

from distwrap.launch.forkserver import stop_server
from distwrap.testing.ranks import run_ranks, simulate

if typing.TYPE_CHECKING:
    from distwrap.testing.conformance import check_strategy

__all__ = ["check_strategy", "run_ranks", "simulate", "stop_server"]

if not typing.TYPE_CHECKING:

    def __getattr__(name):
        if name == "check_strategy":  # when asked for: every rank of a test imports this package
            from distwrap.testing.conformance import check_strategy

            return check_strategy
        raise AttributeError(f"module 'distwrap.testing' has no attribute {name!r}")
