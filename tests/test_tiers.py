"""The tiers of tests: what `make test` leaves out, and what `make test-all` does, has a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import exhaustive
from tests.conftest import COLLECTED, pytest_collection_modifyitems

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("tier", ["slow", "exhaustive"])
@pytest.mark.parametrize("reasons", [(), ("",), (" ",), (3,)], ids=str)
def test_a_slow_test_without_a_reason_is_refused(
    reasons: tuple[Any, ...], tier: str, request: pytest.FixtureRequest
) -> None:
    """The error names the test, and shows how a reason is given."""
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.add_marker(getattr(pytest.mark, tier)(*reasons))
    with pytest.raises(pytest.UsageError, match=rf'::test_x is {tier} without a reason: @pytest\.mark\.slow\("500'):
        pytest_collection_modifyitems([item])


def test_a_slow_test_with_a_reason_is_taken(request: pytest.FixtureRequest) -> None:
    """A reason in words is enough."""
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.add_marker(pytest.mark.slow("500 launches"))
    pytest_collection_modifyitems([item])


def test_the_table_names_tests_that_there_are(request: pytest.FixtureRequest) -> None:
    """Of each file that is collected, and not only tests of it, the table of what is exhaustive names its tests."""
    in_part = {Path(arg.partition("::")[0]).resolve() for arg in request.config.args if "::" in arg}
    files = {file for nodeid in COLLECTED if (ROOT / (file := nodeid.partition("::")[0])) not in in_part}
    named = [begin for begin in exhaustive.EXHAUSTIVE if f"tests/{begin.partition('::')[0]}" in files]
    there = [nodeid for nodeid in COLLECTED if nodeid.partition("::")[0] in files]
    assert set(named) == {exhaustive.begin_of(nodeid) for nodeid in there} - {None}


def test_what_is_in_the_table_has_its_reason() -> None:
    """A test by the beginning of its id; any other has none."""
    begin, shown = next(iter(exhaustive.EXHAUSTIVE.items()))
    assert exhaustive.reason(f"tests/{begin} and more") == f"{shown} shows it"
    assert exhaustive.reason("tests/test_tiers.py::test_x") is None
