"""resume_from: the newest checkpoint on every rank, wherever it lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from distwrap import rank, resume_from, save
from distwrap.errors import CheckpointError
from distwrap.testing import run_ranks


def with_own_files(folder: str, files: dict[int, tuple[int, float]]) -> Any:
    """On a disk of each rank's own: some hold a checkpoint of an epoch, written at a time."""
    path = Path(folder, f"rank{rank()}")
    path.mkdir()
    os.chdir(path)
    if rank() in files:
        epoch, written = files[rank()]
        torch.save({"epoch": epoch, "weights": torch.full((3,), float(epoch))}, "last.pt")
        os.utime("last.pt", (written, written))
    state = resume_from("last.pt")
    return None if state is None else (state["epoch"], state["weights"].tolist())


@pytest.mark.parametrize(
    ("files", "epoch"), [({}, None), ({0: (1, 100.0)}, 1), ({1: (2, 100.0)}, 2), ({0: (1, 100.0), 1: (4, 200.0)}, 4)]
)
def test_the_newest_goes_to_all(files: dict[int, tuple[int, float]], epoch: int | None, tmp_path: Path) -> None:
    """Nobody has one, one has, or both have different ones: all ranks get the same state."""
    values = run_ranks(with_own_files, 2, str(tmp_path), files)
    assert values == [None if epoch is None else (epoch, [float(epoch)] * 3)] * 2


def on_a_common_disk(path: str) -> list[Any]:
    before = resume_from(path)
    save({"epoch": 7}, path)
    return [before, resume_from(path)]


def test_on_a_common_disk(tmp_path: Path) -> None:
    """What save wrote comes back, on every rank and in a single process."""
    assert run_ranks(on_a_common_disk, 2, str(tmp_path / "last.pt")) == [[None, {"epoch": 7}]] * 2
    assert resume_from(tmp_path / "last.pt") == {"epoch": 7}


def broken_on_one(folder: str) -> Any:
    path = Path(folder, f"{rank()}.pt")
    if rank() == 1:
        path.write_bytes(b"no checkpoint")
    return resume_from(path)


def test_a_broken_file_is_told_on_all(tmp_path: Path) -> None:
    """A rank that cannot read the newest file does not leave the others waiting."""
    with pytest.raises(CheckpointError, match=r"rank 1 .*1\.pt"):
        run_ranks(broken_on_one, 2, str(tmp_path))


def unreadable_on_one(folder: str) -> str:
    path = Path(folder, f"{rank()}.pt")
    if rank() == 1:
        path.symlink_to(path.name)
    with pytest.raises(CheckpointError) as raised:
        resume_from(path)
    return str(raised.value)


def test_a_place_that_one_rank_cannot_read_is_told_on_all(tmp_path: Path) -> None:
    """Every rank raises, and not that one alone, whose caller may catch it and go on."""
    first, second = run_ranks(unreadable_on_one, 2, str(tmp_path))
    assert first == second
    assert "rank 1 cannot read" in first


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    """It is refused with the rank and the path; to start from nothing would lose what the user thinks is there."""
    (tmp_path / "last.pt").symlink_to("last.pt")
    with pytest.raises(CheckpointError, match=r"rank 0 .*symbolic links"):
        resume_from(tmp_path / "last.pt")
