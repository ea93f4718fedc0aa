"""``strategy="fsdp"``: what loops do with a divided model beside calling it: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ModelError
from distwrap.group.world import current_world


class Held:
    """Object of a user's own, as a forward may return one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Block(nn.Module):
    def __init__(self, *, in_object: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.in_object = nn.Linear(5, 5), nn.Linear(5, 5), in_object

    def forward(self, given: Any) -> Any:
        x = given.tensor if isinstance(given, Held) else given
        x = x + self.last(self.first(x).tanh())
        return Held(x) if self.in_object else x


class Net(nn.Module):
    """Net that gives its result in one of several ways, with blocks that may be frozen."""

    def __init__(self, kind: str = "", *, blocks: int = 2, frozen: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList(Block(in_object=kind == "blocks' objects") for _ in range(blocks))
        self.blocks.requires_grad_(not frozen)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x.tensor if isinstance(x, Held) else x)
        if self.kind == "attribute":
            self.result = x
            return None
        return {"object": Held(x), "view": x.view(-1, 5)}.get(self.kind, x)

    def as_object(self, x: torch.Tensor) -> Held:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return Held(self.last(x))


Rows = Callable[[torch.Tensor], torch.Tensor]


def inputs() -> torch.Tensor:
    return torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dw.world_size())[dw.rank()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer, rows: Rows = share) -> None:
    model(rows(inputs())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def distance(model: nn.Module, net: nn.Module) -> float:
    state = current_world().strategy.state(model, everywhere=True)
    return max(float((state[name] - value).abs().max()) for name, value in net.state_dict().items())


def _backwards() -> dict[str, float]:
    """Return how far training is from one process, for each way in which a forward gives its result."""
    found = {}
    for kind in ("object", "attribute", "view", "blocks' objects", "method"):
        for blocks, frozen in ((0, False), (2, False), (2, True)):
            model, net = (Net(kind, blocks=blocks, frozen=frozen).double() for _ in range(2))
            model = dw.wrap_model(model)
            for trained, rows in ((model, share), (net, whole)):
                optimizer = sgd(trained)
                for _ in range(3):
                    x = rows(inputs())
                    output = trained.as_object(x) if kind == "method" else trained(x)
                    output = trained.result if kind == "attribute" else output
                    output = output.tensor if isinstance(output, Held) else output
                    if kind == "view":
                        output += 1
                    output.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found[f"{kind}, {blocks} blocks, frozen: {frozen}"] = distance(model, net)
    return found


def _between_forwards() -> dict[str, float]:
    """Return how far a model is from one process that is changed while FSDP would hold on to a part of it."""
    found = {}
    for how in ("weights averaged", "evaluated before the step", "evaluated with gradients"):
        results = []
        for rows in (share, whole):
            own = dw.wrap_model if rows is share else whole
            model, average = own(Net().double()), own(Net(seed=1).double())  # type: ignore[arg-type]
            optimizer = sgd(model)
            for _ in range(3):
                x = rows(inputs())
                with torch.set_grad_enabled(how == "evaluated with gradients"):
                    target = average(x)
                (model(x) - target.detach()).square().mean().backward()
                if how != "weights averaged":
                    with torch.set_grad_enabled(how == "evaluated with gradients"):
                        model(x)
                optimizer.step()
                optimizer.zero_grad()
                if how == "weights averaged":
                    with torch.no_grad():
                        for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                            mean.lerp_(new, 0.5)
            results.append((model, average))
        (model, average), (net, plain) = results
        found[how] = max(distance(model, net), distance(average, plain))
    return found


def _past_the_forward() -> None:
    """A loss that FSDP cannot see is an error at the step."""
    net = Net(blocks=0).double()
    hidden: list[torch.Tensor] = []
    net.last.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    net.register_forward_hook(lambda module, inputs, output: output.detach())
    model = dw.wrap_model(net)
    optimizer = sgd(model)
    model(share(inputs()))
    hidden[0].square().mean().backward()
    with pytest.raises(ModelError, match=r"this rank's own, as that of first.weight"):
        optimizer.step()


def _everything() -> dict[str, float]:
    _past_the_forward()
    return {**_backwards(), **_between_forwards()}


def test_every_backward_is_exchanged() -> None:
    """Objects, attributes, views, methods, and changes between forwards: the numbers are those of one process."""
    for found in distributed(nprocs=2, strategy="fsdp", returns="all")(_everything)():
        assert max(found.values()) < 1e-9, found
        assert len(found) == 18
