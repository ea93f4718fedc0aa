from __future__ import annotations

from multiprocessing import resource_tracker

import pytest


@pytest.fixture(scope="session", autouse=True)
def _tracker() -> None:
    """Start what multiprocessing keeps beside a process for its life, so that no test is held to have left it."""
    resource_tracker.ensure_running()
