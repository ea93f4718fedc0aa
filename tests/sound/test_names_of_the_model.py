"""What is looked up, set, registered or called on a wrapped model is the model's, whatever DDP has of that name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sized
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.testing import run_ranks
from tests.one_process import assert_as_in_one_process
from tests.slow import few
from tests.strategies.wrappers import Copy

KINDS = ["ddp", "local"]
STEPS = 4


def on_each(kind: str, body: Callable[[], Any]) -> list[Any]:
    return run_ranks(body, 2 if kind == "ddp" else 1)


def wrap(net: nn.Module, kind: str, **options: Any) -> Any:
    """Wrap a model; in one process in a precision, since a plain one comes back as it is."""
    model = dw.wrap_model(net, precision="bf16" if kind == "local" else "32", **options)
    assert model is not net
    return model


def share(step: int) -> torch.Tensor:
    """Return this rank's part of a batch."""
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x[dw.rank() :: dw.world_size()]


def weights(net: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).tolist()


class Namesake(nn.Module):
    """A model that has names of DDP's, of DataParallel's, and of distwrap's wrappers, with other meanings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.static_graph = "a knowledge graph"
        self.device_type, self.mixed_precision, self.find_unused_parameters = "phone", ["recipe"], None
        self.logger = logging.getLogger("model")
        self.reducer = nn.Linear(3, 4, dtype=torch.float64)  # read by DDP in every backward, under this name
        self.process_group, self.parameters_to_ignore, self.bucket_bytes_cap = {"a": 1}, 5, "cap"
        self.gather = nn.Linear(4, 1, dtype=torch.float64)
        self.register_buffer("join_device", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(self.reducer(x).tanh())

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) - 1).pow(2).mean()

    def route(self, *path: str) -> str:
        return "/".join(path)

    def release(self) -> str:
        return "1.0"

    def end_exchange(self) -> str:
        return "closed"

    def join(self, words: list[str]) -> str:
        return " ".join(words)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).exp().mean()

    @property
    def will_sync_module_buffers(self) -> str:
        return "maybe"


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_names_win(kind: str) -> None:
    """Attributes, parts, buffers, properties and methods are the model's; DDP's are there where it has none."""

    def body() -> None:
        net = Namesake()
        model = wrap(net, kind)
        for name in ("static_graph", "device_type", "mixed_precision", "logger", "reducer", "process_group", "gather"):
            assert getattr(model, name) is getattr(net, name)
        for name in ("find_unused_parameters", "parameters_to_ignore", "bucket_bytes_cap", "will_sync_module_buffers"):
            assert getattr(model, name) == getattr(net, name)
        assert model.join_device is net.join_device
        assert (model.route("a", "b"), model.release(), model.end_exchange()) == ("a/b", "1.0", "closed")
        assert model.join(["two", "words"]) == "two words"
        assert hasattr(model, "no_sync") == (kind == "ddp")

    on_each(kind, body)


@pytest.mark.parametrize("options", few([{}, {"find_unused_parameters": True}, {"static_graph": True}], 1))
def test_a_namesake_of_ddp_trains_as_in_one_process(options: dict[str, Any]) -> None:
    """DDP reads its own names, by the forward and by methods, also such as have the name of one of DDP's."""

    def train() -> list[float]:
        net = Namesake()
        model: Any = dw.wrap_model(net, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = share(step)
            way = (model, model.loss, model.scatter)[step % 3]
            way(x).mean().backward()
            optimizer.step()
        dw.assert_in_sync(model)
        return weights(net)

    assert_as_in_one_process(train)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_set_is_the_models(kind: str) -> None:
    """Also under a name of DDP's that the model does not have yet; DDP's switches stay DDP's."""

    class Net(nn.Linear):
        logger: Any = None

    def body() -> None:
        net = Net(3, 1)
        model = wrap(net, kind)
        values = {"logger": "log", "static_graph": "graph", "device_type": "phone", "_own": 1, "_model": 2, "_run": 3}
        for name, value in values.items():
            setattr(model, name, value)
            assert getattr(net, name) == getattr(model, name) == value
        del model.static_graph
        assert not hasattr(net, "static_graph")
        if kind == "ddp":
            model.require_backward_grad_sync = False
            (model(torch.full((2, 3), 1.0 + dw.rank())).sum()).backward()
            assert net.weight.grad.tolist() == [[2.0 + 2 * dw.rank()] * 3]
            assert "require_backward_grad_sync" not in vars(net)
        model.forward = lambda x: x
        assert model(torch.ones(1)).item() == net(torch.ones(1)).item() == 1

    on_each(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_registered_is_the_models(kind: str) -> None:
    """``add_module``, ``register_buffer`` and ``register_parameter`` reach the model, where its methods see it."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(super().forward(x) * self.mask) if hasattr(self, "last") else super().forward(x)

    def body() -> None:
        net = Net(3, 2)
        model = wrap(net, kind)
        model.add_module("last", nn.ReLU())
        model.register_module("join", nn.Identity())
        model.register_buffer("mask", torch.tensor([1.0, 0.0]), persistent=False)
        model.register_buffer("logger", torch.zeros(1))
        model.register_parameter("nothing", None)
        assert list(net.children()) == [model.last, model.join]
        assert net.mask is model.mask
        assert net.nothing is None
        assert list(model.state_dict()) == list(net.state_dict()) == ["weight", "bias", "logger"]
        assert [name for name, _ in model.named_children()] == ["last", "join"]
        y = model(torch.ones(4, 3))
        assert (y[:, 1] == 0).all()
        assert (y >= 0).all()

    on_each(kind, body)


def test_parameters_that_are_registered_late_are_an_error_where_they_are_trained() -> None:
    """By ``add_module`` as by an attribute, since DDP does not average them."""

    def body() -> None:
        net = nn.Sequential(nn.Linear(3, 3))
        model: Any = dw.wrap_model(net)
        with pytest.raises(ModelError, match="new parameters"):
            setattr(model, "1", nn.Linear(3, 3))
        model.add_module("1", nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ModelError, match=r"'1\.weight' was added"):
            optimizer.step()

    run_ranks(body, 2)


class Hooked(nn.Module):
    """A model with methods that call it, and one that calls only a part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean()


def hooked(model: Any) -> list[str]:
    """Register a hook of each kind, call the model in several ways, and return what the hooks have seen."""
    seen: list[str] = []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, y: seen.append(f"after {type(module).__name__} {tuple(y.shape)}"))
    model.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    handle = model.register_forward_hook(lambda module, args, y: y * 2)
    x = torch.ones(4, 3, requires_grad=True)
    for call in (model, model.loss, model.part):
        seen.append("call")
        call(x).sum().backward()
        with torch.no_grad():
            call(x)
    doubled = model(x)
    handle.remove()
    assert torch.equal(doubled, model(x) * 2)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_act_in_methods_as_in_calls(kind: str) -> None:
    """Hooks that are registered on the wrapper act where the model is called, by itself or in its methods."""
    expected = hooked(Hooked())
    assert expected.count("before") > 4
    for seen in on_each(kind, lambda: hooked(wrap(Hooked(), kind))):
        assert seen == expected


class Shelf(nn.Module):
    """A model with special methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 3), nn.ReLU()])
        self.opened = 0

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])

    def __contains__(self, name: object) -> bool:
        return name == "a"

    def __enter__(self) -> Shelf:
        self.opened += 1
        return self

    def __exit__(self, *args: Any) -> None:
        self.opened -= 1

    def __matmul__(self, other: int) -> int:
        return 2 * other

    def __repr__(self) -> str:
        return "a shelf"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[1](self.parts[0](x))

    def itself(self) -> Shelf:
        return self


@pytest.mark.parametrize("kind", KINDS)
def test_special_methods_are_the_models(kind: str) -> None:
    """Those of containers and the user's own work through the wrapper; what the model lacks, the wrapper lacks too."""

    def body() -> None:
        layers = nn.ModuleDict({"first": nn.Linear(3, 2), "second": nn.ReLU()})
        model = wrap(layers, kind)
        assert [name in model for name in ("first", "third")] == [True, False]
        assert list(model) == list(model.keys()) == ["first", "second"]
        assert dict(model.items()) == dict(layers.items())
        assert (model["first"], len(model)) == (layers["first"], 2)
        model["third"] = nn.Identity()
        del model["second"]
        assert list(layers) == ["first", "third"]

        shelf = Shelf()
        model = wrap(shelf, kind)
        assert list(model) == ["a", "b"]
        assert [name in model for name in ("a", "c")] == [True, False]
        assert (model @ 3, repr(model), str(model)) == (6, "a shelf", "a shelf")
        with model as opened:
            assert (opened, shelf.opened) == (model, 1)
        assert shelf.opened == 0

        model = wrap(nn.Linear(3, 2), kind)
        assert not isinstance(model, (Iterable, Container, Sized))
        assert not hasattr(model, "__len__")
        with pytest.raises(TypeError, match="not iterable"):
            list(model)

    on_each(kind, body)


def test_a_strategys_own_wrapper_has_the_special_methods_of_the_model_too() -> None:
    """A `TransparentModule` around a container is a container."""
    layers = nn.ModuleDict({"first": nn.Linear(3, 2)})
    model: Any = Copy(layers)
    assert (type(model).__name__, list(model), "first" in model, len(model)) == ("Copy", ["first"], True, 1)
    assert not isinstance(Copy(nn.Linear(3, 2)), Sized)


def test_a_strategys_own_wrapper_has_the_names_of_torchs_wrapper_in_it() -> None:
    """Where the model has none of that name; what is set on it, and hooks, are the model's, and its own are its own."""
    net = nn.Linear(3, 2)
    model: Any = Copy(nn.DataParallel(net))
    model.device_type, model._own = "phone", 1
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("model"))
    model(torch.ones(1, 3))
    assert (list(model.device_ids), net.device_type, calls) == (model.module.device_ids, "phone", ["model"])
    assert (model._own, hasattr(net, "_own"), dw.unwrap_model(model) is net) == (1, False, True)
    assert type(copy.deepcopy(model)) is nn.Linear


class Overriding(nn.Linear):
    """A model that has methods of any module in a way of its own."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.moves, self.pauses = 0, 0

    def train(self, mode: bool = True) -> Overriding:
        self.mode = mode
        return super().train(mode)

    def eval(self) -> Overriding:
        self.pauses += 1
        return super().eval()

    def to(self, *args: Any, **kwargs: Any) -> Overriding:
        self.moves += 1
        return super().to(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield self.weight

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(False)

    def freeze(self) -> Overriding:
        self.bias.requires_grad_(False)
        return self


@pytest.mark.parametrize("kind", KINDS)
def test_methods_of_any_module_that_the_model_overrides_are_its_own(kind: str) -> None:
    """And one that returns the model returns the wrapper, so that ``model = model.freeze()`` goes on training."""

    def body() -> None:
        net = Overriding()
        model = wrap(net, kind)
        assert model.train() is model.eval() is model.to("cpu") is model.freeze() is model
        assert model.requires_grad_() is model.apply(lambda part: None) is model.get_submodule("") is model
        assert (net.mode, net.pauses, net.moves, model.training) == (False, 1, 1 + net.moves // 2, False)
        assert list(model.parameters()) == [net.weight]
        model.train()(torch.ones(1, 3)).sum().backward()
        model.zero_grad()
        assert net.weight.grad.tolist() == [[0.0] * 3] * 2
        if kind == "ddp":
            with pytest.raises(ModelError, match="has been moved"):
                model.to(torch.bfloat16)

    on_each(kind, body)


class Checkpointed(nn.Module):
    """A model that recomputes its parts in the backward, which one of its methods calls."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for part in (self.first, self.second):
            x = checkpoint(lambda y, part=part: part(y).tanh(), x, use_reentrant=self.reentrant)
        return self.last(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).pow(2).mean()

    def training_step(self, x: torch.Tensor) -> float:
        loss = self.loss(x)
        loss.backward()
        return loss.item()

    def whole(self, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        checkpoint(self.loss, x, use_reentrant=self.reentrant).backward()

    def fit(self, optimizer: torch.optim.Optimizer) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            self.training_step(share(step))
            optimizer.step()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", few(["training_step", "fit", "whole", "loss"], 1))
def test_checkpointing_in_a_method_that_calls_backward(method: str, reentrant: bool) -> None:
    """What is recomputed in the backward is no forward of its own: the method trains as in one process."""

    def train() -> list[float]:
        net = Checkpointed(reentrant)
        model: Any = dw.wrap_model(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if method == "fit":
            model.fit(optimizer)
        else:
            for step in range(STEPS):
                optimizer.zero_grad()
                result = getattr(model, method)(share(step))
                if method == "loss":
                    result.backward()
                optimizer.step()
        dw.assert_in_sync(model)
        return weights(net)

    assert_as_in_one_process(train)


def test_ddps_own_names_act_on_ddp() -> None:
    """``no_sync``, ``register_comm_hook`` and ``Join`` work on what wrap_model returns."""

    def body() -> list[float]:
        net = nn.Linear(2, 1, bias=False)
        model: Any = dw.wrap_model(net)
        hooked: list[int] = []

        def average(state, bucket):  # type: ignore[no-untyped-def]  # DDP would check the types
            hooked.append(bucket.index())
            future = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / dw.world_size())

        model.register_comm_hook(None, average)
        with model.no_sync():
            model(torch.full((1, 2), 1.0 + dw.rank())).sum().backward()
        assert not hooked
        model.zero_grad()
        with Join([model]):
            for _ in range(1 + dw.rank()):
                model.zero_grad()
                model(torch.full((1, 2), 1.0 + dw.rank())).sum().backward()
        assert hooked
        return list(net.weight.grad.flatten().tolist())

    one, other = run_ranks(body, 2)
    assert (one, other) == ([1.5, 1.5], [1.0, 1.0])  # torch's Join counts a rank that is out of data as zeros
