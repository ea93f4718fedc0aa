"""The page for those who come from Horovod: its programs train the same weights."""

from __future__ import annotations

from pathlib import Path

from tests.docs.coming_from import assert_page_holds


def test_before_and_after_train_the_same_weights(tmp_path: Path) -> None:
    """Under horovodrun, and without Horovod."""
    assert_page_holds("horovod", tmp_path)
