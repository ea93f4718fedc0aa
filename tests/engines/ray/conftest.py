"""Ray's driver keeps threads, sockets and variables of its own in this process, between calls and after them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from distwrap.group import world

# Ray gives its workers a niceness of 15, with which they get next to nothing of busy cores.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as Ray spells it


@pytest.fixture(autouse=True)
def _tests_leave_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a world or a process group of ours."""
    yield
    assert not dist.is_initialized()
    assert world.active_world() is None


@pytest.fixture(autouse=True)
def _launches_leave_nothing_behind() -> None:
    """Leave out what is said of other launchers: a driver's own comes and goes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Ray warn of what Ray itself does."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
