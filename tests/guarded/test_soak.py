"""What a long run takes from the machine does not grow; `make soak` looks for ten minutes."""

from __future__ import annotations

import tempfile

import pytest

from tests.guarded.soak import LIMITS, grown, growth, soak


@pytest.mark.nightly(row="long", why="faults/test_scale.py::test_launches_in_a_row, of launches")
def test_a_long_training_takes_no_more_and_more() -> None:
    """Checkpoints in the background, loader workers, lockstep, evaluations: all that they take, they give back."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own has too long a name for the workers' sockets
        found = soak(40, "fork", folder)
    assert len(found) == 2
    assert not grown(found)


def test_what_grows_is_found() -> None:
    """A descriptor and half a megabyte a second are told, also where they come and go."""
    measured = [
        (at, dict.fromkeys(LIMITS, 0.0) | {"descriptors": at, "memory, MB": at / 2 + (i % 2)})
        for i, at in enumerate(range(60))
    ]
    assert grown([growth(measured, 60)]) == [
        "rank 0: memory, MB: 15.2 in the second third, 25.2 in the last",
        "rank 0: descriptors: 29.5 in the second third, 49.5 in the last",
    ]
