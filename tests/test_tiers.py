"""The two tiers of tests: what `make test` leaves out has a reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems


@pytest.mark.parametrize("reasons", [(), ("",), (" ",), (3,)], ids=str)
def test_a_slow_test_without_a_reason_is_refused(reasons: tuple[Any, ...], request: pytest.FixtureRequest) -> None:
    """The error names the test, and shows how a reason is given."""
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.add_marker(pytest.mark.slow(*reasons))
    with pytest.raises(pytest.UsageError, match=r'::test_x is slow without a reason: @pytest\.mark\.slow\("500'):
        pytest_collection_modifyitems([item])


def test_a_slow_test_with_a_reason_is_taken(request: pytest.FixtureRequest) -> None:
    """A reason in words is enough."""
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.add_marker(pytest.mark.slow("500 launches"))
    pytest_collection_modifyitems([item])
