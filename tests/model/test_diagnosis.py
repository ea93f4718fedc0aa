"""DDP's own errors in the user's words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.testing import run_ranks
from tests.model.test_gradients import Checkpointed, x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.heads = nn.ModuleDict({"left": nn.Linear(2, 1), "right": nn.Linear(2, 1)})

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return self.heads[head](self.body(x))


def test_unused_parameters_are_named_with_their_module() -> None:
    """What had no gradient is named, grouped by module, on every rank, with the ways out."""

    def on_rank() -> str:
        model = dw.wrap_model(Branches())
        model(torch.ones(1, 2), "left").sum().backward()
        with pytest.raises(ModelError) as refusal:
            model(torch.ones(1, 2), "left")
        return str(refusal.value)

    for rank, text in enumerate(run_ranks(on_rank, 2)):
        assert text.startswith(f"rank {rank}: in its last step some parameters had no gradient")
        assert "On every rank:\n  heads.right: weight, bias\n" in text
        assert "find_unused_parameters=True" in text


def test_a_rank_that_goes_its_own_way_is_named() -> None:
    """Where only one rank leaves a part out, the error says which."""

    def on_rank() -> None:
        model = dw.wrap_model(Branches())
        for _ in range(2):
            y = model(torch.ones(1, 2), "left") + (model.heads["right"](torch.ones(1, 2)) if dw.rank() != 1 else 0)
            y.sum().backward()

    with pytest.raises(ModelError) as refusal:
        run_ranks(on_rank, 3, timeout=30)
    assert "Only on rank 1, so the ranks took different branches" in str(refusal.value)
    assert "heads.right: weight, bias" in str(refusal.value)


def test_parameters_frozen_after_wrapping_are_named() -> None:
    """A part frozen after wrapping is told apart from one that is merely unused."""

    def on_rank() -> str:
        model: Any = dw.wrap_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
        model(torch.ones(1, 2)).sum().backward()
        model[0].requires_grad_(False)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ModelError) as refusal:
            model(torch.ones(1, 2))
        return str(refusal.value)

    assert all("0.weight, 0.bias were frozen after wrap_model()" in text for text in run_ranks(on_rank, 2))


def test_reentrant_checkpointing_is_explained_with_both_ways_out() -> None:
    """A part that is run twice under reentrant checkpointing is named, with ``use_reentrant`` and ``static_graph``."""

    def on_rank() -> None:
        model = dw.wrap_model(Checkpointed(reentrant=True, twice=True))
        model(x()).sum().backward()

    with pytest.raises(ModelError) as refusal:
        run_ranks(on_rank, 2, timeout=30)
    text = str(refusal.value)
    assert "'body." in text
    assert "use_reentrant=False" in text
    assert "static_graph=True" in text


def test_backward_explains_at_its_place() -> None:
    """``distwrap.backward`` raises the explained error itself, where a loop can catch it."""

    def on_rank() -> None:
        model = dw.wrap_model(Checkpointed(reentrant=True, twice=True))
        with pytest.raises(ModelError, match="one backward"):
            dw.backward(model(x()).sum())

    run_ranks(on_rank, 2, timeout=30)


def test_other_errors_stay_as_they_are() -> None:
    """An error of the model's own is raised as it is."""

    def on_rank() -> None:
        model = dw.wrap_model(Branches())
        with pytest.raises(RuntimeError, match="mat1 and mat2") as refusal:
            model(torch.ones(1, 3), "left")
        assert not isinstance(refusal.value, ModelError)
        with pytest.raises(KeyError):
            model(torch.ones(1, 2), "middle")

    run_ranks(on_rank, 2)


def test_a_backward_that_was_broken_off_is_named() -> None:
    """A loop that catches an error amid a backward, is told so at the next forward, or goes on rightly."""

    def on_rank(where: str) -> list[float] | str:
        torch.manual_seed(0)
        model = dw.wrap_model(nn.Linear(4, 1).double())
        weight = model.module.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for number in range(3):
                optimizer.zero_grad()
                output = model(torch.full((2, 4), number + 1.0, dtype=torch.float64))
                handle = (output if where == "before any gradient" else weight).register_hook(_broken(number))
                try:
                    output.square().mean().backward()
                except ValueError:
                    continue
                finally:
                    handle.remove()
                optimizer.step()
        except ModelError as error:
            return str(error)
        return model.module.weight.flatten().tolist()

    def _broken(number: int) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            if number == 1:
                raise ValueError("a bad batch")

        return hook

    one = run_ranks(on_rank, 1, "amid them")
    assert run_ranks(on_rank, 2, "before any gradient") == [pytest.approx(one[0])] * 2
    for words in run_ranks(on_rank, 2, "amid them"):
        assert isinstance(words, str)
        assert "error of the backward before" in words
