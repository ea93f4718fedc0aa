"""Tests of distributed code on real ranks: running a test body on several, and the conformance suite of strategies."""

from distwrap.launch.forkserver import stop_server
from distwrap.testing.conformance import check_strategy
from distwrap.testing.ranks import run_ranks

__all__ = ["check_strategy", "run_ranks", "stop_server"]
