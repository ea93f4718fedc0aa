"""``strategy="fsdp"``: what a loop does between a forward and its backward acts on the shards, and not on copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy
from distwrap.errors import ModelError
from distwrap.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x)).tanh()  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks between two layers; it may fail in the midst of a forward or of its backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.fails == "forward" and block is self.blocks[2]:
                raise ZeroDivisionError
            if self.fails == "backward" and block is self.blocks[1]:
                x.register_hook(_fail)
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()  # type: ignore[no-any-return]


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def data(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def zero_in_between(model: Any, x: torch.Tensor) -> None:
    optimizer = adamw(model)
    for _ in range(3):
        loss = _loss(model, x)
        model.zero_grad()
        loss.backward()
        optimizer.step()


def changed_after_forwards(model: Any, x: torch.Tensor) -> None:
    """Weights change after an evaluation, and after a forward that had no backward."""
    optimizer = adamw(model)
    _loss(model, x).backward()
    for grads in (False, True, False):
        with torch.set_grad_enabled(grads):
            model(x)
        optimizer.step()
        _loss(model, x).backward()
    with torch.no_grad():
        model.score(x)
        for parameter in model.parameters():
            parameter.mul_(0.9)  # as an average of weights is copied into a model
    optimizer.zero_grad()
    _loss(model, x).backward()
    optimizer.step()


def frozen_on_the_way(model: Any, x: torch.Tensor) -> None:
    """Freeze after an evaluation, unfreeze between a forward and its backward."""
    optimizer = adamw(model)
    for step in range(4):
        if step == 1:
            with torch.no_grad():
                model(x)
            model.last.requires_grad_(False)
        optimizer.zero_grad()
        loss = _loss(model, x)
        if step == 2:
            model.requires_grad_(True)
        loss.backward()
        optimizer.step()


def grown_optimizer(model: Any, x: torch.Tensor) -> None:
    """Collect parameters after an evaluation and between a forward and its backward."""
    with torch.no_grad():
        model(x)
    optimizer = adamw(model.first)
    _loss(model, x).backward()
    optimizer.step()
    loss = _loss(model, x)
    optimizer.add_param_group({"params": list(model.last.parameters())})
    optimizer.add_param_group({"params": [value for name, value in model.named_parameters() if "blocks" in name]})
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    _loss(model, x).backward()
    optimizer.step()


def failed_forward(model: Any, x: torch.Tensor) -> None:
    _failing(model, x, "forward")


def failed_backward(model: Any, x: torch.Tensor) -> None:
    _failing(model, x, "backward")


def failed_between_backwards(model: Any, x: torch.Tensor) -> None:
    """Go on after a failed forward with the gradients of the backward before it."""
    optimizer = adamw(model)
    for _ in range(2):
        _loss(model, x).backward()
        model.fails = "forward"
        with contextlib.suppress(ZeroDivisionError):
            _loss(model, x)
        model.fails = ""
        _loss(model, 2 * x).backward()
        optimizer.step()
        optimizer.zero_grad()


def _failing(model: Any, x: torch.Tensor, where: str) -> None:
    optimizer = adamw(model)
    for step in range(4):
        model.fails = where if step in (1, 2) else ""
        try:
            _loss(model, x).backward()
            optimizer.step()
        except ZeroDivisionError:
            pass
        model.zero_grad()


def left_windows(model: Any, x: torch.Tensor) -> None:
    """Leave windows in their midst, zero what they left or go on with it; fail in one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for in_place, goes_on in ((False, False), (True, False), (False, True)):
        for number, _ in enumerate(_windows(model)):
            if number == 1:
                break
            (_loss(model, x) / 2).backward()
        if not goes_on:
            optimizer.zero_grad(set_to_none=not in_place)
        _loss(model, x).backward()
        optimizer.step()
        for number, _ in enumerate(_windows(model)):
            model.fails = "forward" if number == 1 else ""
            with contextlib.suppress(ZeroDivisionError):
                _loss(model, x).backward()
            model.fails = ""
            _loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def _windows(model: Any) -> Any:
    return range(2) if type(model) is Net else dw.accumulate(range(2), 2, model)


WAYS: tuple[Callable[[Any, torch.Tensor], None], ...] = (
    *(zero_in_between, changed_after_forwards, frozen_on_the_way, grown_optimizer),
    *(failed_forward, failed_backward, failed_between_backwards, left_windows),
)


def _distance(model: nn.Module, net: nn.Module) -> float:
    from distwrap.strategies import shards

    state = shards.Divided(model, {}).state(everywhere=True)
    return max(float((state[name] - value).abs().max()) for name, value in net.state_dict().items())


def _ways(options: dict[str, Any]) -> dict[str, float]:
    found = {}
    for way in WAYS:
        net, model = Net().double(), dw.wrap_model(Net().double(), strategy="fsdp", **options)
        way(net, data())
        way(model, data().chunk(dw.world_size())[dw.rank()])
        found[way.__name__] = _distance(model, net)
    return found


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"checkpointing": True}])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_between_a_forward_and_its_backward(options: dict[str, Any]) -> None:
    """Zeroed, frozen, collected or changed in between, or after an exception: the weights are those of one process."""
    for found in run_ranks(_ways, 2, options):
        assert max(found.values()) < 1e-9, found


def _given_back() -> None:
    """Divide a model, train it, and make it plain again."""
    from distwrap.strategies import shards

    net = Net()
    mine = net.blocks[0].layer.register_forward_hook(lambda *_: None)
    before = {name: (type(part), _hooks(part)) for name, part in net.named_modules()}
    for precision in ("32", "bf16"):
        model = dw.wrap_model(net, strategy="fsdp", precision=precision)
        optimizer = adamw(model)
        _loss(model, data(torch.float32)).backward()
        later = [part.register_forward_hook(lambda *_: None) for part in (net.blocks[1].layer, net.blocks[1])]
        optimizer.step()
        loss = _loss(model, data(torch.float32))
        state = shards.Divided(model, {}).state(everywhere=True)
        FSDPStrategy().restore_original(net, model, state)
        assert all(type(value) is nn.Parameter for value in net.parameters())
        assert all(value.equal(state[name]) for name, value in net.state_dict().items())
        assert all(len(vars(part)["_forward_hooks"]) == 1 for part in (net.blocks[1].layer, net.blocks[1]))
        for handle in later:
            handle.remove()
        assert {name: (type(part), _hooks(part)) for name, part in net.named_modules()} == before
        loss.detach()
    mine.remove()
    net.load_state_dict(Net().state_dict())
    assert _loss(net, data(torch.float32)).equal(_loss(Net(), data(torch.float32)))


def _hooks(module: nn.Module) -> dict[str, int]:
    return {name: len(value) for name, value in vars(module).items() if name.endswith("hooks") and value}


@pytest.mark.slow("others of its kind are in make test")
def test_a_model_given_back_is_plain() -> None:
    """No module keeps a hook of FSDP, also those inside of units, and all keep those of their owner."""
    run_ranks(_given_back, 2)


def _types(precision: str, change: Callable[[Net], object]) -> float:
    """Train what begins in types of its own, and is unfrozen on the way."""
    net, own = _changed(change), _changed(change)
    model = dw.wrap_model(own, strategy="fsdp", precision=precision)
    x = data(torch.float32)
    with torch.inference_mode():
        model(x)
    trained = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, net)]
    for step in range(4):
        for each, optimizer in trained:
            if step == 2:
                each.requires_grad_(True)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=each is net and precision == "bf16"):
                loss = _loss(each, x.chunk(dw.world_size())[dw.rank()] if each is model else x)
            loss.backward()
            optimizer.step()
    return _distance(model, net)


def _frozen(net: Net) -> None:
    net.blocks.requires_grad_(False)


def _of_two_types(net: Net) -> None:
    for block in net.blocks:
        layer: Any = block.layer.double()  # type: ignore[union-attr]
        layer.forward = lambda x, own=layer: nn.functional.linear(x.double(), own.weight, own.bias).float()


def _of_two_types_in_one_module(net: Net) -> None:
    net.blocks[1].odd = nn.Parameter(torch.ones(2).double())


def _of_all_types() -> list[float]:
    with pytest.raises(ModelError, match="has weights of"):
        dw.wrap_model(_changed(_of_two_types_in_one_module), strategy="fsdp")
    return [_types("32", _frozen), _types("32", _of_two_types), _types("bf16", _frozen)]


def _changed(change: Callable[[Net], object]) -> Net:
    net = Net()
    change(net)
    return net


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_types_are_those_of_the_parameters_at_any_time() -> None:
    """First run without gradients, frozen at first, or of two types: the gradients are exact; or refused by name."""
    for *exact, in_bf16 in run_ranks(_of_all_types, 2):
        assert max(exact) < 1e-5
        assert in_bf16 < 1e-2


def _two_windows() -> list[float]:
    nets = [Net().double(), Net().double()]
    models = [dw.wrap_model(Net().double(), strategy="fsdp") for _ in nets]
    x = data()
    rows = x.chunk(dw.world_size())[dw.rank()].chunk(2)
    for given in zip(*(dw.accumulate(rows, 2, model) for model in models), strict=True):
        for model, (some, _) in zip(models, given, strict=True):
            losses = (model(some) - some).square()
            dw.scale_loss(losses.sum(), losses.numel()).backward()
    for each in nets:
        _loss(each, x).backward()
    return [
        float((mine.grad.full_tensor() - other.grad).abs().max())
        for model, net in zip(models, nets, strict=True)
        for mine, other in zip(model.parameters(), net.parameters(), strict=True)
    ]


def test_the_window_of_a_loss_is_found() -> None:
    """With windows of two divided models under way, a loss is known by the parameters under it."""
    assert max(max(found) for found in run_ranks(_two_windows, 2)) < 1e-9
