"""Loops that do more than plain steps train a model in stages as one process does: freezing, buffers, clips, amp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.strategies.pipeline import PipelineStrategy
from distwrap.testing import run_ranks
from tests.strategies.test_pipeline import (
    GPT,
    LENGTH,
    WIDTH,
    Block,
    approximately,
    batches,
    data,
    full,
    plain,
    prepared,
)

Found = dict[str, Any]


def step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    loss = model.loss(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return dw.mean(loss.item())


def weights(model: nn.Module) -> Found:
    return full(model) if dw.world_size() > 1 else plain(model)


def loose() -> Found:
    """Clip a model and parameters of no wrapped model in one optimizer."""
    model, _ = prepared()
    bias, other = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Linear(2, 1).double()
    for parameter in other.parameters():
        nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD([*model.parameters(), bias, *other.parameters()], lr=0.1)
    for x, y in batches():
        loss = model.loss(x, y) + (bias * 3).square().sum() + other(torch.ones(2, dtype=torch.float64)).square().sum()
        loss.backward()
        dw.optimizer_step(optimizer, max_norm=0.5)
        optimizer.zero_grad()
    lone = torch.optim.SGD(other.parameters(), lr=0.1)
    (other(torch.ones(2, dtype=torch.float64)) * 100).sum().backward()
    dw.optimizer_step(lone, max_norm=0.5)
    return {**weights(model), "bias": bias.tolist(), "other": next(p.tolist() for p in other.parameters())}


def thawing() -> Found:
    """Freeze parameters after the first pass, and let them go: a tied one, those of a stage, and those of another."""
    model, optimizer = prepared(tied=True, blocks=4)
    losses = []
    batch = next(iter(batches()))
    blocks = [list(block.parameters()) for block in model.blocks]
    for frozen in ([], [model.token.weight], blocks[0] + blocks[1], [model.head.weight, *blocks[3]], []):
        for parameter in model.parameters():
            parameter.requires_grad_(all(parameter is not each for each in frozen))
        for _ in range(2):
            loss = model.loss(*batch)
            loss.backward()
            assert all(parameter.grad is None for parameter in frozen)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(dw.mean(loss.item()))
    return {**weights(model), "losses": losses}


def frozen_at_first() -> Found:
    """Begin with a stage and the tied weight frozen, and thaw them later."""
    model, optimizer = prepared(tied=True, blocks=4)
    batch = next(iter(batches()))
    frozen = [model.token.weight, model.position.weight, *model.blocks[:2].parameters()]
    losses = []
    for thawed in (False, True):
        for parameter in frozen:
            parameter.requires_grad_(thawed)
        losses += [step(model, optimizer, batch) for _ in range(2)]
    return {**weights(model), "losses": losses}


class Counting(GPT):
    """Buffers that a forward changes, before and after the blocks; and batch norms at both ends."""

    def __init__(self, *, norms: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.last = (nn.BatchNorm1d(LENGTH) if norms else nn.Identity() for _ in range(2))
        for name in ("blocks", "norm", "head", "last"):  # in the order in which they are used
            self._modules[name] = self._modules.pop(name)
        for name in ("calls", "replaced", "seen", "average"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        x = self.first(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean()
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        self.seen.add_(x.detach().square().mean())
        return self.head(self.last(self.norm(x)))


def counted(norms: bool) -> Found:
    torch.manual_seed(1)
    model = dw.wrap_model(Counting(norms=norms, blocks=4).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, batch) for batch in batches()]
    model.eval()
    with torch.no_grad():
        losses.append(model.loss(*next(iter(batches()))).item())
    return {**weights(model), "losses": losses}


class Moody(GPT):
    """A loss whose reduction depends on the mode."""

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, reduction: str = "") -> torch.Tensor:
        reduction = reduction or ("sum" if self.training else "mean")
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction=reduction) / 10


def moody() -> Found:
    torch.manual_seed(1)
    model = dw.wrap_model(Moody(blocks=4, dropout=0.0).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for mode in (False, True, False):
        model.train(mode)
        with torch.set_grad_enabled(True):
            losses.append(model.loss(*next(iter(batches()))).item())
        with torch.no_grad():
            losses.append(model.loss(*next(iter(batches()))).item())
    model.train()
    for batch in batches():
        losses.append(step(model, optimizer, batch))
        losses.append(model.loss(*batch, "mean").item())
    return {**weights(model), "losses": losses}


class Recomputed(GPT):
    """Blocks whose activations are computed again in the backward."""

    use_reentrant: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            if self.use_reentrant is None:
                x = block(x, mask)
            else:
                x = checkpoint(block, x, mask, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


def again_in_backward(forward: Any) -> Any:
    def run(x: torch.Tensor, mask: torch.Tensor) -> Any:
        return checkpoint(forward, x, mask, use_reentrant=True) if x.requires_grad else forward(x, mask)

    return run


def recomputed(inside: bool) -> Found:
    torch.manual_seed(1)
    net = Recomputed(blocks=4).double()
    if inside:
        for block in net.blocks:
            block.forward = again_in_backward(block.forward)
    else:
        net.use_reentrant = False
    model = dw.wrap_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, batch) for batch in batches()]
    return {**weights(model), "losses": losses}


class Dropping(Block):
    """Block that is left out now and then."""

    is_left_out = False

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x if self.is_left_out else super().forward(x, mask)


def dropped() -> Found:
    """Leave a block out on one share of the data, on the other, on both."""
    torch.manual_seed(1)
    net = GPT(blocks=4)
    net.blocks[1] = Dropping()
    model = dw.wrap_model(net.double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    layout = current_world().layout
    mine = range(2) if layout.size == 1 else [layout.rank]
    x, y = data(1)[:]
    for left_out in ([False, False], [True, False], [False, True], [True, True], [False, False]):
        for share in mine:
            model.blocks[1].is_left_out = left_out[share]
            rows = slice(share * 6, share * 6 + 6)
            (model.loss(x[rows], y[rows]) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def statistics() -> Found:
    """Evaluate with the statistics of the first share, go on from them, and take the mean of both shares' at last."""
    layout = current_world().layout
    mine = range(2) if layout.size == 1 else [layout.rank]
    x, y = data(1)[:]
    nets: list[Any] = []
    for _ in mine:
        torch.manual_seed(1)
        nets.append(dw.wrap_model(Counting(norms=True, blocks=4).double()))

    def forwards() -> None:
        for share, net in zip(mine, nets, strict=True):
            rows = slice(share * 6, share * 6 + 6)
            net.train().loss(x[rows], y[rows]).backward()

    forwards()
    for net in nets:
        net.eval()
    if layout.size == 1:
        nets[1].load_state_dict(nets[0].state_dict())
    with torch.no_grad():
        losses = [net.loss(x, y).item() for net in nets][:1]
    forwards()
    if layout.size == 1:
        for first, second in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
            if first.is_floating_point():
                first.copy_((first + second) / 2)
    else:
        dw.sync_buffers(nets[0], "mean")
    return {**weights(nets[0]), "losses": losses}


class Careful(Block):
    """Block that computes in full precision under autocast."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float(), mask)


class Casting(Block):
    """Block whose output is in the type of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(x, mask))


def autocast() -> Found:
    """Train under an autocast of the loop's own, now and then, which one block leaves."""
    torch.manual_seed(1)
    net = GPT(blocks=4)
    for number, kind in enumerate((Careful, Casting, Careful, Careful)):
        net.blocks[number] = kind()
    model = dw.wrap_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, (x, y) in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16, enabled=number != 2):
            loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(dw.mean(loss.item()))
    return {**weights(model), "losses": losses}


CASES: dict[str, Callable[[], Found]] = {
    "loose": loose,
    "thawing": thawing,
    "frozen": frozen_at_first,
    "counted": lambda: counted(False),
    "norms": lambda: counted(True),
    "moody": moody,
    "recomputed inside": lambda: recomputed(True),
    "recomputed": lambda: recomputed(False),
    "autocast": autocast,
    "left out": dropped,
    "statistics": statistics,
}


def everything(*names: str) -> dict[str, Found]:
    return {name: CASES[name]() for name in names}


@pytest.mark.parametrize(
    ("nprocs", "said", "names"),
    [
        (2, {}, ["loose", "thawing", "counted", "moody"]),
        (2, {}, ["frozen", "norms", "recomputed inside", "recomputed", "autocast"]),
        (4, {}, ["left out", "thawing", "statistics"]),
        (2, {"loss": "loss"}, ["loose", "thawing", "frozen", "recomputed inside", "recomputed", "autocast"]),
    ],
    ids=["one pipeline", "more of it", "two pipelines", "microbatches"],
)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_loops_train_as_one_process_does(nprocs: int, said: dict[str, Any], names: list[str]) -> None:
    """Whatever a loop freezes, counts, clips or recomputes, weights, buffers and losses are those of one process."""
    [expected] = run_ranks(everything, 1, *names, timeout=60)
    strategy = PipelineStrategy(stages=2, **said)
    run = dw.distributed(strategy=strategy, nprocs=nprocs, returns="all", timeout=60, launcher="simulate")
    for found in run(everything)(*names):
        for name in names:
            try:
                approximately(found[name], expected[name], 1e-3 if name == "autocast" else 1e-9)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def cut() -> Found:
    """Cut a batch where a forward changes buffers: each microbatch changes them."""
    model = dw.wrap_model(Counting(blocks=4).double())
    for batch in batches():
        model.loss(*batch).backward()
    state = full(model)
    return {"calls": state["calls"], "replaced": state["replaced"]}


def test_buffers_change_with_each_microbatch_that_was_asked_for() -> None:
    """With microbatches= a forward's buffers change once a microbatch, and never by what distwrap looks at."""
    run = dw.distributed(strategy=PipelineStrategy(loss="loss", microbatches=3), nprocs=2, returns="all", timeout=60)
    assert run(cut)() == [{"calls": 12.0, "replaced": 12.0}] * 2


def refused() -> None:
    x, y = next(iter(batches()))
    around = dw.wrap_model(Recomputed(blocks=4))
    around.use_reentrant = True
    with pytest.raises(ModelError, match="use_reentrant"):
        around.loss(x, y)
    for precision in ("32", "fp16"):
        model = dw.wrap_model(GPT(blocks=4), precision=precision)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        scaler.scale(model.loss(x, y)).backward()
        with pytest.raises(ModelError, match="GradScaler of your own"):
            scaler.step(optimizer)
    for parameter in model.blocks[:2].parameters():
        parameter.requires_grad_(False)
    model.token.requires_grad_(False)
    model.position.requires_grad_(False)
    with pytest.raises(ModelError, match="are frozen"):
        dw.backward(model.loss(x, y))


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_what_a_stage_cannot_tell_is_refused_by_name() -> None:
    """A scaler of the loop's own, a stage without gradients in fp16 and a block in an old checkpoint are errors."""
    dw.distributed(strategy="pipeline", nprocs=2, timeout=60)(refused)()


def saved_often(folder: Path) -> list[int]:
    """Return how many descriptors there are after each save."""
    model, optimizer = prepared(blocks=4)
    step(model, optimizer, next(iter(batches())))
    found = []
    for number in range(10):
        dw.save({"model": model, "optimizer": optimizer}, folder / f"{number % 2}", io="sharded")
        found.append(len(list(Path("/proc/self/fd").iterdir())))
    return found


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_saves_leave_nothing_behind(tmp_path: Path) -> None:
    """Ten saves in parts make no more groups of ranks than two."""
    for found in dw.distributed(strategy="pipeline", nprocs=2, returns="all", timeout=60)(saved_often)(tmp_path):
        assert found[-1] == found[1], found
