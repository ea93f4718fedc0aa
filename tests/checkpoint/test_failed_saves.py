"""A save that fails leaves nothing behind, and the next one is right; ranks that differ get rank 0's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap.checkpoint import pieces, sharded
from distwrap.errors import CheckpointError
from distwrap.testing import run_ranks
from tests.checkpoint.test_streaming import made, same, save_and_wait, state_of, stepped


def failing(name: str, original: Any, error: Exception) -> Any:
    """Return a function that raises at its second call, when it writes a part, or when it makes room for a tensor."""
    calls = iter((True, False))

    def function(*args: Any, **options: Any) -> Any:
        for_tensor = isinstance(args[0], torch.Size) and [*options] == ["dtype", "device"]
        if name == "part" or (for_tensor if name == "make" else not next(calls, True)):
            raise error
        return original(*args, **options)

    return function


def save_after_failures(folder: Path) -> dict[str, Any]:
    """Save under fsdp, with a failure in every way before; return the state that was saved, and what was wrong."""
    patch = pytest.MonkeyPatch()
    model, optimizer = made()
    stepped(model, optimizer)
    whole = {"model": state_of(model), "optimizer": state_of(optimizer)}
    objects, wrong = {"model": model, "optimizer": optimizer}, []
    failures = {  # on which rank, what, and the words of it
        "send": (1, pieces, "_bytes_of", MemoryError("of rank 1"), "auto"),
        "take": (0, pieces, "part_of", MemoryError("of rank 0"), "auto"),
        "make": (0, torch, "empty", MemoryError("of rank 0"), "auto"),
        "part": (1, sharded.FileSystemWriter, "write_data", OSError("of rank 1"), "sharded"),
    }
    for background in (False, True):
        for name, (rank, where, function, error, io) in failures.items():
            if name == "make" and background:
                continue  # empty() is the training thread's too
            path = folder / f"{background}-{name}"
            if dw.rank() == rank:
                patch.setattr(where, function, failing(name, getattr(where, function), error))
            with pytest.raises(CheckpointError, match=f"of rank {rank}") as caught:
                save_and_wait(objects, path, io=io, background=background)
            patch.undo()
            if path.exists():
                wrong.append(f"{path} is there after {caught.value}")
            dw.save(objects, path, io=io)
            if not same(found := dw.load(path), whole):
                wrong.append(f"{path} holds {found}")
    dw.save({"model": model, "seen": torch.full((3,), dw.rank() + 1.0)}, folder / "parts", io="sharded")
    mixed = {f"of {dw.rank()}": torch.ones(dw.rank() + 1), "size": torch.ones(2 + dw.rank()), "alike": torch.ones(9)}
    dw.save(mixed, folder / "mixed", io="sharded")
    with pytest.raises(CheckpointError, match="in a set"):
        dw.save({"model": model, "words": {"a": {torch.ones(2)}}}, folder / "set.pt")
    with pytest.raises(CheckpointError, match="is a folder"):
        dw.save(model, folder / "parts", io="file")
    with pytest.raises(CheckpointError, match="is a file"):
        dw.save(model, folder / "False-send", io="sharded")
    assert wrong == []
    return whole


@pytest.mark.slow("imports FSDP")
def test_the_save_after_a_failure_is_right(tmp_path: Path) -> None:
    """Numbers that could not be sent, taken or written spoil no later file; of what differs rank 0's is saved."""
    whole = run_ranks(save_after_failures, 2, tmp_path, timeout=60)[0]
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".", "set"))]
    found = dw.load(tmp_path / "parts")
    assert same(found["model"], whole["model"])
    assert found["seen"].tolist() == [1, 1, 1]
    mixed = dw.load(tmp_path / "mixed")
    assert {name: len(value) for name, value in mixed.items()} == {"of 0": 1, "size": 2, "alike": 9}


def test_a_file_and_a_folder_do_not_replace_each_other(tmp_path: Path) -> None:
    """Each is told from the other before anything is written."""
    state = {"weight": torch.ones(2)}
    dw.save(state, tmp_path / "a.pt")
    (tmp_path / "b.pt").mkdir()
    for path, io in (("a.pt", "sharded"), ("a.pt", "safetensors"), ("b.pt", "file")):
        with pytest.raises(CheckpointError, match=r"is a (file|folder)"):
            dw.save(state, tmp_path / path, io=io)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Quantised tensors of more than a million numbers, and 250 levels of lists; what is deeper is not saved."""
    large = torch.rand(1500, 1000)
    state = {
        "quantised": torch.quantize_per_tensor(large, 0.1, 3, torch.qint8),
        "by row": torch.quantize_per_channel(
            large, torch.rand(1500), torch.zeros(1500, dtype=torch.int64), 0, torch.qint8
        ),
        "eight bits": large.to(torch.float8_e4m3fn),
        "four bits": torch.zeros(1500, 1000, dtype=torch.uint8).view(getattr(torch, "float4_e2m1fn_x2", torch.uint8)),
    }
    dw.save(state, tmp_path / "a.pt")
    found = dw.load(tmp_path / "a.pt")
    assert torch.equal(found["quantised"].int_repr(), state["quantised"].int_repr())
    assert torch.equal(found["by row"].int_repr(), state["by row"].int_repr())
    for name in ("eight bits", "four bits"):
        assert torch.equal(found[name].view(torch.uint8), state[name].view(torch.uint8))
    dw.save(nested(250), tmp_path / "deep.pt")
    assert dw.load(tmp_path / "deep.pt") == nested(250)
    for levels in (251, 400):
        with pytest.raises(CheckpointError, match="250 levels"):
            dw.save(nested(levels), tmp_path / "deep.pt")
