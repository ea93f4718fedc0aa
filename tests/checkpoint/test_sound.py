"""Checkpoints in situations in which they were silently lost, or not those that the program meant."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap.checkpoint.formats import FileIO
from distwrap.cli import main
from distwrap.errors import CheckpointError
from distwrap.group.world import activate, current_world, deactivate
from distwrap.testing import run_ranks
from tests.limits import SOON

# Numbers


@pytest.mark.parametrize("how", ["file", "background", "sharded"])
def test_conjugate_views_are_saved_as_they_are(tmp_path: Path, how: str) -> None:
    """Views that torch conjugates or negates when they are read are written with their numbers."""
    state = {"conj": torch.tensor([1 + 2j]).conj(), "neg": torch.tensor([3 - 4j]).conj().imag}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    dw.save(state, tmp_path / "a", background=how == "background", io="sharded" if how == "sharded" else "file")
    dw.wait_for_saves()
    loaded = dw.load(tmp_path / "a")
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in state.items()
    }


def test_negated_views_as_safetensors(tmp_path: Path) -> None:
    """That format has bytes alone, and gets those of the numbers; ``strip`` writes it too."""
    pytest.importorskip("safetensors")
    view = torch.tensor([1 + 2j]).conj().imag  # of one number, so that torch counts it as contiguous
    dw.save({"w": view}, tmp_path / "a.safetensors")
    assert dw.load(tmp_path / "a.safetensors")["w"].tolist() == [-2.0]
    torch.save({"module.w": view}, tmp_path / "a.pt")
    assert main(["strip", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]) == 0
    assert dw.load(tmp_path / "b.safetensors")["w"].tolist() == [-2.0]
