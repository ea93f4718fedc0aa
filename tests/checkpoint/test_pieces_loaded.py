"""Loading of a divided model and its optimizer: each rank reads its pieces, out of parts or a file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

import distwrap as dw
from distwrap.errors import CheckpointError
from distwrap.testing import run_ranks
from tests.checkpoint.test_streaming import made, same, state_of, stepped

NAMES = ("file.pt", "parts")


def saved(folder: Path) -> dict[str, Any]:
    model, optimizer = made()
    stepped(model, optimizer, 2)
    for name, io in zip(NAMES, ("file", "sharded"), strict=True):
        dw.save({"model": model, "optimizer": optimizer, "epoch": 3}, folder / name, io=io)
    dw.save(model, folder / "model.safetensors")
    return {"model": state_of(model), "optimizer": state_of(optimizer)}


def loaded(folder: Path) -> list[dict[str, Any]]:
    states = []
    for name in NAMES:
        for load in (dw.load, dw.resume_from):
            model, optimizer = made()
            found = load(folder / name, into={"model": model, "optimizer": optimizer})
            assert found["epoch"] == 3
            assert isinstance(found["model"]["first.weight"], DTensor) == (dw.world_size() > 1)
            assert isinstance(found["optimizer"]["state"][0]["exp_avg"], DTensor) == (dw.world_size() > 1)
            states.append({"model": state_of(model), "optimizer": state_of(optimizer)})
    model, optimizer = made()
    dw.load(folder / "model.safetensors", into=model)
    states.append({**states[0], "model": state_of(model)})
    for name in NAMES:
        with pytest.raises(CheckpointError, match=r"no state\['scheduler'\]"):
            dw.load(folder / name, into={"model": model, "scheduler": model})
    return states


@pytest.mark.slow("imports FSDP")
def test_pieces_are_read_at_any_number_of_ranks(tmp_path: Path) -> None:
    """A model and AdamW's state go on bit by bit on more ranks, on one, and in a process that knows no strategy."""
    expected = run_ranks(saved, 2, tmp_path, timeout=60)[0]
    for nprocs in (3, 1):
        for found in run_ranks(loaded, nprocs, tmp_path, timeout=60)[0]:
            assert same(found, expected), nprocs
    for name in NAMES:
        whole = dw.load(tmp_path / name)
        assert same({key: whole[key] for key in expected}, expected)


def resumed_without_a_common_disk(folder: Path) -> list[dict[str, Any]]:
    """Resume from files that rank 1 alone has."""
    expected = saved(folder)
    own = folder / f"of {dw.rank()}"
    own.mkdir()
    if dw.rank() == 1:
        shutil.copy(folder / "file.pt", own)
        shutil.copytree(folder / "parts", own / "parts")
    model, optimizer = made()
    found = dw.resume_from(own / "file.pt", into={"model": model, "optimizer": optimizer})
    assert found["epoch"] == 3
    assert isinstance(found["model"]["first.weight"], DTensor)
    assert isinstance(found["optimizer"]["state"][0]["exp_avg"], DTensor)
    whole = dw.resume_from(own / "file.pt")
    with pytest.raises(CheckpointError, match=r"rank 0 of 2 .*disk"):
        dw.resume_from(own / "parts", into={"model": model})
    with pytest.raises((CheckpointError, FileNotFoundError), match=r"rank 0 cannot open|No such file"):
        dw.load(own / "parts", io="sharded")
    return [expected, {"model": state_of(model), "optimizer": state_of(optimizer)}, whole]


@pytest.mark.slow("imports FSDP")
def test_a_file_of_one_node_is_sent_in_pieces(tmp_path: Path) -> None:
    """A run without a common disk goes on bit by bit; parts that a rank does not see are an error on every rank."""
    for expected, found, whole in run_ranks(resumed_without_a_common_disk, 2, tmp_path, timeout=30):
        assert same(found, expected)
        assert same({key: whole[key] for key in expected}, expected)
