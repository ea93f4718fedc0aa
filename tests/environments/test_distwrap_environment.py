"""What our launchers tell their ranks is what the ranks read."""

from __future__ import annotations

import pytest

from distwrap.environments import Placement, detect, distwrap_environment


@pytest.mark.parametrize("rank", range(6))
def test_what_is_written_is_what_is_read(rank: int) -> None:
    """A placement written as variables reads back the same, and is found before torchrun's."""
    place = Placement(rank, 6, rank % 3, 3, rank // 3, 2, source="distwrap")
    assert detect(distwrap_environment.variables(place, "spawn", "/somewhere")) == place


def test_variables_are_text() -> None:
    """The variables fit into an environment as they are, and tell which launcher set them."""
    env = distwrap_environment.variables(distwrap_environment.on_one_node(0, 2), "fork", "/somewhere")
    assert all(isinstance(value, str) for value in env.values())
    assert env[distwrap_environment.LAUNCHER] == "fork"
