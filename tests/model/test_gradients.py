"""Gradients that would not be averaged are an error at once, which names what ran past the wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.testing import run_ranks
from tests.model.test_forward_routing import Net, batches, share
from tests.slow import few


def x() -> torch.Tensor:
    return share(batches()[0])


def past_by_module(model: Any, net: Any) -> None:
    model.module.loss(x()).backward()


def past_by_unwrapping(model: Any, net: Any) -> None:
    dw.unwrap_model(model).loss(x()).backward()


def past_by_the_bare_model(model: Any, net: Any) -> None:
    net(x()).sum().backward()


def past_by_a_bare_method(model: Any, net: Any) -> None:
    loss = net.by_parts(x())
    loss.backward()


def past_by_a_part(model: Any, net: Any) -> None:
    model.body(x()).sum().backward()


PAST = [past_by_module, past_by_unwrapping, past_by_the_bare_model, past_by_a_bare_method, past_by_a_part]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("way", few(PAST, 3), ids=lambda way: way.__name__)
def test_a_backward_past_the_reducer_raises(way: Callable[[Any, Any], None], first: bool) -> None:
    """Whether or not there was a right step before, the first wrong backward is an error on every rank."""

    def on_rank() -> str:
        net = Net()
        model = dw.wrap_model(net)
        if first:
            model.loss(x()).backward()
        with pytest.raises(ModelError) as refusal:
            way(model, net)
        return str(refusal.value)

    for rank, text in enumerate(run_ranks(on_rank, 2)):
        assert text.startswith(f"rank {rank}: this backward's gradients are not averaged")
        assert "with the other ranks' of Net, so that every rank" in text


def test_a_second_backward_through_one_forward_raises() -> None:
    """DDP averages once for a forward; torch would leave the second backward's gradients apart without a word."""

    def on_rank() -> str:
        model: Any = dw.wrap_model(Net())
        y = model(x())
        y.sum().backward(retain_graph=True)
        with pytest.raises(ModelError) as refusal:
            y.pow(2).sum().backward()
        return str(refusal.value)

    assert all("(a + b).backward()" in text for text in run_ranks(on_rank, 2))


def gan_step(model: Any, real: torch.Tensor, fake: torch.Tensor) -> None:
    """The discriminator's step of DCGAN: two forwards, then two backwards."""
    on_real, on_fake = model(real), model(fake)
    (1 - on_real).pow(2).mean().backward()
    on_fake.pow(2).mean().backward()


def gan_step_in_one(model: Any, real: torch.Tensor, fake: torch.Tensor) -> None:
    """The same with one backward."""
    ((1 - model(real)).pow(2).mean() + model(fake).pow(2).mean()).backward()


@pytest.mark.parametrize("step", [gan_step, gan_step_in_one])
def test_a_gans_step_with_two_forwards_works_unchanged(step: Callable[..., None]) -> None:
    """Several forwards of one network, with BatchNorm in training mode, then the backwards: as one process, or raised.

    Compared with torch's DDP, whose average the first way leaves out. BatchNorm sees a rank's own batch in both.
    """

    class Discriminator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    def on_rank() -> tuple[list[float], list[float]]:
        bare, twin = Discriminator(), Discriminator()
        model = dw.wrap_model(bare)
        for both in batches():
            real, fake = share(both), -share(both)
            step(model, real, fake)
            step(twin, real, fake)
        expected = dw.reduce([p.grad for p in twin.parameters()])
        return [p.grad.tolist() for p in bare.parameters()], [value.tolist() for value in expected]

    for found, expected in run_ranks(on_rank, 2):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-12)


def test_no_sync_must_cover_forward_and_backward() -> None:
    """A forward in ``no_sync()`` whose backward is outside, also by the flag that people set, is an error."""

    def on_rank() -> list[str]:
        texts = []
        model: Any = dw.wrap_model(Net())
        with model.no_sync():
            y = model(x()).sum()
        with pytest.raises(ModelError) as refusal:
            y.backward()
        texts.append(str(refusal.value))
        model.zero_grad()
        model.require_backward_grad_sync = False
        y = model.loss(x())
        model.require_backward_grad_sync = True  # as nanoGPT's successors do: before the backward, after the forward
        with pytest.raises(ModelError) as refusal:
            y.backward()
        return [*texts, str(refusal.value)]

    for texts in run_ranks(on_rank, 2):
        assert all("was in no_sync(), but its backward is not" in text for text in texts)


def test_local_accumulation_is_left_alone() -> None:
    """In ``no_sync()`` anything goes, as often as one likes; the next backward outside averages all of it."""

    def on_rank() -> list[float]:
        net = Net()
        model: Any = dw.wrap_model(net)
        with model.no_sync():
            for _ in range(2):
                model.loss(x()).backward()
                net.by_parts(x()).backward()
            y = model.loss(x())
            y.backward(retain_graph=True)
            y.backward()
        model.loss(x()).backward()
        dw.assert_in_sync(model)
        return [p.grad.sum().item() for p in net.parameters()]

    one, other = run_ranks(on_rank, 2)
    assert one == other


class Checkpointed(Net):
    def __init__(self, reentrant: bool, twice: bool = False) -> None:
        super().__init__()
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(1 + self.twice):
            x = x + checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.head(self.body(x)) * self.scale

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).sum(1, keepdim=True).expand(-1, 3)


@pytest.mark.parametrize(
    ("reentrant", "twice", "options"), [(False, True, {}), (False, False, {}), (True, True, {"static_graph": True})]
)
def test_activation_checkpointing_trains(reentrant: bool, twice: bool, options: dict[str, Any]) -> None:
    """Checkpointed parts, whose gradients may come in a backward within the backward, are as in one process."""

    def on_rank() -> list[float]:
        model = dw.wrap_model(Checkpointed(reentrant, twice), **(options if dw.world_size() > 1 else {}))
        for _ in range(3):
            model(x()).pow(2).mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()

    [expected] = run_ranks(on_rank, 1)
    for gradients in run_ranks(on_rank, 2):
        assert gradients == pytest.approx(expected, rel=1e-9)


def test_a_parameter_unfrozen_after_wrapping_is_named() -> None:
    """A gradient that reaches what was frozen when the model was wrapped is an error; wrapping again mends it."""

    def on_rank() -> tuple[str, float]:
        net = Net()
        net.body.requires_grad_(False)
        model: Any = dw.wrap_model(net)
        model.loss(x()).backward()
        net.body.weight.requires_grad_(True)
        with pytest.raises(ModelError) as refusal:
            model.loss(x()).backward()
        model = dw.wrap_model(dw.unwrap_model(model))
        model.zero_grad()
        model.loss(x()).backward()
        return str(refusal.value), net.body.weight.grad.sum().item()

    (text, one), (_, other) = run_ranks(on_rank, 2)
    assert "'body.weight' was frozen when wrap_model() was called" in text
    assert one == other


def test_parameters_moved_behind_the_wrapper_are_named() -> None:
    """A model converted there and back, so that DDP has lost it, is an error where training goes on."""

    def on_rank() -> str:
        net = Net()
        model: Any = dw.wrap_model(net)
        model.loss(x()).backward()
        model.train()
        net.float().double()
        with pytest.raises(ModelError) as refusal:
            model.train()
        return str(refusal.value)

    assert all("'scale' has been moved, or has changed its type" in text for text in run_ranks(on_rank, 2))


def test_a_model_wrapped_twice_trains_through_either_wrapper() -> None:
    """Wrapped anew after unwrapping, the model trains through the new wrapper, and through the old one as before."""

    def on_rank() -> None:
        net = Net()
        first: Any = dw.wrap_model(net)
        second: Any = dw.wrap_model(dw.unwrap_model(first))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for model in (second, second, first, second, first):
            optimizer.zero_grad()
            model.loss(x()).backward()
            optimizer.step()
            dw.assert_in_sync(model)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("held", [True, False])
def test_nothing_is_watched_once_wrapper_or_group_is_gone(held: bool) -> None:
    """After the run, and when nobody holds the wrapper any more, the user's own model has no hook of ours left."""

    def on_rank() -> list[bool]:
        net = Net()
        net.head.requires_grad_(False)
        model: Any = dw.wrap_model(net)
        model.loss(x()).backward()
        if held:
            dw.teardown_process_group()
        else:
            del model
        net.head.requires_grad_(True)
        net.loss(x()).backward()
        return [bool(p._post_accumulate_grad_hooks) for p in net.parameters()]

    assert run_ranks(on_rank, 2) == [[False] * 5] * 2
