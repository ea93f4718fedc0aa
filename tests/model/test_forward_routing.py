"""Any method of the user's model trains through the wrapper; a plain one reaches the model as it is."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.model.gradients import Average
from distwrap.model.wrapped_models import gradients_of, handle_of
from distwrap.testing import run_ranks
from tests.one_process import assert_as_in_one_process
from tests.slow import few

STEPS = 3


class Net(nn.Module):
    """Has the methods that people give their models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.double()
        self.calls: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh()) * self.scale

    @torch.no_grad()
    def unrouted(self, x: torch.Tensor) -> torch.Tensor:
        """Call the parts from another thread."""
        return self.head(self.body(x))  # type: ignore[no-any-return]

    def loss(self, x: torch.Tensor, *, power: int = 2) -> torch.Tensor:
        """Return the loss of a batch."""
        return (self(x) - x.sum(1, keepdim=True).sin()).abs().pow(power).mean()

    def by_parts(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh()).mul(self.scale).pow(2).mean()

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.body.weight, self.body.bias, self.head.weight, self.head.bias)
        hidden = nn.functional.linear(x, weights[0], weights[1]).tanh()
        return (nn.functional.linear(hidden, weights[2], weights[3]) * self.scale).pow(2).mean()

    def training_step(self, x: torch.Tensor) -> float:
        loss = self.loss(x)
        loss.backward()
        return loss.item()

    def fit(self, batches: torch.Tensor, optimizer: torch.optim.Optimizer, share: Callable[[Any], Any]) -> None:
        for x in batches:
            optimizer.zero_grad()
            self.loss(share(x)).backward()
            optimizer.step()

    def outputs(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": self(x), "name": "net", "n": len(x)}

    def distilled(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.body(x)
        return (self.head(self.body(x).tanh()) * self.scale - target[:, :1]).pow(2).mean()

    @torch.no_grad()
    def generated(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def describe(self, *names: str) -> tuple[str, ...]:
        self.calls.append("describe")
        return names

    @classmethod
    def kind(cls) -> type:
        return cls


def batches() -> torch.Tensor:
    return torch.randn(STEPS, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def share(x: torch.Tensor) -> torch.Tensor:
    return x[dw.rank() :: dw.world_size()]


WAYS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "loss": lambda model, x: model.loss(x).backward(),
    "keyword": lambda model, x: model.loss(x, power=4).backward(),
    "by_parts": lambda model, x: model.by_parts(x).backward(),
    "by_hand": lambda model, x: model.by_hand(x).backward(),
    "training_step": lambda model, x: model.training_step(x),
    "dict": lambda model, x: model.outputs(x)["y"].pow(2).mean().backward(),
    "no_grad first": lambda model, x: model.distilled(x).backward(),
    "generated before": lambda model, x: (model.generated(x), model.loss(x).backward()),
    "generated between": lambda model, x: (model.loss(x) + model.generated(x).sum()).backward(),
    "two": lambda model, x: (model.loss(x) + model.by_parts(x)).backward(),
    "forward and method": lambda model, x: (model(x).pow(2).mean() + model.loss(x)).backward(),
    "one after the other": lambda model, x: (model.loss(x).backward(), model.by_parts(x).backward()),
}


def trained(way: str, options: dict[str, Any]) -> Callable[[], list[float]]:
    def train() -> list[float]:
        model: Any = dw.wrap_model(Net(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way == "fit":
            model.fit(batches(), optimizer, share)
        else:
            for x in batches():
                optimizer.zero_grad()
                WAYS[way](model, share(x))
                optimizer.step()
        dw.assert_in_sync(model)
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    return train


@pytest.mark.parametrize("way", few([*WAYS, "fit"], 4))
def test_any_method_trains_as_one_process(way: str) -> None:
    """Weights after several steps equal those of one process, whichever methods ran the forward and the backward."""
    assert_as_in_one_process(trained(way, {}))


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("way", few(["loss", "by_parts", "by_hand", "dict", "no_grad first", "generated before"], 1))
def test_methods_train_with_options_of_ddp(way: str, options: dict[str, Any]) -> None:
    """Where DDP needs to see the outputs it does."""
    [expected] = run_ranks(trained(way, {}), 1)
    for weights in run_ranks(trained(way, options), 2):
        assert weights == pytest.approx(expected, rel=0, abs=1e-12)


def test_unused_parameters_of_a_method_are_found() -> None:
    """With ``find_unused_parameters=True`` a method may leave a part out, another one the next time."""

    class Branches(Net):
        def bodily(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).pow(2).mean()

    def train() -> list[float]:
        model: Any = dw.wrap_model(Branches(), **({"find_unused_parameters": True} if dw.world_size() > 1 else {}))
        for x in batches():
            model.bodily(share(x)).backward()
            model.loss(share(x)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()

    assert_as_in_one_process(train)


def test_plain_methods_reach_the_model_as_it_is() -> None:
    """What runs no forward exchanges nothing, so one rank alone may call it; class methods and signatures are kept."""

    def on_rank() -> None:
        net = Net()
        model: Any = dw.wrap_model(net)
        model.loss(share(batches()[0])).backward()  # after the first backward DDP's next forward would be a collective
        if dw.rank() == 0:
            assert model.describe("a", "b") == ("a", "b")
            with torch.no_grad():
                assert model.loss(batches()[0]).item() > 0
        assert net.calls == ["describe"] * (dw.rank() == 0)
        model.loss(share(batches()[0])).backward()
        assert model.kind() is Net
        assert inspect.signature(model.loss) == inspect.signature(net.loss)
        assert (model.loss.__name__, model.loss.__doc__) == ("loss", "Return the loss of a batch.")
        assert model.calls is net.calls

    run_ranks(on_rank, 2, timeout=20)


def test_a_method_that_only_returns_parameters_is_no_forward() -> None:
    """As one that makes the groups of an optimizer: it prepares no average, also where it is the first to be called."""

    class Groups(Net):
        def groups(self) -> list[dict[str, Any]]:
            return [{"params": list(self.body.parameters())}, {"params": [self.scale], "lr": 0.01}]

    def train() -> list[float]:
        model: Any = dw.wrap_model(Groups())
        optimizer = torch.optim.SGD(model.groups(), lr=0.1)
        for x in batches():
            if gradients := gradients_of(model):
                model.groups()
                assert gradients.average is Average.NONE
            optimizer.zero_grad()
            model.loss(share(x)).backward()
            optimizer.step()
        dw.assert_in_sync(model)
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    assert_as_in_one_process(train)


@pytest.mark.parametrize("options", few([{}, {"static_graph": True}, {"precision": "bf16"}], 2), ids=str)
def test_a_forward_that_is_replaced_after_wrapping_trains(options: dict[str, Any]) -> None:
    """As a decorator around `model.forward` does, and again around that; called by name, `forward` trains too."""

    def trained(by_name: bool) -> list[float]:
        model: Any = dw.wrap_model(Net(), **(options if dw.world_size() > 1 or "precision" in options else {}))
        if not by_name:
            for number in (2, 3):
                plain = model.forward
                model.forward = lambda x, plain=plain, number=number: number + plain(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches():
            optimizer.zero_grad()
            outputs = 5 + model.forward(share(x)) if by_name else model(share(x))
            outputs.square().mean().backward()
            optimizer.step()
        dw.assert_in_sync(model)
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    one = [run_ranks(trained, 1, by_name)[0] for by_name in (False, True)]
    assert one[0] == pytest.approx(one[1], rel=0, abs=1e-12)
    for found in run_ranks(lambda: [trained(by_name) for by_name in (False, True)], 2):
        assert found[0] == pytest.approx(found[1], rel=0, abs=1e-12)
        assert found[0] == pytest.approx(one[0], rel=0, abs=1e-2 if options else 1e-12)


def test_a_method_that_yields_its_losses_is_told_to_return_them() -> None:
    """It has ended before its first forward, which is the bare model's then."""

    class Yields(Net):
        def losses(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield self.loss(x)

    def on_rank() -> str:
        model: Any = dw.wrap_model(Yields())
        with pytest.raises(ModelError) as refusal:
            next(model.losses(share(batches()[0]))).backward()
        return str(refusal.value)

    for words in run_ranks(on_rank, 2):
        assert words.endswith("A method that yields losses has ended before its forward: let it return them.")


def test_a_method_that_calls_the_wrapper_has_one_forward() -> None:
    """It prepares one average as by the bare model: no forward seems to be repeated, and none is counted twice."""

    def on_rank() -> int:
        net = Net()
        net.register_buffer("unused", torch.zeros(1))
        model: Any = dw.wrap_model(net)
        net.whole = lambda x: model(x)  # type: ignore[assignment]

        class Outer(Net):
            def around(self, x: torch.Tensor) -> torch.Tensor:
                return self.whole(x).square().mean()

        net.__class__ = Outer
        model.around(share(batches()[0])).backward()
        handle = handle_of(model)
        assert handle is not None
        return int(handle.buffers.forwards)

    assert run_ranks(on_rank, 2) == [1, 1]


def test_another_thread_may_evaluate_while_a_method_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method goes on with its own inputs."""

    def losses(evaluates: bool) -> list[float]:
        model = dw.wrap_model(Net())
        x, routing = batches()[0], handle_of(model).routing  # type: ignore[union-attr]
        begin, threads = routing._begin, list[threading.Thread]()

        def evaluated(call: Any) -> bool:
            if evaluates and not threads:
                threads.append(threading.Thread(target=lambda: model.unrouted(x + 1)))
                threads[0].start()
                threads[0].join()
            return bool(begin(call))

        monkeypatch.setattr(routing, "_begin", evaluated)
        return [model.loss(share(x)).item(), len(threads)]

    assert run_ranks(lambda: losses(True), 2) == [[loss, 1] for loss, _ in run_ranks(lambda: losses(False), 2)]


def test_methods_compute_in_the_runs_precision() -> None:
    """A routed method runs under autocast, with gradients and without, and returns float32; a plain one does not."""

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.seen: list[torch.dtype] = []

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.seen.append(y.dtype)
            return y

        def plain(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append((x @ x).dtype)
            return x

    def on_rank() -> None:
        model: Any = dw.wrap_model(Seen(), precision="bf16")
        y = model.loss(torch.ones(1, 2))
        y.sum().backward()
        with torch.no_grad():
            assert model.loss(torch.ones(1, 2)).dtype == y.dtype == torch.float32
        model.plain(torch.ones(2, 2))
        assert model.seen == [torch.bfloat16, torch.bfloat16, torch.float32]

    run_ranks(on_rank, 1)
    run_ranks(on_rank, 2)


def test_named_methods_are_the_only_ones() -> None:
    """With ``forward_methods`` given, others run on the bare model, and a backward of theirs is an error."""

    def on_rank() -> str:
        model: Any = dw.wrap_model(Net(), forward_methods=["loss"])
        model.loss(batches()[0]).backward()
        with pytest.raises(ModelError) as refusal:
            model.by_parts(batches()[0]).backward()
        return str(refusal.value)

    for rank, text in enumerate(run_ranks(on_rank, 2)):
        assert text.startswith(f"rank {rank}: this backward's gradients are not averaged")
        assert "with the other ranks' of Net" in text


@pytest.mark.parametrize("names", [["losss"], "loss", ["train"], ["__init__"]])
def test_wrong_names_are_refused_in_one_process_too(names: Any) -> None:
    """A name that is no method of the model is an error that lists those there are."""
    with pytest.raises(ModelError, match=r"forward.method"):
        dw.wrap_model(Net(), forward_methods=names)
    with pytest.raises(ModelError, match="'loss'"):
        dw.wrap_model(Net(), forward_methods=["losss"])


def test_a_method_may_be_called_by_another() -> None:
    """A method that comes back to the wrapper, as through a closure, begins once."""

    def on_rank() -> list[float]:
        net = Net()
        model: Any = dw.wrap_model(net)
        net.again = lambda x: model.loss(x)

        class Outer(Net):
            pass

        net.__class__ = Outer
        Outer.outer = lambda self, x: self.again(x) + self.by_parts(x)  # type: ignore[attr-defined]
        model.outer(share(batches()[0])).backward()
        return [p.grad.sum().item() for p in net.parameters()]

    one, other = run_ranks(on_rank, 2)
    assert one == other
