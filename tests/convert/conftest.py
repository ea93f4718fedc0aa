"""The processes of the tests of the conversion."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.convert.runner import Runner


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """The warm process that forks ranks."""
    found = Runner()
    yield found
    found.close()
