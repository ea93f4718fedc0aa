"""The page for those who come from Ray Train: its programs train the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.coming_from import assert_page_holds


@pytest.mark.timeout(1300)
def test_before_and_after_train_the_same_weights(tmp_path: Path) -> None:
    """Ray Train, the actors of a launcher, and plain processes end with the same weights."""
    home = tmp_path / "home"  # where Ray Train writes its results, and Ray its token
    home.mkdir()
    (tmp_path / "run").mkdir()
    environment = {"HOME": str(home), "RAY_AUTH_MODE": "disabled"}
    assert_page_holds("ray_train", tmp_path / "run", environment, seconds=400)
