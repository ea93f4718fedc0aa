"""What tests cost: processor seconds of all processes, and interpreters that they start; each tier has a limit.

`pytest --tier test` selects the tests of a tier and holds the run to the limits that setup.cfg has for it. Seconds are
scaled by an `import torch` measured at the start, so that a slow machine has more of them. The end of the run shows the
sums by folder and the dearest files and tests.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distwrap.launch import forkserver
from tests import interpreters
from tests.accelerator import elsewhere
from tests.started import VARIABLE, count, note_starts

# What pytest's -m is given: for a contributor, for CI besides, for a row of `make nightly`, and for `make gpu-report`.
TIERS = {"test": "not slow and not nightly", "slow": "slow and not nightly", "nightly": "nightly", "gpu": "gpu or cuda"}
IMPORT_SECONDS = 2.8  # of `import torch` on the machine on which the limits were written down
_LIMITS = ("processor_seconds", "interpreters")
_ON_GPUS = "needs NVIDIA's GPU"  # begins the reason of a skip that no machine without one can help
_PROPERTY = "cost"
_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(TIERS), help="run the tests of a tier, and hold them to its limits")
    parser.addini("processor_seconds", "of the tests of a tier: a line each, as `test 500`", "linelist", [])
    parser.addini("interpreters", "that the tests of a tier may start: a line each, as `test 20`", "linelist", [])


def configure(config: pytest.Config) -> None:
    """Select the tier's tests, and note from now on which interpreters are started."""
    tier = config.getoption("tier")
    if tier and not config.option.markexpr:
        config.option.markexpr = TIERS[tier]
    missing = [name for name in _LIMITS if tier in ("test", "slow") and _limit(config, name, tier) is None]
    if missing:
        raise pytest.UsageError(f"setup.cfg does not say how many {' and '.join(missing)} {tier} may take")
    path = os.path.join(tempfile.gettempdir(), f"interpreters-of-tests-{os.getpid()}")
    os.environ[VARIABLE] = path
    note_starts(path)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Costs(config, tier))


def close() -> None:
    """Remove the file of this process."""
    Path(os.environ.pop(VARIABLE)).unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Remember what had been spent before a test."""
    begin()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write onto the last report of a test what it has cost."""
    if call.when == "teardown":
        now = _spent()
        item.user_properties.append((_PROPERTY, [now[0] - _before[0], now[1] - _before[1]]))
    return (yield)


def begin() -> None:
    """Count from now on what the test under way costs."""
    _before[:] = _spent()


_before: list[float] = [0.0, 0]


def _spent() -> tuple[float, int]:
    """Return the processor seconds of this process and all that it has started, and its interpreters."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + sum(map(_seconds_of, _serving())), count(os.environ[VARIABLE])


def _serving() -> list[int]:
    """Return the processes of which programs and ranks are forks: they are not waited for before the end."""
    servers = [each._process.pid for each in elsewhere._started.values()]
    if interpreters.interpreter.cache_info().currsize:
        servers.append(interpreters.interpreter()._process.pid)
    return [*servers, *([forkserver._server.pid] if forkserver._server is not None else [])]


def _seconds_of(pid: int) -> float:
    """Return the processor seconds of a process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


class _Costs:
    """Sums of the costs of all tests, on the process that shows the run's end."""

    def __init__(self, config: pytest.Config, tier: str | None) -> None:
        self._tier = tier
        self._scale = _import_seconds() / IMPORT_SECONDS if tier else 1.0
        self._limits = {name: value for name in _LIMITS if (value := _limit(config, name, tier)) is not None}
        self._seconds: Counter[str] = Counter()
        self._interpreters: Counter[str] = Counter()
        self._passed, self._skipped = 0, 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed += report.when == "call" and report.passed
        self._skipped += report.skipped and not hasattr(report, "wasxfail") and _ON_GPUS not in str(report.longrepr)
        if report.when == "teardown" and (cost := dict(report.user_properties).get(_PROPERTY)):
            self._seconds[report.nodeid] += cost[0]
            self._interpreters[report.nodeid] += cost[1]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._tier and self._problems() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._tier:
            return
        write = terminalreporter.write_line
        terminalreporter.section(f"cost of {self._tier}")
        folders = _summed(self._seconds, lambda nodeid: "/".join(nodeid.partition("::")[0].split("/")[:2]))
        write("; ".join(f"{folder} {seconds:.0f}" for folder, seconds in folders.most_common()))
        for file, seconds in _summed(self._seconds, lambda nodeid: nodeid.partition("::")[0]).most_common(30):
            write(f"{seconds:7.1f} s  {file}")
        started = _summed(self._interpreters, lambda nodeid: nodeid.partition("::")[0])
        write("interpreters: " + "; ".join(f"{file} {count}" for file, count in started.most_common() if count))
        sums = f"{self._seconds.total():.0f} processor seconds, {self._interpreters.total()} interpreters"
        write(f"{sums}; import torch takes {self._scale * IMPORT_SECONDS:.1f} s of a processor")
        for words in self._problems():
            write(f"ERROR: {words}")
        if self._problems():
            write("The dearest tests:")
            for nodeid, seconds in self._seconds.most_common(10):
                write(f"{seconds:7.1f} s, {self._interpreters[nodeid]} interpreters  {nodeid}")

    def _problems(self) -> list[str]:
        """Return in words what the run must not have cost, or has not shown."""
        found = {"processor_seconds": self._seconds.total() / self._scale, "interpreters": self._interpreters.total()}
        problems = [
            f"{found[name]:.0f} {name.replace('_', ' ')}, and by setup.cfg {self._tier} may take {limit}"
            for name, limit in self._limits.items()
            if found[name] > limit
        ]
        if self._tier == "nightly" and self._skipped:
            problems.append(f"{self._skipped} tests of the row were skipped, which shows nothing of them")
        if not self._passed:
            problems.append("no test has passed")
        return problems


def _summed(costs: Counter[str], group: Any) -> Counter[str]:
    sums: Counter[str] = Counter()
    for nodeid, cost in costs.items():
        sums[group(nodeid)] += cost
    return sums


def _limit(config: pytest.Config, name: str, tier: str | None) -> int | None:
    return {words[0]: int(words[1]) for line in config.getini(name) if (words := line.split())}.get(tier)


def _import_seconds() -> float:
    """Return the processor seconds of an `import torch` while every core has one to do, as it has in a run of tests."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "import torch"]
    processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / len(processes)
