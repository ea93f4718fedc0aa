"""A model in stages draws, weighs and refuses as it must where batches, losses and arguments are not the plainest."""

from __future__ import annotations

import enum
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distwrap as dw
from distwrap.errors import CollectiveError, ModelError
from distwrap.group.collectives import gather_object
from distwrap.model.wrapped_models import handle_of
from distwrap.strategies.pipeline import PipelineStrategy
from distwrap.strategies.pipeline.passes import SchedulePass
from distwrap.strategies.pipeline.remote import is_here

WIDTH, WORDS, LENGTH, BATCH = 6, 7, 4, 8


def on_two_ranks(body: Any, **options: Any) -> list[Any]:
    return dw.distributed(strategy=PipelineStrategy(**options), nprocs=2, returns="all", timeout=60)(body)()


class Block(nn.Module):
    def __init__(self, seen: dict[str, list[float]], name: str) -> None:
        super().__init__()
        self.inner, self._seen, self._name = nn.Linear(WIDTH, WIDTH), seen, name
        self.chance, self.size, self.fails = False, WIDTH, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.chance:
            drawn = torch.rand(1)
            if is_here(x):
                self._seen.setdefault(self._name, []).append(drawn.item())
        if self.fails and is_here(x):
            raise ValueError("too large")
        return torch.tanh(self.inner(x))[..., : self.size]


class Way(enum.Enum):
    """Reductions, between which a loop changes."""

    MEAN, SUM = 1, 2


class Net(nn.Module):
    """Embedding, blocks and head; each loss is one that training meets."""

    def __init__(self, outputs: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.seen: dict[str, list[Any]] = {}
        self.token = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(self.seen, str(number)) for number in range(4))
        self.head = nn.Linear(WIDTH, outputs)
        self.noisy = self.checkpoints = False

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        if self.noisy:
            x = F.dropout(x, 0.5, self.training)
            noise = torch.randn(x.shape, dtype=x.dtype) * random.random()
            self.seen.setdefault("noise", []).append(noise.flatten()[:2].tolist())
            x = x + noise
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if self.noisy:
                x = F.dropout(x, 0.5, self.training)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens))

    def apart(self, tokens: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), **how)

    def known(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * self.apart(tokens, targets, ignore_index=0)

    def weighted(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.apart(tokens, targets, weight=torch.arange(1.0, WORDS + 1, dtype=self.head.weight.dtype))

    def chosen(self, tokens: torch.Tensor, targets: torch.Tensor, way: Way) -> torch.Tensor:
        losses = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        return losses.mean() if way is Way.MEAN else losses.sum() / 100

    def masked(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = targets.flatten() > 0
        return (self.apart(tokens, targets, reduction="none") * mask).sum() / mask.sum()

    def two_terms(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = self(tokens)
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0) + outputs.square().mean()

    def hidden_counts(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = (targets.flatten() > 0).to(self.head.weight.dtype)
        return torch.dot(self.apart(tokens, targets, reduction="none"), mask / mask.sum())

    def noise_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.features(tokens)
        return (self.head(x) - torch.randn(*x.shape[:2], WORDS, dtype=x.dtype)).square().mean()


def batch(step: int, *, zeros: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch, in which some targets, of unlike numbers in each row, are 0, or none."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator)
    if zeros:
        targets[torch.arange(BATCH)[:, None] > 2 * torch.arange(LENGTH) + step % 3] = 0
    return tokens, targets


# Random numbers


def drawn() -> Any:
    """Train a model that draws random numbers everywhere; return the numbers of each rank and step."""
    net = Net().double()
    model = dw.wrap_model(net)
    optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    torch.manual_seed(dw.rank())  # as a loop may do
    random.seed(dw.rank())
    net.noisy = True
    for block in net.blocks:
        block.chance = True
    found = []
    for step, checkpoints in enumerate((False, True)):
        net.checkpoints = checkpoints
        net.seen.clear()
        model.noise_loss(*batch(step, zeros=False)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            (
                gather_object({name: list(values) for name, values in net.seen.items()}),
                gather_object(torch.rand(1).item()),
            )
        )
    model.eval()
    for _ in range(2):
        torch.manual_seed(3)
        with torch.no_grad():
            found.append(model.noise_loss(*batch(0, zeros=False)).item())
    model.train()
    if dw.rank() == 0:
        torch.rand(1)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"draws random numbers outside of its blocks"):
            model.noise_loss(*batch(0, zeros=False))
    torch.manual_seed(0)
    model.noise_loss(*batch(0, zeros=False)).backward()
    return found


def test_random_numbers_are_alike_outside_of_blocks_and_apart_inside() -> None:
    """Stages draw the same for a microbatch, also where ranks are seeded apart; blocks draw what no other one does."""
    found, _ = on_two_ranks(drawn, loss="noise_loss", microbatches=4)
    noise = []
    for (seen, after), times in zip(found[:2], (1, 2), strict=True):
        first, second = (each.pop("noise")[-4:] for each in seen)
        assert first == second
        noise += first
        assert len({tuple(each) for each in noise}) == len(noise)
        assert after[0] == after[1]
        assert [sorted(each) for each in seen] == [["0", "1"], ["2", "3"]]
        inside = [each for mine in seen for values in mine.values() for each in values[-4 * times :]]
        assert len(inside) == times * len(set(inside)) == times * 16
    assert found[2] == found[3]


# Losses whose microbatches are no equal parts


def count(targets: torch.Tensor) -> torch.Tensor:
    return (targets > 0).sum()


def sum_of_weights(targets: torch.Tensor) -> torch.Tensor:
    return (targets + 1).sum()


WEIGHTS = {"known": count, "weighted": sum_of_weights, "masked": count, "hidden_counts": count, "apart": None}


def trained(name: str) -> dict[str, Any]:
    """Train by a loss, at first without what makes it unlike; return the losses and the weights."""
    net = Net().double()
    model = dw.wrap_model(net)
    optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(1, 7):
        tokens, targets = batch(step, zeros=name == "hidden_counts" or step in (3, 5, 6))
        if step == 6 and name != "apart":
            targets[:2] = 0  # a microbatch in which nothing counts, so that its own mean is 0 / 0
        if step == 5:
            tokens, targets = tokens[:5], targets[:5]
        loss = getattr(model, name)(tokens, targets)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = PipelineStrategy().state(model, everywhere=True) if dw.world_size() > 1 else net.state_dict()
    return {"loss": losses, **{key: value.tolist() for key, value in state.items()}}


def simulated(body: Any, *args: Any, **options: Any) -> list[Any]:
    strategy = PipelineStrategy(**options)
    return dw.distributed(strategy=strategy, nprocs=2, returns="all", launcher="simulate")(body)(*args)


@pytest.mark.parametrize("name", WEIGHTS)
def test_losses_with_counts_of_their_own_are_weighed(name: str) -> None:
    """Means over what counts, of which microbatches have unlike numbers, train as one process does, at any step."""
    expected = trained(name)
    for found in simulated(trained, name, loss=name, weight=WEIGHTS[name], microbatches=4, check=True):
        for key, values in expected.items():
            torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(values), rtol=0, atol=1e-9, msg=key)


def weighed_wrongly(name: str) -> None:
    model = dw.wrap_model(Net().double())
    getattr(model, name)(*batch(3, zeros=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [("masked", {}), ("two_terms", {"weight": count}), ("apart", {"reduction": "sum"})],
    ids=["no weight", "two terms", "another reduction"],
)
def test_a_check_refuses_what_is_said_wrongly(name: str, options: dict[str, Any]) -> None:
    """With check=True a loss whose microbatches do not give that of the batch is an error that names the words."""
    with pytest.raises((ModelError, CollectiveError), match=r"reduction='sum'.* weight=, .* microbatches=1"):
        simulated(weighed_wrongly, name, loss=name, check=True, microbatches=4, **options)


@pytest.mark.parametrize("weight", [lambda y: -1.0, lambda y: y != 0, lambda y: None], ids=["negative", "mask", "none"])
def test_weights_that_are_no_number_are_refused(weight: Any) -> None:
    """A weight= that returns no count is an error before a forward."""
    with pytest.raises(ModelError, match="it returns one number, how much counts in a target"):
        simulated(weighed_wrongly, "apart", loss="apart", weight=weight)


def by_function() -> list[float]:
    """Train by a loss that is a function, and by one that a method returns."""
    net = Net().double()
    model: Any = dw.wrap_model(net)
    losses = []
    for step in range(3):
        loss = model.loss(*batch(step, zeros=False)) if dw.world_size() > 1 else net.apart(*batch(step, zeros=False))
        loss.backward()
        losses.append(loss.item())
    return losses


def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def test_a_loss_may_be_a_function() -> None:
    """A function of output and target is the model's method loss(), where the model has none."""
    expected = by_function()
    for found in simulated(by_function, loss=criterion, microbatches=4, check=True):
        assert found == pytest.approx(expected, abs=1e-9)


# Arguments and outputs


class Sizes(Net):
    """Outputs of one number a sample, and sizes that follow from something else than the arguments' sizes."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens).mean(1)).squeeze()

    def cut(self, tokens: torch.Tensor, share: float) -> torch.Tensor:
        x = self.token(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x[:, : int(LENGTH * share)] if number == 1 else x)
        return x.square().mean()


def edges() -> dict[str, Any]:
    """Come to each edge in turn, and go on behind it; return numbers that one process has too."""
    net = Sizes(outputs=1)
    model = dw.wrap_model(net)
    optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    divided = dw.world_size() > 1
    tokens, _ = batch(1, zeros=False)
    found: dict[str, Any] = {}
    for rows in (4, 1, 8):  # 3, 1: a sample a microbatch, and a batch of one
        outputs = model(tokens[:rows])
        found[f"shape {rows}"] = list(outputs.shape)
        (outputs - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=_ == 1):
            loss = model.cut(tokens, 1.0)
        loss.backward()
    optimizer.zero_grad()
    if divided:
        refused(model, net, optimizer, tokens)
    found["after"] = model.cut(tokens, 1.0).item()
    return found


def refused(model: Any, net: Sizes, optimizer: Any, tokens: torch.Tensor) -> None:
    with pytest.raises(
        ModelError,
        match=r"got a tensor that requires a gradient, and under strategy='pipeline' no "
        r"gradient",
    ):
        model.cut(tokens.double().requires_grad_(), 1.0)
    # an output of another size than at first, and an error of the model's own: the other stages learn of both
    first = dw.rank() == 0
    with pytest.raises(
        ModelError if first else CollectiveError, match="2, 6.* waits for .*4, 6" if first else "rank 0 of this"
    ):
        model.cut(tokens, 0.5)
    net.blocks[3].fails = True
    with pytest.raises(
        CollectiveError if first else ValueError, match="rank 1 of this pipeline" if first else "too large"
    ):
        model.cut(tokens, 1.0)
    with torch.no_grad(), pytest.raises(CollectiveError if first else ValueError):
        model.cut(tokens, 1.0)
    net.blocks[3].fails = False
    # other arguments on one rank, at pass 16
    for _ in range(handle_of(model).routing._alike._passes, 15):
        with torch.no_grad():
            model(tokens)
    with torch.no_grad(), pytest.raises(ModelError, match="pass 16"):
        model((tokens + dw.rank()) % WORDS)
    # loops over gradients
    model.cut(tokens, 1.0).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2
    norm = sum(parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None)
    for look in (lambda: norm.item(), lambda: 1.0 if norm > 1 else 2.0):
        with pytest.raises(ModelError, match="reads numbers"):
            look()
    here = next(parameter for parameter in model.parameters() if is_here(parameter) and parameter.grad is not None)
    with pytest.raises(ModelError, match=r"the gradient of .*max_norm="):
        here.grad.mul_(1 / norm)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def broken() -> None:
    """Interrupt a pass on all ranks, as by a key."""
    net = Sizes(outputs=1)
    model = dw.wrap_model(net)
    tokens, _ = batch(1, zeros=False)
    with mock.patch.object(SchedulePass, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        model.cut(tokens, 1.0)
    with pytest.raises(ModelError, match=r"cut\(\), ended early"):
        model.cut(tokens, 1.0)


def everything() -> dict[str, Any]:
    found = edges()
    if dw.world_size() > 1:
        broken()
    return found


@pytest.mark.slow("others of its kind are in `make test`")
def test_what_a_pipeline_cannot_do_is_refused_by_name_and_it_goes_on() -> None:
    """Outputs, arguments, errors and loops over gradients that stages cannot share end by name on all of them."""
    expected = everything()
    for found in on_two_ranks(everything, loss="cut", microbatches=4):
        assert found["after"] == pytest.approx(expected.pop("after", found["after"]), abs=1e-5)
        expected["after"] = found.pop("after")
        assert found == {name: value for name, value in expected.items() if name != "after"}


def unhandled() -> None:
    net = Net()
    model = dw.wrap_model(net)
    net.blocks[3].fails = True
    model.apart(*batch(1, zeros=False))


def test_an_error_in_one_stage_is_the_one_that_is_raised() -> None:
    """The caller gets the error of the stage that failed, and not what the others say of it."""
    with pytest.raises(ValueError, match="too large"):
        on_two_ranks(unhandled, loss="apart")
