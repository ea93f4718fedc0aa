"""Tests that need an accelerator, on a machine without one: in a pytest beside this one, which sees pretended devices.

torch knows one accelerator a process, and cannot forget it. So the processes that know the pretended ones are others: a
pytest for each number of devices, which is started when a first test needs it, and runs tests as it is told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

import pytest

from tests.accelerator.build import ROOT

COMMANDS, REPORTS = "PRETEND_COMMANDS", "PRETEND_REPORTS"  # the descriptors through which it is told, and tells
SECONDS_MORE = 20  # than the test itself may take, until the other pytest is given up


class Elsewhere(pytest.Item):
    """A test that another pytest runs."""

    def __init__(self, *, of: pytest.Item, devices: int, files: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._of, self._devices, self._files = of, devices, files
        self.own_markers = [mark for mark in of.own_markers if mark.name != "timeout"]
        self.keywords.update(of.keywords)
        marker = of.get_closest_marker("timeout")
        seconds = marker.args[0] if marker is not None else float(self.config.getini("timeout"))
        self.add_marker(pytest.mark.timeout(seconds + SECONDS_MORE))

    def runtest(self) -> None:
        other = _pytest_with(self._devices, self._files, self.config)
        try:
            reports = other.run(self.nodeid)
        except BaseException:  # it may still be at this test, and would tell of it in place of the next one
            _started.pop(self._devices).kill()
            raise
        for report in reports:
            if report.skipped:
                pytest.skip(report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr))
            if report.failed:
                sections = [f"--- {title} ---\n{text}" for title, text in report.sections]
                raise FailedElsewhereError("\n".join([f"{report.longrepr}", *sections]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        if isinstance(excinfo.value, FailedElsewhereError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kwargs)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self._of.reportinfo()


class FailedElsewhereError(Exception):
    """How it failed there."""


class _Pytest:
    """A pytest that sees some pretended devices."""

    def __init__(self, devices: int, files: list[str], config: pytest.Config) -> None:
        self._config = config
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by kill()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                *["-p", "tests.accelerator.told", "-p", "no:cacheprovider", "-q", "-m", "gpu"],
                *files,
            ],
            cwd=ROOT,
            env=environment(devices) | {COMMANDS: str(commands), REPORTS: str(reports)},
            pass_fds=(commands, reports),
            stdout=self._output,
            start_new_session=True,
        )
        os.close(commands)
        os.close(reports)
        self._lines = os.fdopen(self._reports)

    def run(self, nodeid: str) -> list[pytest.TestReport]:
        with suppress(BrokenPipeError):  # then nothing is to be read
            os.write(self._commands, f"{nodeid}\n".encode())
        found: list[pytest.TestReport] = []
        for line in self._lines:
            data = json.loads(line)
            if data is None:
                return found
            found.append(self._config.hook.pytest_report_from_serializable(config=self._config, data=data))
        self._output.seek(0)
        said = self._output.read()[-5000:]
        raise RuntimeError(f"the pytest with pretended devices has ended, with {self._process.wait(10)}:\n{said}")

    def close(self) -> None:
        """Let it end."""
        os.close(self._commands)
        self._commands = -1
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.kill()

    def kill(self) -> None:
        """End it, if it has not ended, and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._commands >= 0:
            os.close(self._commands)
        self._lines.close()
        self._output.close()


_started: dict[int, _Pytest] = {}


def _pytest_with(devices: int, files: list[str], config: pytest.Config) -> _Pytest:
    if devices not in _started:
        _started[devices] = _Pytest(devices, files, config)
    return _started[devices]


def close() -> None:
    """End the pytests that were started."""
    while _started:
        _started.popitem()[1].close()


def environment(devices: int) -> dict[str, str]:
    """Return the variables of a process that sees some pretended devices."""
    path = [str(ROOT), str(ROOT / "tests/accelerator/site"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PRETEND_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
    }


def placed(items: list[pytest.Item], reason: str | None) -> None:
    """Let other pytests run what needs an accelerator; or skip it, where there is a reason.

    Args:
        items: all tests, in place.
        reason: why there are no pretended devices.
    """
    files = sorted({str(item.path) for item in items if item.get_closest_marker("gpu")})
    for number, item in enumerate(items):
        if not item.get_closest_marker("gpu"):
            continue
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif not item.get_closest_marker("cuda"):
            items[number] = Elsewhere.from_parent(
                item.parent, name=item.name, of=item, devices=item.callspec.params["devices"], files=files
            )
