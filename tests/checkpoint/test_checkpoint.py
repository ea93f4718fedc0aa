"""Checkpoints: whole or not at all, known to all ranks, and safe to load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import distwrap as dw
from distwrap.checkpoint.formats import FileIO
from distwrap.errors import CheckpointError, OptionError
from distwrap.testing import run_ranks
from tests.slow import slow


class Colour(Enum):
    RED = 1


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    """Numbers, strings, tensors and the like in any nesting are read back by the safe loader, equal and of one type."""
    state = {
        "epoch": 3,
        "loss": 0.5,
        "flags": (True, None, {1, 2}, b"x"),
        ("a", 1): [torch.arange(3), torch.Size([2]), torch.float16, torch.device("cpu"), 1j],
        "half": torch.ones(2, dtype=torch.bfloat16),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    dw.save(state, tmp_path / "last.pt")
    loaded = dw.load(str(tmp_path / "last.pt"))
    assert torch.equal(loaded[("a", 1)].pop(0), state[("a", 1)].pop(0))  # type: ignore[attr-defined]
    for name in ("half", "parameter"):
        assert torch.equal(loaded[name], state[name])  # type: ignore[arg-type]
        assert loaded.pop(name).dtype == state.pop(name).dtype  # type: ignore[attr-defined]
    assert loaded == state


def schedulers(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    yield lr_scheduler.StepLR(optimizer, 2)
    yield lr_scheduler.MultiStepLR(optimizer, [2, 4])
    yield lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    yield lr_scheduler.ReduceLROnPlateau(optimizer)
    yield lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ExponentialLR(optimizer, 0.5)] * 2, [1])


def test_objects_with_a_state_dict_may_stand_anywhere(tmp_path: Path) -> None:
    """Models, optimizers, schedulers and scalers are written as their state dicts, which load into new ones."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    dw.save({"nets": [model], "deep": {"optimizer": (optimizer, scaler)}}, tmp_path / "a.pt")
    loaded = dw.load(tmp_path / "a.pt")
    twin = nn.Linear(2, 2)
    twin.load_state_dict(loaded["nets"][0])
    assert torch.equal(twin.weight, model.weight)
    assert loaded["nets"][0]._metadata == model.state_dict()._metadata
    torch.optim.Adam(twin.parameters()).load_state_dict(loaded["deep"]["optimizer"][0])
    torch.amp.GradScaler("cpu").load_state_dict(loaded["deep"]["optimizer"][1])
    for scheduler in schedulers(optimizer):
        dw.save(scheduler, tmp_path / "b.pt")
        scheduler.load_state_dict(dw.load(tmp_path / "b.pt"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("compiled", [False, slow(True, why="imports the compiler")])
def test_no_wrapper_leaves_its_prefix(tmp_path: Path, compiled: bool) -> None:
    """A model wrapped by distwrap, by torch, or compiled is saved under its own names, by rank 0 for all."""

    def on_rank() -> None:
        net = nn.Linear(1, 1)
        wrapped = dw.wrap_model(net)
        models = [net, wrapped, nn.DataParallel(net), torch.compile(wrapped) if compiled else wrapped]
        dw.save([*models, nn.ModuleList([wrapped])], tmp_path / "a.pt")
        *alone, inside = dw.load(tmp_path / "a.pt")
        assert [list(state) for state in alone] == [["weight", "bias"]] * 4
        assert list(inside) == ["0.weight", "0.bias"]
        dw.load(tmp_path / "a.pt", into=[*models, nn.ModuleList([wrapped])])

    run_ranks(on_rank, 2)
    assert os.listdir(tmp_path) == ["a.pt"]


UNSAFE = {
    "state['a'][1] is a numpy.float64": {"a": [1, numpy.float64(1)]},
    "(use .item() or torch.as_tensor(…))": numpy.ones(2),
    "state['config']['colour'] is a tests.checkpoint.test_checkpoint.Colour": {"config": {"colour": Colour.RED}},
    "state's key <Colour.RED: 1> is a tests.checkpoint.test_checkpoint.Colour": {Colour.RED: 1},
    "state[0] is a builtins.function": (lambda: 1,),
    "state.state_dict()['_extra_state'] is a pathlib": type(
        "Extra", (nn.Module,), {"get_extra_state": lambda self: Path("x")}
    )(),
}


@pytest.mark.parametrize(("words", "state"), UNSAFE.items(), ids=[str(index) for index in range(len(UNSAFE))])
def test_what_the_safe_loader_would_refuse_is_named_by_its_path(words: str, state: object, tmp_path: Path) -> None:
    """An object that could not be loaded again is refused when saving, by its path; the file before is kept."""
    path = tmp_path / "last.pt"
    dw.save(1, path)
    with pytest.raises(CheckpointError) as refusal:
        dw.save(state, path)
    assert words in str(refusal.value)
    assert "What was there before is untouched" in str(refusal.value)
    assert dw.load(path) == 1
    assert os.listdir(tmp_path) == ["last.pt"]


def test_a_failure_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    """Where the writing breaks off in the middle of the file, the old file and the folder are as before."""

    class Breaking(torch.Tensor):
        def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
            raise OSError(28, "No space left on device")

    Breaking.__module__ = "torch"  # passes for a plain tensor, and breaks in the middle of the file
    path = tmp_path / "last.pt"
    dw.save({"epoch": 1}, path)
    with pytest.raises(CheckpointError, match="No space"):
        dw.save({"big": torch.ones(1000), "last": torch.ones(1).as_subclass(Breaking)}, path)
    assert dw.load(path) == {"epoch": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


def test_every_rank_learns_of_a_failure(tmp_path: Path) -> None:
    """A folder that is missing, and a path that is a folder, fail on every rank, in words that say why."""
    (tmp_path / "folder").mkdir()

    def on_rank() -> list[str]:
        messages = []
        for path in (tmp_path / "missing" / "a.pt", tmp_path / "folder"):
            with pytest.raises(CheckpointError) as failure:
                dw.save({"epoch": 1}, path)
            messages.append(str(failure.value))
        dw.save(dw.rank(), tmp_path / "a.pt")
        assert dw.load(tmp_path / "a.pt") == 0
        return messages

    one, other = run_ranks(on_rank, 2, timeout=20)
    assert one == other
    assert "was not written by rank 0" in one[0]
    assert f"there is no folder {tmp_path / 'missing'}. Make it before, by os.makedirs(" in one[0]
    assert "is a folder, and this checkpoint would be a file" in one[1]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "folder"]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    """Where a write fails and the disk has no room, the error says so, whatever torch says; else it does not."""

    class Failing(FileIO):
        def save(self, state: Any, path: Path) -> None:
            raise RuntimeError("unexpected pos 832 vs 726")

    def save() -> None:
        dw.save(1, tmp_path / "a.pt", background=background, io=Failing())
        dw.wait_for_saves()

    usage, words = shutil.disk_usage(tmp_path), []
    for free in (4096, usage.free + 2**30):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        with pytest.raises(CheckpointError, match="unexpected pos") as failure:
            save()
        words.append(str(failure.value))
    told = f"the disk of {tmp_path} is full (4.1 kB free): RuntimeError: unexpected pos 832 vs 726. What was there"
    assert [told in each for each in words] == [True, False]
    assert all(each.count("What was there before is untouched.") == 1 for each in words)
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_the_same_error_in_the_background(tmp_path: Path) -> None:
    """It is raised before anything is copied, and names the folder to make."""
    for background in (False, True):
        with pytest.raises(CheckpointError, match="no folder") as failure:
            dw.save(1, tmp_path / "missing" / "a.pt", background=background)
        assert ".tmp" not in str(failure.value)


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    """A new checkpoint honours the umask; one that replaces another keeps that one's mode."""
    path = tmp_path / "a.pt"
    before = os.umask(0o027)
    try:
        dw.save(1, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    dw.save(2, path)
    assert path.stat().st_mode & 0o777 == 0o604


def test_the_mask_of_the_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving sets no umask, not even for a moment, in which another thread may make a file."""
    monkeypatch.setattr(os, "umask", None)
    for _ in range(2):
        dw.save({"x": 1}, tmp_path / "a.pt", background=True)
    dw.wait_for_saves()


def test_a_folder_of_no_series_keeps_nothing(tmp_path: Path) -> None:
    """keep= is refused there, before anything is written."""
    with pytest.raises(OptionError, match="is a folder"):
        dw.save({"x": torch.ones(1)}, tmp_path / "last", io="sharded", keep=3)
    assert not list(tmp_path.iterdir())


def test_what_is_no_format_is_refused(tmp_path: Path) -> None:
    """A number is no file format."""
    with pytest.raises(CheckpointError, match="unknown format"):
        dw.save({"x": 1}, tmp_path / "a.pt", io=3)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is of what is not here")
@pytest.mark.parametrize("place", ["cuda", "cuda:7", torch.device("cuda"), "nosuch"])
def test_a_place_that_is_not_here_is_the_fault(place: str | torch.device, tmp_path: Path) -> None:
    """A good file on a device that this process lacks is not to be saved again: the place is to be left out."""
    dw.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=f"Leave map_location='{place}'") as caught:
        dw.load(tmp_path / "a.pt", map_location=place)
    assert "Save it again" not in str(caught.value)


def test_loading_says_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    """A missing file is FileNotFoundError; a broken or unsafe one is an error with a way out."""
    with pytest.raises(FileNotFoundError):
        dw.load(tmp_path / "missing.pt")
    (tmp_path / "broken.pt").write_bytes(b"hello")
    (tmp_path / "empty.pt").touch()
    numpy.savez(tmp_path / "zip.npz", a=numpy.ones(3))
    torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.ones(1)), tmp_path / "script.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "unsafe.pt")
    with pytest.raises(CheckpointError, match="damaged"):
        dw.load(tmp_path / "broken.pt")
    for name, why in (
        ("empty.pt", "it is empty"),
        ("zip.npz", "not written by torch"),
        ("script.pt", "TorchScript"),
        ("unsafe.pt", "linear.Linear.* Save it again"),
    ):
        with pytest.raises(CheckpointError, match=f"{name}: .*{why}"):
            dw.load(tmp_path / name)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """Two names for one tensor are one tensor in the file too."""
    weight = torch.ones(3)
    dw.save({"a": weight, "b": weight}, tmp_path / "a.pt")
    loaded = dw.load(tmp_path / "a.pt")
    loaded["a"][0] = 5
    assert loaded["b"][0] == 5
