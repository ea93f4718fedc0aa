"""Checkpoints of a model that no rank has: its tensors come to rank 0 one at a time, also while training goes on."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import distwrap as dw
from distwrap.checkpoint import SafetensorsIO
from distwrap.checkpoint.formats import FileIO
from distwrap.errors import CheckpointError, OptionError
from distwrap.strategies.fsdp import FSDPStrategy
from distwrap.testing import run_ranks

EACH = 2**23  # bytes of a tensor


class Net(nn.Module):
    """Blocks of which no number of ranks divides the rows, a tied and a frozen weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        self.last = nn.Linear(5, 1, dtype=torch.float64)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


def state_of(thing: Any) -> dict[str, Any]:
    """Return the full state, of a moment."""
    return copy.deepcopy(dict(FSDPStrategy().state(thing, everywhere=True)))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = dw.wrap_model(Net(), strategy="fsdp", same_inputs=True)
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(6, 3, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Full(FileIO):
    """A file on a disk that is full after one tensor."""

    def stream(self, state: Any, path: Path, wholes: Iterator[torch.Tensor]) -> None:
        next(wholes)
        raise OSError("No space left on device")


def save_and_wait(*args: Any, **options: Any) -> None:
    dw.save(*args, **options)
    dw.wait_for_saves()


def save_in_all_ways(folder: Path) -> list[dict[str, Any]]:
    """Save now, and in the background while the next steps are under way; return the states that were saved."""
    model, optimizer = made()
    states = []
    for background in (False, True):
        for name in ("file.pt", "parts", "model.safetensors", "folder"):
            stepped(model, optimizer)
            states.append({"model": state_of(model), "optimizer": state_of(optimizer)})
            shared = torch.arange(6.0)
            extra = {"epoch": dw.rank(), "views": [shared, shared[2:4]], "none": torch.zeros(0, 3)}
            state = {"model": model, "optimizer": optimizer, **extra} if name in ("file.pt", "parts") else model
            io: Any = {"parts": "sharded", "folder": SafetensorsIO(max_shard_size=100)}.get(name, "auto")
            dw.save(state, folder / f"{background}-{name}", io=io, background=background)
    stepped(model, optimizer)
    dw.wait_for_saves()
    for background in (False, True):  # where rank 0 cannot write, nobody waits to send it a tensor
        for place, io in ((folder / "gone" / "a.pt", "auto"), (folder / "full.pt", Full())):
            with pytest.raises(CheckpointError, match=r"rank 0 .*(gone|No space)"):
                save_and_wait(model, place, io=io, background=background)
    with pytest.raises(CheckpointError, match="sparse"):
        dw.save({"model": model, "words": torch.eye(2).to_sparse()}, folder / "sparse.pt")
    with pytest.raises(CheckpointError, match="dict of names"):
        dw.save({"model": model}, folder / "nested.safetensors")
    with pytest.raises(CheckpointError, match=r"\['f'\] is a .*function"):
        dw.save({"model": model, "f": made}, folder / "function.pt")
    return states


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def states(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(save_in_all_ways, 2, folder, timeout=60)[0]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return type(found) is torch.Tensor and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@pytest.mark.slow("saves models of many megabytes")
def test_a_file_holds_what_one_process_would_save(folder: Path, states: list[dict[str, Any]]) -> None:
    """Plain torch reads it; what is no part of the model is in it, with the memory that it shares."""
    for background, state in ((False, states[0]), (True, states[4])):
        found = torch.load(folder / f"{background}-file.pt", weights_only=True)
        assert same({name: found[name] for name in state}, state), background
        assert found["epoch"] == 0
        shared, view = found["views"]
        assert shared.tolist() == [0, 1, 2, 3, 4, 5]
        assert view.data_ptr() == shared.data_ptr() + 8
        assert found["none"].shape == (0, 3)
    assert not [name for name in os.listdir(folder) if name.startswith((".", "sparse", "nested", "function", "full"))]


def test_parts_hold_what_the_ranks_had(folder: Path, states: list[dict[str, Any]]) -> None:
    """Also those that were written while the ranks trained on; torch alone reads them by the tensors' names."""
    import torch.distributed.checkpoint as dcp

    for background, state in ((False, states[1]), (True, states[5])):
        found = dw.load(folder / f"{background}-parts")
        assert same({name: found[name] for name in state}, state), background
        plain = {"model.first.weight": torch.empty(5, 3, dtype=torch.float64)}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(plain, checkpoint_id=str(folder / f"{background}-parts"))
        assert torch.equal(plain["model.first.weight"], state["model"]["first.weight"])


def test_safetensors_hold_the_model(folder: Path, states: list[dict[str, Any]]) -> None:
    """In one file, or in several of at most a size with an index as Hugging Face has them."""
    for background, first in ((False, 2), (True, 6)):
        expected = states[first]["model"]
        one = safetensors.torch.load_file(folder / f"{background}-model.safetensors")
        assert one.keys() == expected.keys()
        assert all(same(one[name], value) for name, value in expected.items())
        several, expected = folder / f"{background}-folder", states[first + 1]["model"]
        index = json.loads((several / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
        assert names == [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
        assert index["metadata"] == {"total_size": sum(value.nbytes for value in expected.values())}
        by_hand: dict[str, Any] = {}
        for name in names:
            part = safetensors.torch.load_file(several / name)
            assert {index["weight_map"][key] for key in part} == {name}
            assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= 100
            by_hand |= part
        for found in (by_hand, dw.load(several), dw.load(several / "model.safetensors.index.json")):
            assert found.keys() == expected.keys()
            assert all(same(found[name], value) for name, value in expected.items())


def peak_of(work: Any) -> int:
    """Return how many bytes a process takes more while it does some work."""
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    work()
    return (kilobytes("VmHWM") - before) * 1024


def kilobytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


@pytest.mark.slow("saves models of many megabytes")
def test_no_rank_holds_it_all(tmp_path: Path) -> None:
    """A rank takes two tensors beside its share, of 8; loading parts takes it as long again as its share."""

    def on_rank() -> list[int]:
        net = nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(8)))
        model = dw.wrap_model(net, strategy="fsdp")
        taken = []
        for name, io in (("warm.pt", "file"), ("a.pt", "file"), ("a.safetensors", "safetensors"), ("a", "sharded")):
            taken.append(peak_of(lambda: dw.save(model, tmp_path / name, io=io)) - 2 * EACH)  # noqa: B023
        dw.save(model, tmp_path / "b.pt", background=True)
        dw.wait_for_saves()
        taken.append(peak_of(lambda: dw.load(tmp_path / "a", into=model)) - 4 * EACH - 2 * EACH)
        taken.append(peak_of(lambda: dw.load(tmp_path / "a.pt", into=model)) - 4 * EACH - 4 * EACH)  # and mapped, 4
        taken.append(peak_of(lambda: dw.load(tmp_path / "a.safetensors", into=model)) - 4 * EACH - 4 * EACH)
        return [size // 2**20 for size in taken[1:]]

    for taken in run_ranks(on_rank, 2, timeout=60):
        assert max(taken) < 8, taken
    whole = torch.load(tmp_path / "b.pt", weights_only=True)
    assert [value.shape for value in whole.values()] == [(1024, 2048)] * 8


def test_a_rank_that_fails_during_a_save_in_the_background_ends_the_others(tmp_path: Path) -> None:
    """What was being written is there whole, or not at all."""

    def on_rank() -> None:
        net = nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(4)))
        model = dw.wrap_model(net, strategy="fsdp")
        dw.save(model, tmp_path / "a.pt", background=True)
        dw.barrier()
        if dw.rank() == 1:
            raise KeyError("of rank 1")
        dw.barrier()

    with pytest.raises(KeyError, match="of rank 1"):
        run_ranks(on_rank, 2, timeout=60)
    for path in tmp_path.glob("a.pt"):
        assert len(torch.load(path, weights_only=True)) == 4


def test_a_folder_that_holds_more_than_a_model_is_not_replaced(tmp_path: Path) -> None:
    """A model of Hugging Face's stays with its configuration; an index that leads elsewhere is no index."""
    dw.save(nn.Linear(2, 1), tmp_path / "net", io="safetensors")
    dw.save(nn.Linear(2, 3), tmp_path / "net", io="safetensors")
    assert dw.load(tmp_path / "net")["weight"].shape == (3, 2)
    (tmp_path / "net" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds config\.json"):
        dw.save(nn.Linear(2, 1), tmp_path / "net", io="safetensors")
    assert dw.load(tmp_path / "net")["weight"].shape == (3, 2)
    index = tmp_path / "net" / "model.safetensors.index.json"
    for text, message in (
        ("[]", "no 'weight_map'"),
        ('{"weight_map": {"w": "../a.safetensors"}}', "'w' is in"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "is missing"),
        ('{"weight_map": {"w": "model.safetensors"}}', "has no 'w'"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            dw.load(tmp_path / "net")
    with pytest.raises(OptionError, match="is not a size"):
        SafetensorsIO(max_shard_size="5 apples")
