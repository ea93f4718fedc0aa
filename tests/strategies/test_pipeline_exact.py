"""What a model in stages trains, passes on and counts is what one process would, or a named error comes before it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap._internals.torch_autograd import look_at_backwards
from distwrap.errors import CollectiveError, ModelError
from distwrap.strategies.pipeline import PipelineStrategy

WIDTH, ROWS = 6, 8
SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"loss": "loss"}, {"loss": "loss", "schedule": "interleaved"})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Stem, blocks, and two heads."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.last, self.beside = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.features(x))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self(x) - y).square().mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def trained(make: Any, step: Any, steps: int = 3) -> dict[str, Any]:
    """Train a model with AdamW, which would change parameters by gradients of zeros; return losses and its state."""
    torch.manual_seed(0)
    model = dw.wrap_model(make().double())
    optimizer = dw.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    losses = []
    for number in range(steps):
        loss = step(model, number)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = PipelineStrategy().state(model, everywhere=True) if dw.world_size() > 1 else model.state_dict()
    return {"losses": torch.tensor(losses), **{name: tensor.clone() for name, tensor in state.items()}}


def ranks(body: Any, *args: Any, **options: Any) -> list[Any]:
    strategy = PipelineStrategy(**options)
    return dw.distributed(strategy=strategy, nprocs=2, returns="all", launcher="simulate")(body)(*args)


def same_as_one_process(make: Any, step: Any, **options: Any) -> None:
    expected = trained(make, step)
    for found in ranks(trained, make, step, **options):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9, check_dtype=False)


def by_loss(model: Any, number: int) -> torch.Tensor:
    return model.loss(*batch(number))


# Parameters that a loss does not use


class TwoHeads(Net):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.features(x)
        return self.last(x), self.beside(x)


def first_head(model: Any, number: int) -> torch.Tensor:
    first, second = model(batch(number)[0])
    return first.square().mean() + (second.square().mean() if number == 0 else 0)


def test_a_result_that_is_not_used_has_no_gradient() -> None:
    """A head whose result the loop leaves out of the loss gets no gradient, so AdamW leaves it as it is."""
    same_as_one_process(TwoHeads, first_head)


class Scale(torch.autograd.Function):
    """Function of a user, to which autograd gives zeros where there is no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, by)
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, by = ctx.saved_tensors
        return grad * by, (grad * x).sum()


class ScaledBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Scale.apply(x, self.by))


class Cut(Net):
    """Model in which no gradient goes back from its second half, between its stages or within one."""

    def __init__(self) -> None:
        super().__init__(ScaledBlock)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if number == 2 else x)
        return x


@pytest.mark.parametrize("options", [*SCHEDULES, {"loss": "loss", "schedule": "gpipe"}], ids=str)
def test_no_gradient_goes_back_through_detach(options: dict[str, Any]) -> None:
    """Stages before a detach() get no gradient, not even zeros, under any schedule."""
    same_as_one_process(Cut, by_loss, **options)


# Python values that blocks pass on


class Warm(Block):
    """Block that passes on a Python number."""

    def forward(self, given: Any) -> Any:
        x, heat, *more = given
        return super().forward(x) * heat, 1.1 * heat, *more


class Heated(Net):
    heat = 1.0

    def __init__(self, block: type[nn.Module] = Warm) -> None:
        super().__init__(block)

    def forward(self, x: torch.Tensor, heat: float = 1.0) -> Any:
        given: Any = (self.first(x), heat * self.heat)
        for block in self.blocks:
            given = block(given)
        return self.last(given[0])

    def loss(self, x: torch.Tensor, heat: float, y: torch.Tensor) -> torch.Tensor:
        return (self(x, heat) - y).square().mean()


def heated(model: Any, number: int) -> torch.Tensor:
    x, y = batch(number)
    dw.unwrap_model(model).heat = 1.0 + 0.2 * (number % 2)
    return model.loss(x, 1.0 + 0.1 * number, y)


@pytest.mark.parametrize("options", SCHEDULES[1:], ids=str)
def test_python_values_that_blocks_pass_on_are_those_of_each_pass(options: dict[str, Any]) -> None:
    """A number that goes from block to block follows from this pass's arguments and attributes, not the first's."""
    same_as_one_process(Heated, heated, **options)


class Measured(Block):
    """Block that passes on a Python number which it has read from a tensor."""

    def forward(self, given: Any) -> Any:
        x, most = given
        x = super().forward(x * (1 + most))
        return x, 0.1 * x.detach().abs().max().item()


def measured(expected: dict[str, Any]) -> None:
    model = dw.wrap_model(Heated(Measured).double())
    x, y = batch(0)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"'blocks\.1' has passed on other Python values .* as a tensor"):
            model.loss(x[:2], 0.5, y[:2])
    with pytest.raises(ModelError, match=r"'blocks\.0' reads its own numbers.*'blocks\.1' cannot go on"):
        model.loss(x, 0.5, y)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model(x[:2], 0.5), expected["output"], rtol=0, atol=1e-9)


def test_a_python_number_computed_from_a_tensor_is_refused_where_it_cannot_be_passed_on() -> None:
    """With loss= it is an error on all ranks before any gradient, and without it the number is passed on."""
    torch.manual_seed(0)
    expected = {"output": Heated(Measured).double()(batch(0)[0][:2], 0.5).detach()}

    def body() -> None:
        torch.manual_seed(0)
        measured(expected)

    ranks(body, loss="loss", microbatches=1)


# What cannot be sent


class Wrapped(Block):
    """Block that passes on an instance of a class that pickle does not find."""

    def forward(self, given: Any) -> Any:
        class Own:
            x: torch.Tensor

        own = Own()
        own.x = super().forward(getattr(given, "x", given))
        return own


class Wraps(Net):
    def __init__(self) -> None:
        super().__init__(Wrapped)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(x).x


class Returns(Net):
    """Model whose last stage returns what no other rank can get."""

    kind = "local"

    def forward(self, x: torch.Tensor) -> Any:
        x = self.last(self.features(x))
        return x.to_sparse() if self.kind == "sparse" else lambda: x


class Encoder(Net):
    """Encoder of torch, whose fast path in evaluation makes nested tensors."""

    def __init__(self, nested: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=nested)

    def forward(self, x: torch.Tensor) -> Any:
        ends = torch.arange(3) >= 1 + (x[:, :2] > 0).sum(1, keepdim=True)
        x = x[:, None, :].expand(-1, 3, -1) * torch.arange(1.0, 4)[:, None]
        h = self.blocks(self.first(x), src_key_padding_mask=ends)
        return self.last(h.masked_fill(ends[..., None], 0.0).sum(1))


def refused(make: Any, why: str, **attributes: Any) -> None:
    torch.manual_seed(0)
    net = make().double()
    vars(net).update(attributes)
    model = dw.wrap_model(net).eval()
    for _ in range(2):  # and no rank is left behind
        with pytest.raises((ModelError, CollectiveError), match=why), torch.no_grad():
            model(batch(0)[0])


@pytest.mark.parametrize(
    ("make", "why", "attributes"),
    [
        (Wraps, "cannot be sent to the other stages: .*Own", {}),
        (Returns, "cannot be sent to the other stages: .*lambda", {}),
        (Returns, "cannot be sent to the other stages: .*sparse", {"kind": "sparse"}),
        (Encoder, "enable_nested_tensor=False", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_sent_is_an_error_on_all_ranks(make: Any, why: str, attributes: dict[str, Any]) -> None:
    """A nested or sparse tensor, and what pickle does not know, is refused by name on each rank, and none waits."""
    ranks(lambda: refused(make, f"(?s){why}", **attributes))


def encoded() -> torch.Tensor:
    torch.manual_seed(0)
    model = dw.wrap_model(Encoder(nested=False).double()).eval()
    with torch.no_grad():
        return model(batch(0)[0])


def test_an_encoder_without_nested_tensors_evaluates() -> None:
    """The spelling that the error names gives what one process computes."""
    expected = encoded()
    for found in ranks(encoded):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


class MaskedEncoder(Encoder):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self(x) - y).square().mean()


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_an_encoder_trains_with_a_padding_mask(options: dict[str, Any]) -> None:
    """Code that every rank can run, as on the arguments, writes in place, also before the first pass of a schedule."""
    same_as_one_process(MaskedEncoder, by_loss, **options)


# Buffers, where a rank has several stages


class CountingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(()))
        nn.utils.parametrizations.spectral_norm(self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean())
        return super().forward(self.norm(x))


class Counting(Net):
    """Model with statistics in its stem, its blocks and its head, and counts of its own."""

    counts_after = False

    def __init__(self) -> None:
        super().__init__(CountingBlock)
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(WIDTH))
        self.last = nn.Sequential(nn.BatchNorm1d(WIDTH), self.last)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.again = self.again + 1
        x = super().forward(x)
        if self.counts_after:
            self.calls += 1
        return x


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_buffers_change_once(options: dict[str, Any]) -> None:
    """Statistics and counts are those of one process, also where a rank runs the code around its blocks twice."""
    same_as_one_process(Counting, by_loss, **options, **({"microbatches": 1} if options else {}))


def counted_after() -> None:
    net = Counting().double()
    net.counts_after = True
    model = dw.wrap_model(net)
    with pytest.raises((ModelError, CollectiveError), match=r"'calls' is changed after the blocks.*schedule='1f1b'"):
        model.loss(*batch(0))


def test_a_buffer_that_is_changed_before_and_after_the_blocks_is_refused_where_a_rank_has_several_stages() -> None:
    """What would be counted twice or not at all is an error before any gradient."""
    ranks(counted_after, loss="loss", schedule="interleaved", microbatches=1)


# What a loss's target is


class Padded(Net):
    """Model whose loss is a mean over the targets that are not 0."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        kept = (y != 0).to(x.dtype)
        return scale * ((self(x) - y).square() * kept).sum() / kept.sum()


def counted(y: torch.Tensor) -> torch.Tensor:
    return (y != 0).sum()


def padded(call: Any) -> Any:
    def step(model: Any, number: int) -> torch.Tensor:
        x, y = batch(number)
        y[: 3 + number] = 0
        return call(model, x, y)

    return step


@pytest.mark.parametrize(
    "call",
    [lambda model, x, y: model.loss(y=y, x=x), lambda model, x, y: model.loss(x, y, 0.5)],
    ids=["other order", "option"],
)
def test_weight_gets_the_target_however_the_call_is_written(call: Any) -> None:
    """The target is the last tensor in the order of the method's signature, and not of the call."""
    same_as_one_process(Padded, padded(call), loss="loss", weight=counted)


# One optimizer over two models


def gone(folder: Any) -> None:
    torch.manual_seed(0)
    first, second = Net().double(), Net().double()
    kept, lost = dw.wrap_model(first), dw.wrap_model(second)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    (kept(batch(0)[0]).mean() + lost(batch(0)[0]).mean()).backward()
    optimizer.step()
    del lost
    gc.collect()
    for use in (
        lambda: dw.save({"optimizer": optimizer}, folder / "file"),
        lambda: dw.optimizer_step(optimizer, max_norm=1.0),
    ):
        with pytest.raises(ModelError, match="wrapper is gone"):
            use()


def test_an_optimizer_over_a_model_whose_wrapper_is_gone_is_refused(tmp_path: Path) -> None:
    """Its state on other ranks would be lost in a file, and its gradients in a norm."""
    ranks(gone, tmp_path)


def test_looks_at_backwards_end_in_any_order() -> None:
    """Ranks that are threads look at backwards, each at all of them; the last to end leaves torch as it was."""
    before = torch.autograd._engine_run_backward
    seen: list[str] = []
    weight = torch.ones(1, requires_grad=True)
    first = look_at_backwards(lambda *_: seen.append("first"))
    second = look_at_backwards(lambda *_: seen.append("second"))
    torch.autograd.grad(weight.sum(), weight)
    assert sorted(seen) == ["first", "second"]
    first()
    torch.autograd.grad(weight.sum(), weight)
    assert seen[2:] == ["second"]
    second()
    assert torch.autograd._engine_run_backward is before
