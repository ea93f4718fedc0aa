"""Here ranks of ``launcher="spawn"`` are interpreters of their own, as for users."""

from __future__ import annotations

import pytest

from distwrap.launch import processes, spawn


@pytest.fixture(autouse=True)
def _real_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "python_command", processes.python_command)
