"""Killed at any moment, on a full disk or one that cannot be written: a checkpoint is whole, or is the one before."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import distwrap as dw
from distwrap.checkpoint import files
from distwrap.errors import CheckpointError
from distwrap.testing import run_ranks
from tests.interpreters import run_python
from tests.slow import nightly, slow

KILLS = int(os.environ.get("KILLS", "60"))  # `make kills` sets it
ROOT = Path(__file__).parents[2]


def kill(module: str, times: int, *words: object) -> None:
    """Kill so often what saves all the time; many kills must have met something half-written, or prove nothing."""
    done = run_python("-W", "error", "-m", f"tests.checkpoint.{module}", *words, times, cwd=ROOT, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    killed, in_midst, newest = map(int, done.stdout.split()[-3:])
    assert killed >= times
    assert in_midst >= max(1, times // 10), "hardly any kill has met anything half-written: the moments prove nothing"
    assert newest > times // 15


@pytest.mark.parametrize(
    "kills", [slow(12, why="kills 12 processes"), nightly(KILLS, row="faults", why="a dozen of the same kills")]
)
def test_killed_at_any_moment_the_newest_complete_checkpoint_loads(tmp_path: Path, kills: int) -> None:
    """SIGKILL at random moments of saving in series, over one name, in the background and in parts."""
    kill("crashing", kills, tmp_path)


@pytest.mark.parametrize(
    "kills", [slow(3, why="kills 3 pairs of ranks"), nightly(10, row="faults", why="three of the same kills")]
)
def test_ranks_killed_while_they_save_parts_leave_the_newest_complete_ones(kills: int) -> None:
    """SIGKILL of two ranks that save a divided model, now and in the background; `make kills` does it 300 times."""
    kill("kills", kills, "--times")


def test_what_a_killed_process_had_begun_is_swept_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves that nobody writes any more are removed by a later save; those of a live save, and young ones, stay.

    Whoever holds the lock may be of another container, in which process numbers mean other processes.
    """
    of_gone, folder = files.temporary_name(tmp_path / "a.pt"), files.temporary_name(tmp_path / "parts")
    living = [files.Unfinished(tmp_path / "c.pt"), files.Unfinished(tmp_path / "d", folder=True)]
    folder.mkdir()
    for path in (of_gone, folder / "part", living[1].temporary / "part", tmp_path / ".mine.tmp"):
        path.write_text("half")
    dw.save(1, tmp_path / "b.pt")
    assert of_gone.exists()
    monkeypatch.setattr(files, "_SWEEP_SECONDS", -1.0)
    code = "import sys; from distwrap.checkpoint import files; files._SWEEP_SECONDS = -1.0; import distwrap as dw; "
    assert run_python("-c", code + "dw.save(2, sys.argv[1])", tmp_path / "b.pt", timeout=60).returncode == 0
    names = [".mine.tmp", "b.pt", *(each.temporary.name for each in living)]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert (living[1].temporary / "part").exists()
    for each in living:
        each.discard()
    assert sorted(os.listdir(tmp_path)) == [".mine.tmp", "b.pt"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, timeout=30)
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=30)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_everybodys_error_and_the_old_file_stays(disk: Path, background: bool) -> None:
    """No space left: raised on all ranks, what was there before loads, and no half is left."""
    import torch

    dw.save({"w": torch.ones(1000)}, disk / "a.pt")

    def on_rank() -> str:
        def save() -> None:
            dw.save({"w": torch.ones(1_000_000)}, disk / "a.pt", background=background)
            dw.wait_for_saves()

        with pytest.raises(CheckpointError) as failure:
            save()
        return str(failure.value)

    for text in run_ranks(on_rank, 2, timeout=30):
        assert "was not written by rank 0" in text
        assert f"the disk of {disk} is full (" in text
        assert "What was there before is untouched" in text
    assert dw.load(disk / "a.pt")["w"].numel() == 1000
    assert os.listdir(disk) == ["a.pt"]


def test_a_folder_that_cannot_be_written_is_everybodys_error(disk: Path) -> None:
    """A read-only file system: raised on all ranks, also for a sharded checkpoint, and the old file loads."""
    dw.save("old", disk / "a.pt")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=30)

    def on_rank() -> list[str]:
        texts = []
        for name, io in (("a.pt", "file"), ("parts", "sharded")):
            with pytest.raises(CheckpointError) as failure:
                dw.save("new", disk / name, io=io)
            texts.append(str(failure.value))
        return texts

    for texts in run_ranks(on_rank, 2, timeout=30):
        assert all("Read-only file system" in text for text in texts)
    assert dw.load(disk / "a.pt") == "old"
