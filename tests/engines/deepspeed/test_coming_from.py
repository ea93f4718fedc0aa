"""The page for those who come from DeepSpeed: its programs train the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.coming_from import assert_page_holds, commands_of

SCRIPT = Path(__file__).with_name("without_compiler.py")


@pytest.mark.timeout(600)
def test_before_and_after_train_the_same_weights(tmp_path: Path) -> None:
    """DeepSpeed's own loop, the loop of torch with its engine, and that without end with the same weights."""
    commands = [
        each.replace(" deepspeed_before.py", f" {SCRIPT} deepspeed_before.py") for each in commands_of("deepspeed")
    ]
    assert_page_holds("deepspeed", tmp_path, {"DS_ACCELERATOR": "cpu"}, commands)
