"""A rank that fails says so, wherever in the telling torch's handler for loader workers raises besides."""

from __future__ import annotations

import itertools
import signal
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from distwrap.launch import worker
from distwrap.launch.outcome import Outcome


class EndsOnceAt:
    """Raises what torch's handler does when a loader's worker ends, at the so-many-th line after the failure."""

    def __init__(self, line: int) -> None:
        self.line, self.lines, self.may = line, 0, False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.may and event == "line":
            self.lines += 1
            if self.lines == self.line:
                raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
        return self


def test_a_failure_is_told_wherever_a_loaders_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The news that a worker of a loader has ended was lost where it came while the rank told of a failure."""
    monkeypatch.setattr(worker, "abandon_process_group", lambda **_: None)
    monkeypatch.setattr(worker.failures, "tell", lambda _: None)
    for line in itertools.count(1):
        ends = EndsOnceAt(line)

        def kept_away(number: int, handler: Any, ends: EndsOnceAt = ends) -> None:
            if number == signal.SIGCHLD and handler is signal.SIG_DFL:
                ends.may = False

        def fail(ends: EndsOnceAt = ends) -> None:
            ends.may = True
            raise EOFError("the first to notice")

        monkeypatch.setattr(worker.signal, "signal", kept_away)
        reports: list[Outcome] = []
        before = sys.gettrace()
        sys.settrace(ends)
        try:
            with pytest.raises(worker.FailureReported):
                worker.report_failures(SimpleNamespace(report=reports.append), 3, fail)  # type: ignore[arg-type]
        finally:
            sys.settrace(before)
        assert reports, f"nothing was told where it came at line {line}"
        words = reports[-1].failure.text  # type: ignore[union-attr]
        first = "the first to notice" in words
        assert first or (line <= 3 and "DataLoader worker" in words)  # up to where it is known
        if ends.lines < line:  # it has been at each
            break
    assert line > 3
