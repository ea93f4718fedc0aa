"""Programs as people write them, in stages: what methods are given, keep, count and draw is as in one process."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distwrap as dw
from distwrap.errors import CollectiveError, ModelError
from distwrap.strategies.pipeline import PipelineStrategy
from distwrap.testing import run_ranks
from tests.strategies.test_pipeline import approximately

WIDTH, WORDS, LENGTH, BATCH = 6, 7, 4, 8
Found = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) * self.gate(x).softmax(-1)[..., :1]


class Routing(Block):
    """Block that looks at its own numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        chosen = self.gate(flat).argmax(-1).nonzero()[:, 0]
        return x + torch.zeros_like(flat).index_add(0, chosen, self.inner(flat[chosen])).view_as(x)


class Caching(Block):
    """Block that keeps what it has computed of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.linspace(0.5, 1, WIDTH), persistent=False)
        self.kept: torch.Tensor | None = None
        self.length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.length < x.shape[1]:
            self.kept, self.length = torch.outer(torch.arange(x.shape[1]) + 1.0, self.slopes), x.shape[1]
        return super().forward(x * self.kept)


class Net(nn.Module):
    """Embedding, blocks and head; each method is one that people write."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.token = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.reduction, self.calls, self.drop = "mean", 0, nn.Dropout(0.0)
        self.own, self.log = random.Random(0), 0.0
        self.double()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.features(self.token(tokens))))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), **how)

    def taking(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        targets = batch.pop("targets")
        return self.loss(batch["tokens"], targets)

    def writing(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        labels = tokens.clone()
        tokens[:, ::2] = (tokens[:, ::2] + 1) % WORDS
        return self.loss(tokens, labels)

    def by_object(self, tokens: torch.Tensor, targets: torch.Tensor, criterion: Any) -> torch.Tensor:
        return criterion(self(tokens).flatten(0, 1), targets.flatten())

    def by_attribute(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(tokens, targets, reduction=self.reduction)

    def hidden(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = (targets.flatten() > 0).double()
        return torch.dot(self.loss(tokens, targets, reduction="none"), mask / mask.sum())

    def centred(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        return F.cross_entropy(self.head(self.features(x - x.mean(0))).flatten(0, 1), targets.flatten())

    def scaled(self, tokens: torch.Tensor, targets: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        x = self.features(self.token(tokens) * slopes)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def of_texts(self, texts: list[str], targets: torch.Tensor) -> torch.Tensor:
        return self.loss(torch.tensor([[int(letter) for letter in text] for text in texts]), targets)

    def logged(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.loss(tokens, targets)
        self.log = loss.item()
        return loss

    def several(self, tokens: torch.Tensor, targets: torch.Tensor, share: float) -> dict[str, Any]:
        return {"loss": share * self.loss(tokens, targets), "share": share}

    def counting(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.loss(tokens, targets) / self.calls

    def failing(self, tokens: torch.Tensor, targets: torch.Tensor, fails: float) -> torch.Tensor:
        loss = self.loss(tokens, targets)
        if fails > 0:
            raise RuntimeError("the server timed out")
        return loss

    def not_trained(self, tokens: torch.Tensor, targets: torch.Tensor, share: float) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            with torch.set_grad_enabled(share > 0):
                x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def drawing(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.own.random() * self.loss(tokens, targets)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(1, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1].clone(), words[:, 1:].clone()


def padded(step: int) -> torch.Tensor:
    """Return targets, of which rows have unlike numbers from step 2 on."""
    targets = data(step)[1]
    if step >= 2:
        targets[torch.arange(BATCH)[:, None] > 2 * torch.arange(LENGTH)] = 0
    return targets


def weights(model: nn.Module) -> Found:
    state = PipelineStrategy().state(model, everywhere=True) if dw.world_size() > 1 else model.state_dict()
    return {name: tensor.tolist() for name, tensor in state.items()}


def fit(loss_of: Callable[[Any, torch.Tensor, torch.Tensor, int], Any], net: nn.Module | None = None) -> Found:
    model = dw.wrap_model(net or Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        loss = loss_of(model, *data(step), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {**weights(model), "losses": losses}


def by_attribute(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    model.reduction = "sum" if step == 2 else "mean"
    return model.by_attribute(x, y) / (BATCH * LENGTH if step == 2 else 1)  # type: ignore[no-any-return]


def by_object(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    loss = model.by_object(x, y, nn.CrossEntropyLoss(reduction="sum" if step == 2 else "mean"))
    return loss / (BATCH * LENGTH if step == 2 else 1)  # type: ignore[no-any-return]


def by_function(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return model.by_object(x, y, summed if step == 2 else F.cross_entropy)  # type: ignore[no-any-return]


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum") / 10


def with_one_activation() -> Found:
    torch.manual_seed(1)
    act = nn.ReLU()
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    net = nn.Sequential(layers[0], act, layers[1], act, layers[2], act, layers[3]).double()
    x = torch.linspace(-1, 1, BATCH * WIDTH, dtype=torch.float64).view(BATCH, WIDTH)
    return fit(lambda model, *_: (model(x) - 1).square().mean(), net)


def with_one_buffer() -> Found:
    net = Net(Caching)
    for block in net.blocks[2:]:
        block.slopes = net.blocks[3].slopes  # type: ignore[union-attr]
    return fit(lambda model, x, y, _: model.loss(x, y), net)


def hooked() -> Found:
    net, means = Net(), []
    for block in net.blocks:
        block.register_forward_hook(lambda block, given, output: means.append(output.mean().item()))
        block.register_forward_hook(lambda block, given, output: output * 1.1)
        block.register_forward_hook(lambda block, given, output: (block.seen.add_(output.detach().mean()), None)[1])
    model = dw.wrap_model(net)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    steps = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step_alone(parameter: nn.Parameter) -> None:
        steps[parameter].step()
        steps[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_alone)
    for step in range(3):
        model.loss(*data(step)).backward()
    return weights(model)


def averaged() -> Found:
    model, average = dw.wrap_model(Net()), dw.wrap_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.loss(*data(step)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.3)
    dw.sync_buffers(model)
    dw.sync_buffers(model, "mean")
    return {**weights(average), "loss": [average.loss(*data(9)).item()]}


def several() -> Found:
    shares = []

    def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
        found = model.several(x, y, 0.1 * (step + 1))
        shares.append(found["share"])
        return found["loss"]  # type: ignore[no-any-return]

    return {**fit(loss_of), "shares": shares}


def beside_another() -> Found:
    """Train a model of a kind that rank 1 has another one of, and rank 0 has had."""
    others = [dw.wrap_model(Net())]
    others[0].loss(*data(0)).backward()
    if dw.rank() == 0:
        others.clear()
        gc.collect()
    model = dw.wrap_model(Net())
    before = {f"{name} before": values for name, values in weights(model).items()}
    model.loss(*data(0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {**before, **weights(model)}


SLOPES = torch.linspace(0.5, 1, WIDTH, dtype=torch.float64)


def count(targets: torch.Tensor) -> torch.Tensor:
    return (targets > 0).sum()


# What is said of the loss, if anything, and the program.
PROGRAMS: dict[str, tuple[dict[str, Any], Callable[[], Found]]] = {
    "a dict that is popped": (
        {"loss": "taking"}, lambda: fit(lambda model, x, y, _: model.taking({"tokens": x, "targets": y})),
    ),
    "tokens that are written": ({"loss": "writing"}, lambda: fit(lambda model, x, y, _: model.writing(x, y))),
    "a reduction by an attribute": ({}, lambda: fit(by_attribute)),
    "a reduction by a module": ({}, lambda: fit(by_object)),
    "a reduction by a function": ({}, lambda: fit(by_function)),
    "a count that does not show": (
        {"loss": "hidden", "weight": count}, lambda: fit(lambda model, x, y, step: model.hidden(x, padded(step))),
    ),
    "samples that mix": (
        {"loss": "centred", "microbatches": 1}, lambda: fit(lambda model, x, y, _: model.centred(x, y)),
    ),
    "a vector as long as the batch": (
        {"loss": "scaled", "microbatches": 1},
        lambda: fit(lambda model, x, y, step: model.scaled(x[:6], y[:6], SLOPES)),
    ),
    "texts": (
        {}, lambda: fit(lambda model, x, y, _: model.of_texts(["".join(map(str, row.tolist())) for row in x], y)),
    ),
    "a loss that is logged": ({"loss": "logged"}, lambda: fit(lambda model, x, y, _: model.logged(x, y))),
    "a count in Python": ({}, lambda: fit(lambda model, x, y, _: model.counting(x, y))),
    "a generator of its own": ({}, lambda: fit(lambda model, x, y, _: model.drawing(x, y))),
    "blocks that route": ({"loss": "loss"}, lambda: fit(lambda model, x, y, _: model.loss(x, y), Net(Routing))),
    "blocks that route a whole batch": ({}, lambda: fit(lambda model, x, y, _: model.loss(x, y), Net(Routing))),
    "several results": ({}, several),
    "one activation": ({}, with_one_activation),
    "one buffer": ({"loss": "loss"}, with_one_buffer),
    "hooks": ({}, hooked),  # of which one adds to a buffer at each call
    "averages": ({"loss": "loss"}, averaged),
    "one that is gone": ({"loss": "loss"}, beside_another),
}  # fmt: skip


def simulated(said: dict[str, Any], body: Any, *args: Any) -> list[Any]:
    strategy = PipelineStrategy(**said)
    return dw.distributed(strategy=strategy, nprocs=2, returns="all", launcher="simulate")(body)(*args)


def ran(name: str) -> Found:
    return PROGRAMS[name][1]()


class Looking(torch.optim.SGD):
    """Optimizer that looks at all gradients before its closure, or fails."""

    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("not yet")
        assert sum(p.grad.square().sum() for group in self.param_groups for p in group["params"] if p.grad is not None)
        return super().step(closure)


def failing() -> None:
    x, y = data(0)
    first = dw.rank() == 0
    model = dw.wrap_model(Net())
    model.failing(x, y, 0.0)
    with pytest.raises(CollectiveError if first else RuntimeError, match="raised in a" if first else "server timed"):
        model.failing(x, y, 1.0)
    model.failing(x, y, 0.0).backward()


def not_trained() -> None:
    model = dw.wrap_model(Net())
    model.not_trained(*data(0), 1.0)
    with pytest.raises((ModelError, CollectiveError), match=r"with gradients off|raised in a forward"):
        model.not_trained(*data(0), -1.0)


def looking() -> None:
    x, y = data(0)
    model = dw.wrap_model(Net())
    optimizer = dw.wrap_optimizer(Looking(model.parameters(), lr=0.1), scope="element")
    model.loss(x, y).backward()
    with pytest.raises(ValueError, match="not yet"):
        optimizer.step()
    with pytest.raises(ModelError, match="reads numbers"):
        float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
    for model.drop.p in (0.0, 0.5):
        model.loss(x, y).backward()


@pytest.mark.parametrize(("loss", "body"), [("failing", failing), ("not_trained", not_trained), ("loss", looking)])
@pytest.mark.slow("others of its kind are in `make test`")
def test_what_stages_cannot_share_is_refused(loss: str, body: Callable[[], None]) -> None:
    """An error of one stage, blocks that are suddenly not trained, and a norm over the gradients end by name."""
    simulated({"loss": loss}, body)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow("twenty programs in turn")
def test_programs_train_as_in_one_process(name: str) -> None:
    """Whatever a method is given, keeps and looks at, losses and weights are those of one process."""
    [expected] = run_ranks(ran, 1, name, timeout=60)
    for found in simulated(PROGRAMS[name][0], ran, name):
        approximately(found, expected)
