"""A checkpoint of a model that has other layers by now: what has the same name is taken over, under any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from tests.slow import slow


class Before(nn.Module):
    """As it was saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


class After(nn.Module):
    """As it is by now: another head, of another name."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.new_head = nn.Linear(3, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.new_head(self.body(x))  # type: ignore[no-any-return]


def loaded(path: str, io: str) -> dict[str, Any]:
    model = dw.wrap_model(After())
    other = dw.wrap_model(After())
    with pytest.raises(RuntimeError, match="head"):
        dw.load(path, into={"model": model}, io=io)
    state = dw.load(path, into={"model": model, "other": [other]}, io=io, strict=False)
    assert state["epoch"] == 3
    with pytest.raises(RuntimeError, match="head"):  # the next load is strict again
        dw.load(path, into={"model": model}, io=io)
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "nprocs", "io"),
    [
        ("ddp", 2, "file"),
        ("fsdp", 2, "file"),
        slow("ddp", 1, "file", why="two ranks are in make test"),
        slow("zero1", 2, "file", why="fsdp is in make test"),
        slow("fsdp", 2, "sharded", why="a file is in make test"),
    ],
)
def test_what_has_the_same_name_is_taken_over(
    strategy: str, nprocs: int, io: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The rest stays as it is on every rank, a line names it, and other shapes are an error as ever."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")
    path = str(tmp_path / ("last.pt" if io == "file" else "last"))
    dw.save({"model": Before(), "epoch": 3}, path, io=io)
    run = distributed(nprocs=nprocs, launcher="forkserver", strategy=strategy, returns="all", timeout=60)(loaded)
    saved, own = Before().state_dict(), After().state_dict()
    for found in run(path, io):
        assert list(found) == list(own)
        for name, value in found.items():
            assert torch.equal(value, saved[name] if name in saved else own[name]), name
    said = capfd.readouterr().err
    assert said.count("After in state['model']: 2 not in the checkpoint: new_head.weight, new_head.bias") == 1
    assert said.count("After in state['model']: 2 not in the model: head.weight, head.bias") == 1
    assert said.count("load(strict=False): the checkpoint has no state['other'], which stays as it is") == 1


def test_another_shape_is_an_error_all_the_same(tmp_path: Path) -> None:
    """A tensor of the same name that does not fit is no other name."""
    dw.save({"model": Before()}, tmp_path / "last.pt")
    with pytest.raises(RuntimeError, match="size mismatch"):
        dw.load(tmp_path / "last.pt", into={"model": After(6)}, strict=False)
