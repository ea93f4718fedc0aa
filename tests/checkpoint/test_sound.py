"""Checkpoints in situations in which they were silently lost, or not those that the program meant."""

from __future__ import annotations

import os
import stat
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
from distwrap.supervision.activity import Activity
from distwrap.testing import run_ranks, simulate
from tests.interpreters import run_python
from tests.limits import SOON

# Which ranks save


class Slow(FileIO):
    """A file that takes a moment to write."""

    def save(self, state: Any, path: Path) -> None:
        time.sleep(0.3)
        super().save(state, path)


@pytest.mark.parametrize("background", [False, True])
def test_alone_and_then_together(tmp_path: Path, background: bool) -> None:
    """After a save of rank 0 alone, the others wait for the joint one of the same name, and learn of its failure."""
    path = tmp_path / "a.pt"

    def on_rank() -> str:
        if dw.rank() == 0:
            dw.save({"step": 1}, path, background=background, alone=True)
        dw.save({"step": 2}, path, io=Slow())
        assert dw.load(path) == {"step": 2}
        dw.barrier()
        if dw.is_rank_zero():
            dw.save({"step": 3}, path, alone=True)
            dw.rank_zero_only(dw.save)({"step": 4}, path)
        with pytest.raises(CheckpointError) as failure:
            dw.save({"step": object()}, path)
        return str(failure.value)

    one, other = run_ranks(on_rank, 2)
    assert one == other
    assert "builtins.object" in one
    assert dw.load(path) == {"step": 4}


def test_in_a_group_that_the_user_made(tmp_path: Path) -> None:
    """Rank 0 may save alone there too: it is no collective, into which another rank's next one would run."""
    path = tmp_path / "a.pt"

    def on_rank() -> tuple[float, str]:
        world = current_world()
        deactivate()  # what is left is torch's group alone, as a program of the user's makes it
        try:
            if dw.rank() == 0:
                dw.save({"step": 1}, path, alone=True)
            assert dw.reduce(float(dw.rank()), "sum") == 1.0
            dw.save({"step": 2}, path, io=Slow())
            assert dw.load(path) == {"step": 2}
            with pytest.raises(CheckpointError) as failure:
                dw.save({"step": object()}, path)
            return dw.reduce(1.0, "sum"), str(failure.value)
        finally:
            activate(world)

    one, other = run_ranks(on_rank, 2)
    assert one == other
    assert one[0] == 2.0
    assert "builtins.object" in one[1]


@pytest.mark.parametrize("io", ["auto", "sharded"])
def test_a_name_with_the_rank_in_it_is_refused(tmp_path: Path, io: str) -> None:
    """Rank 0 writes for all; a rank that means to write a file of its own is told so, and does not wait for it."""

    def on_rank() -> None:
        dw.save({"rank": dw.rank()}, tmp_path / f"x2-{dw.rank()}.pt", io=io)
        dw.barrier()

    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"rank 1 .*x2-1\.pt.*rank 0 .*x2-0\.pt"):
        run_ranks(on_rank, 2, timeout=SOON)
    assert time.monotonic() - began < SOON / 2


def test_each_rank_may_save_alone(tmp_path: Path) -> None:
    """A file of its own, while the others do something else, and wait for what it writes in the background."""

    def on_rank() -> None:
        dw.save({"rank": dw.rank()}, tmp_path / f"{dw.rank()}.pt", alone=True)
        if dw.rank() == 1:
            dw.save({"rank": 7}, tmp_path / "7.pt", alone=True, background=True)
            dw.wait_for_saves(alone=True)
            assert dw.load(tmp_path / "7.pt") == {"rank": 7}
        dw.save({"all": True}, tmp_path / "all.pt")
        with pytest.raises(CheckpointError, match="no folder"):
            dw.save({}, tmp_path / "gone" / "a.pt", alone=True)

    run_ranks(on_rank, 2)
    assert sorted(os.listdir(tmp_path)) == ["0.pt", "1.pt", "7.pt", "all.pt"]
    assert dw.load(tmp_path / "1.pt") == {"rank": 1}


def test_one_rank_cannot_save_what_all_hold(tmp_path: Path) -> None:
    """A folder of parts, or the run's state, is refused by name, before anything is written."""

    def on_rank() -> None:
        for state, io in (({"x": 1}, "sharded"), ({"run": dw.run_state()}, "file")):
            with pytest.raises(CheckpointError, match=r"alone=True\) for .* one rank cannot"):
                dw.save(state, tmp_path / "a", io=io, alone=True)

    run_ranks(on_rank, 2)
    assert not os.listdir(tmp_path)


def test_a_save_is_one_from_whichever_line(tmp_path: Path) -> None:
    """Ranks meet in their calls, and not in lines of the program."""

    def on_rank() -> None:
        if dw.is_rank_zero():
            dw.save(1, tmp_path / "a.pt")
        else:
            dw.save(2, tmp_path / "a.pt")

    run_ranks(on_rank, 2)
    assert dw.load(tmp_path / "a.pt") == 1


@pytest.mark.parametrize("then", ["leaves", "gathers", "steps", "waits for it", "saves later"])
def test_a_save_of_rank_zero_alone_without_the_word_is_an_error(tmp_path: Path, then: str) -> None:
    """Wherever the other rank is, the error names the word; also where its next save would be taken for this one."""

    def on_rank() -> None:
        model = dw.wrap_model(torch.nn.Linear(2, 1))
        if dw.is_rank_zero():
            dw.save(model, tmp_path / "a.pt")
        if then == "gathers":
            dw.gather_object(1)
        if then == "steps":
            model(torch.ones(2, 2)).sum().backward()
        if then == "waits for it":
            dw.rank_zero_only(lambda: 1, broadcast=True)()  # type: ignore[call-overload]
        if then == "saves later" and not dw.is_rank_zero():
            current_world().part(Activity).begin_collective("an exchange that does not block, as on an accelerator")
            dw.save(model, tmp_path / "a.pt")

    with pytest.raises(CheckpointError, match="alone=True"):
        run_ranks(on_rank, 2, timeout=60)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("ranks", [3, 5])
def test_it_is_an_error_on_simulated_ranks_too(tmp_path: Path, ranks: int) -> None:
    """Where some ranks wait for the save, and others for the next collective."""

    def on_rank() -> None:
        if dw.rank() in (0, 2):
            dw.save({"x": 1}, tmp_path / "a.pt")
        dw.gather_object(1)

    with pytest.raises(CheckpointError, match="alone=True"):
        simulate(on_rank, ranks)
    assert not os.listdir(tmp_path)


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    """One that computes, or sleeps, comes: nobody may say that it does not."""

    def on_rank() -> None:
        if not dw.is_rank_zero():
            time.sleep(3)
        dw.save({"x": 1}, tmp_path / "a.pt")
        dw.gather_object(1)

    run_ranks(on_rank, 2)


def test_paths_that_differ_are_told(tmp_path: Path) -> None:
    """Each rank has a temporary folder of its own: the error names both paths, and nothing is written."""

    def on_rank() -> None:
        dw.save(1, tmp_path / ("of_zero.pt" if dw.is_rank_zero() else "of_one.pt"))

    with pytest.raises(CheckpointError, match=r"of_one\.pt.*rank 0 .*of_zero\.pt"):
        run_ranks(on_rank, 2, timeout=2)
    assert not os.listdir(tmp_path)


class Leaving(FileIO):
    """A file in whose midst the process is to end."""

    def save(self, state: Any, path: Path) -> None:
        raise SystemExit(3)


def test_an_end_of_the_process_in_a_save_is_everybodys_error(tmp_path: Path) -> None:
    """Where rank 0 does not finish, the others do not believe that it has."""

    def on_rank() -> None:
        with pytest.raises(SystemExit if dw.is_rank_zero() else CheckpointError):
            dw.save(1, tmp_path / "a.pt", io=Leaving())

    run_ranks(on_rank, 2)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("writer", "words"), [(1, "by rank 1 on"), (0, "No space left")])
def test_a_part_that_fails_before_the_others_are_written(tmp_path: Path, writer: int, words: str) -> None:
    """Of a sharded checkpoint too: what one rank cannot write leaves no rank waiting for it."""

    def on_rank() -> str:
        class Breaking(str):
            def __reduce__(self) -> Any:
                raise OSError(28, "No space left on device")

        if writer == 0:
            Breaking.__module__ = "torch"  # passes for a plain value, and breaks off while it is written
        state = {"x": torch.ones(4), "y": Breaking() if dw.rank() == writer else 1}
        with pytest.raises(CheckpointError) as failure:
            dw.save(state, tmp_path / "a", io="sharded")
        dw.barrier()
        return str(failure.value)

    one, other = run_ranks(on_rank, 2, timeout=20)
    assert one == other
    assert words in one


# What is kept


def test_only_what_is_named_as_a_series_is_one(tmp_path: Path) -> None:
    """A number that belongs to a name counts nothing: ``keep`` removes no other model."""
    others = ["resnet18.pt", "resnet34.pt", "llama-7b.pt", "unet_2_layers.pt", "model-v1.5.pt", "v1.pt"]
    for name in others:
        (tmp_path / name).write_text("mine")
    saved = ["resnet50.pt", "llama-13b.pt", "unet_3_layers.pt", "model-v1.6.pt", "v2.pt"]
    for epoch in range(2):
        for name in saved:
            dw.save({"epoch": epoch}, tmp_path / name, keep=1)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, *saved])
    for epoch in range(2):
        dw.save({"epoch": epoch}, tmp_path / "resnet50.pt", keep=2)
    assert dw.load(tmp_path / "resnet50.pt.1") == {"epoch": 0}


@pytest.mark.parametrize("name", ["step-{}.pt", "epoch{}.pt", "{}.pt", "run-3_{}", "ckpt.{}.pt", "epoch={}-ema.pt"])
def test_a_series_counts(tmp_path: Path, name: str) -> None:
    """After a separator, or a word that counts, a number is that of a series."""
    for step in (8, 9, 10):
        dw.save({"step": step}, tmp_path / name.format(step), keep=2)
    assert sorted(os.listdir(tmp_path)) == sorted(name.format(each) for each in (9, 10, "latest"))


def test_a_series_has_no_folders_of_another_kind(tmp_path: Path) -> None:
    """Folders of runs, beside files of their names, are no checkpoints."""
    for run in (1, 2):
        (tmp_path / f"run-{run}").mkdir()
        (tmp_path / f"run-{run}" / "log.txt").write_text("mine")
    dw.save(1, tmp_path / "run-3", keep=1)
    dw.save({"w": torch.ones(1)}, tmp_path / "run-4", keep=1, io="sharded")
    assert sorted(os.listdir(tmp_path)) == ["run-1", "run-2", "run-3", "run-4", "run-latest"]


def test_a_sharded_checkpoint_replaces_no_other_folder(tmp_path: Path) -> None:
    """A folder that holds something else is not replaced; an empty one is."""
    (tmp_path / "runs").mkdir()
    dw.save({"w": torch.ones(1)}, tmp_path / "runs", io="sharded")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"log\.txt"):
        dw.save({"w": torch.ones(1)}, tmp_path / "logs", io="sharded")
    assert os.listdir(tmp_path / "logs") == ["log.txt"]


# Links, devices


@pytest.mark.parametrize("io", ["file", "sharded"])
def test_a_save_goes_through_a_link(tmp_path: Path, io: str) -> None:
    """The link stays, and what it points to is replaced, whether it was there or not; so are its predecessors."""
    (tmp_path / "big").mkdir()
    link = tmp_path / "last.pt"
    link.symlink_to(Path("big", "there.pt"))
    for step in range(3):
        dw.save({"step": step}, link, io=io, keep=None if io == "sharded" else 2)
        assert dw.load(link) == {"step": step}
    assert os.readlink(link) == "big/there.pt"
    assert sorted(os.listdir(tmp_path / "big")) == ["there.pt", "there.pt.1"][: 1 if io == "sharded" else 2]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
    if io == "file":
        assert dw.load(tmp_path / "big" / "there.pt.1") == {"step": 1}


@pytest.fixture(params=["fifo", "device"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "no-file.pt"
    if request.param == "fifo":
        os.mkfifo(path)
        return path
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root may make a device")
    return path


def test_devices_and_pipes_are_refused(no_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are not replaced by a file, by ``save`` or by ``strip --force``, also through a link."""
    before, link = no_file.stat(), no_file.parent / "link.pt"
    link.symlink_to(no_file)
    for path in (no_file, link):
        for options in ({}, {"io": "sharded"}, {"background": True}):
            with pytest.raises(CheckpointError, match=r"is a (FIFO|device)"):
                dw.save({"w": torch.ones(1)}, path, **options)  # type: ignore[arg-type]
    dw.save({"module.w": torch.ones(1)}, no_file.parent / "in.pt")
    assert main(["strip", str(no_file.parent / "in.pt"), str(no_file), "--force"]) == 2
    assert "and neither a file nor a folder" in capsys.readouterr().err
    assert (no_file.stat().st_mode, no_file.stat().st_ino) == (before.st_mode, before.st_ino)


def test_strip_goes_through_a_link(tmp_path: Path) -> None:
    """So does ``strip --force``."""
    dw.save({"module.w": torch.ones(1)}, tmp_path / "in.pt")
    (tmp_path / "out.pt").symlink_to("there.pt")
    assert main(["strip", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--force"]) == 0
    assert os.readlink(tmp_path / "out.pt") == "there.pt"
    assert list(dw.load(tmp_path / "there.pt")) == ["w"]


# Going on


def test_resume_from_knows_the_file_before(tmp_path: Path) -> None:
    """Killed while a folder takes its name, or without the newest of a series, a run goes on from what is there."""
    dw.save({"step": 3}, tmp_path / "parts", io="sharded")
    os.rename(tmp_path / "parts", tmp_path / ".parts.previous")

    def on_rank() -> Any:
        return dw.resume_from(tmp_path / "parts")

    assert run_ranks(on_rank, 2) == [{"step": 3}] * 2
    for step in (8, 9, 10):
        dw.save({"step": step}, tmp_path / f"step-{step}.pt", keep=3)
    (tmp_path / "step-10.pt").unlink()
    assert dw.resume_from(tmp_path / "step-latest.pt") == {"step": 9}
    for step in (8, 9):
        (tmp_path / f"step-{step}.pt").unlink()
    assert dw.resume_from(tmp_path / "step-latest.pt") is None  # of a run that begins anew


# The last save in the background

PROGRAM = """
import sys
import distwrap as dw
from distwrap.checkpoint.formats import FileIO

class Full(FileIO):
    def save(self, state, path):
        raise OSError(28, "No space left on device")

dw.save(1, sys.argv[2], background=True, io=Full())
if sys.argv[1] == "before":  # a run of its own, which ends well
    dw.distributed(nprocs=1)(lambda: None)()
print("trained")
"""


@pytest.mark.parametrize("where", ["last", "before"])
@pytest.mark.slow("runs a program")
def test_a_failure_in_the_background_ends_a_program_without_the_decorator(tmp_path: Path, where: str) -> None:
    """Nobody waits for the last one there, so the program ends with an error."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python(tmp_path / "program.py", where, tmp_path / "a.pt", timeout=SOON)
    assert done.returncode == 1
    assert done.stdout == "trained\n"
    assert "No space left on device" in done.stderr
    assert "a.pt" in done.stderr


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


def test_a_pattern_is_no_checkpoint(tmp_path: Path) -> None:
    """A pattern of names is refused, where None would begin the training anew."""
    dw.save({"step": 1}, tmp_path / "step-1.pt")
    with pytest.raises(CheckpointError, match="no pattern"):
        dw.resume_from(tmp_path / "step*.pt")
