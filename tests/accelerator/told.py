"""A plugin of the pytest that runs, on pretended devices, the tests that another one tells it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.accelerator.elsewhere import COMMANDS, REPORTS

_commands, _reports = (int(os.environ.pop(name)) for name in (COMMANDS, REPORTS))
for each in (_commands, _reports):
    os.set_inheritable(each, False)


def _tell(data: Any) -> None:
    os.write(_reports, (json.dumps(data) + "\n").encode())


def _told() -> Iterator[str]:
    with open(_commands) as lines:
        yield from map(str.strip, lines)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    by_id = {item.nodeid: item for item in session.items}
    for nodeid in _told():
        by_id[nodeid].ihook.pytest_runtest_protocol(item=by_id[nodeid], nextitem=None)
        _tell(None)
    return True


class _Reporter:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _tell(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Reporter(config))
