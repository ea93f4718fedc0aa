"""Tensors in dataclasses, mappings, plain objects and what moves itself are tensors as those in lists are."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import distwrap as dw
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.devices.transfer import to_device
from distwrap.errors import PrecisionError
from distwrap.testing import run_ranks
from tests.precision.test_precision import under
from tests.slow import few

META = torch.device("meta")


@dataclass
class Record:
    y: Any
    name: str = "record"


@dataclass(frozen=True)
class Frozen:
    y: Any


@dataclass(slots=True)
class Slotted:
    y: Any


@dataclass
class Output(OrderedDict[str, Any]):
    """As ``transformers.modeling_outputs.ModelOutput``: each tensor is an item and an attribute."""

    y: Any = None
    other: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return (type(self), tuple(getattr(self, field.name) for field in fields(self)), *super().__reduce__()[2:])


class Encoding(UserDict[str, Any]):
    """As ``transformers.BatchEncoding``: it moves itself in place, and answers for its items."""

    def __init__(self, y: Any) -> None:
        super().__init__({"y": y})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class Plain:
    def __init__(self, y: Any) -> None:
        self.y = y


class Pair(NamedTuple):
    y: Any
    name: str = "pair"


class Named(dict[str, Any]):
    """A dict of its own class."""


KINDS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda y: {"y": y},
    "dataclass": Record,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slotted,
    "ModelOutput": Output,
    "BatchEncoding": Encoding,
    "object": Plain,
    "namespace": lambda y: SimpleNamespace(y=y, kind="namespace"),
    "mapping proxy": lambda y: MappingProxyType({"y": y}),
    "named tuple": Pair,
    "dict of a class": lambda y: Named(y=y),
    "deque": lambda y: deque([y]),
    "distribution": lambda y: torch.distributions.Independent(torch.distributions.Normal(y, 1.0), 1),
    "objects in objects": lambda y: Plain({"a": [Record(MappingProxyType({"b": Plain((y, "c"))}))]}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def first(value: Any) -> torch.Tensor:
    return tensors_in(value)[0]


@kinds
def test_a_nesting_is_rebuilt_where_a_tensor_changes(kind: str) -> None:
    """Its class and what else it holds stay, the original is as it was, and nothing is copied without need."""
    value, ones = KINDS[kind](torch.ones(1)), torch.ones(1)
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert type(doubled) is type(value)
    assert torch.equal(first(doubled), 2 * ones)
    assert torch.equal(first(value), ones)
    assert map_tensors(lambda tensor: tensor, value) is value
    if kind == "ModelOutput":
        assert doubled["y"] is doubled.y is doubled[next(iter(doubled))]
        assert len(tensors_in(value)) == 1
    if kind == "BatchEncoding":
        assert doubled.y is doubled["y"]


def test_a_cycle_ends() -> None:
    """An object may hold itself."""
    value = Plain(torch.ones(1))
    value.me = [value]  # type: ignore[attr-defined]
    assert tensors_in(value) == [value.y]
    assert map_tensors(torch.neg, value).y == -1


def test_modules_and_optimizers_are_left_alone() -> None:
    """What is trained is no data, wherever it is held."""
    net = nn.Linear(1, 1)
    value = Plain([net, torch.optim.SGD(net.parameters(), lr=0.1), nn.Linear])
    assert tensors_in(value) == []


@kinds
def test_batches_are_moved(kind: str) -> None:
    """A batch of any kind is on the rank's device, and what the dataset holds stays where it is."""
    data = [KINDS[kind](torch.ones(1)) for _ in range(2)]
    for given, batch in zip(data, dw.shard_loader(DataLoader(data, batch_size=None), device="meta"), strict=True):  # type: ignore[arg-type]
        assert first(batch).device == META
        assert first(given).device == torch.device("cpu") or kind == "BatchEncoding"  # which moves in place


class Graph:
    """An object whose tensors nobody sees; it moves itself, and returns nothing."""

    place: Any = None

    def to(self, device: torch.device) -> None:
        self.place = device


def test_what_moves_itself_is_asked_to() -> None:
    """``to()`` is called, with or without ``non_blocking``; of a PackedSequence the lengths stay on the CPU."""
    packed, graph = pack_sequence([torch.ones(2), torch.ones(1)]), Graph()
    moved, same = to_device([packed, graph], META)
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device, moved.batch_sizes.device) == (META, torch.device("cpu"))
    assert same is graph
    assert graph.place == META
    assert to_device(packed, torch.device("cpu")) is packed


class Net(nn.Module):
    """Takes a tensor in an object, and gives one in another."""

    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.kind = nn.Linear(4, 4), kind
        self.seen: Any = None

    def forward(self, x: Any) -> Any:
        y = self.inner(first(x))
        self.seen = y.dtype, y.device
        return KINDS[self.kind](y)

    def loss(self, x: Any) -> Any:
        return self.forward(x)

    def squared(self, a: torch.Tensor, *, b: torch.Tensor) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.float32
        return ((a - b) ** 2).mean()

    def held(self, x: Any) -> torch.device:
        return first(x).device


@kinds
def test_inputs_are_moved(kind: str) -> None:
    """A forward gets its inputs on the model's device, and a method those of dataclasses and mappings."""
    model = dw.wrap_model(Net(), device="meta")
    for method in (model, model.loss):
        model.seen = None
        x = KINDS[kind](torch.ones(2, 4))
        if method is model or kind not in ("object", "namespace", "distribution", "objects in objects"):
            method(x)
            assert model.seen[1] == META
    state = Plain(torch.ones(2, 4))
    model(state)
    assert state.y.device == META  # in place: what the forward writes to it is the caller's to see
    state = Plain(torch.ones(2, 4))
    assert model.held(state) == state.y.device == torch.device("cpu")


@kinds
@pytest.mark.parametrize("precision", few(["bf16", "fp16", "bf16-true"], 1))
def test_outputs_are_in_float32_and_watched(kind: str, precision: str) -> None:
    """Whatever a forward returns is in float32, and under fp16 a backward without a scale is refused."""

    def body() -> None:
        model = dw.wrap_model(Net(kind))
        for method in (model, model.loss):
            output = method(KINDS[kind](torch.ones(2, 4)))
            assert model.seen[0] == (torch.float16 if precision == "fp16" else torch.bfloat16)
            assert type(output) is type(KINDS[kind](torch.ones(2, 4)))
            assert {tensor.dtype for tensor in tensors_in(output)} == {torch.float32}
            if precision == "fp16":
                with pytest.raises(PrecisionError, match="zero unnoticed"):
                    first(output).sum().backward()

    under(precision, body)


def _two_forwards() -> dict[str, bool]:
    equal = {}
    for kind in KINDS:
        model = dw.wrap_model(Net(kind))
        for name, method in (("forward", model), ("method", model.loss)):
            model.zero_grad()
            outputs = [method(torch.full((2, 4), float(value + dw.rank()))) for value in (1, 2)]
            for output in outputs:
                first(output).sum().backward()
            equal[f"{name}, {kind}"] = bool(torch.equal(dw.reduce(model.inner.weight.grad), model.inner.weight.grad))
    return equal


def test_two_forwards_have_a_backward_each() -> None:
    """Each of two backwards averages over the ranks, whatever the outputs are in."""
    for equal in run_ranks(_two_forwards, 2):
        assert [name for name, is_equal in equal.items() if not is_equal] == []
        assert len(equal) == 2 * len(KINDS)


class Half(Net):
    """Leaves some parameters out."""

    def __init__(self, kind: str, half: bool) -> None:
        super().__init__(kind)
        self.unused = nn.Linear(4, 4) if half else None


def _where_outputs_are_needed() -> dict[str, bool]:
    equal = {}
    for option in ("find_unused_parameters", "static_graph"):
        for kind in KINDS:
            model = dw.wrap_model(Half(kind, option == "find_unused_parameters"), **{option: True})
            for method in (model, model.loss) if option == "find_unused_parameters" else (model,):
                for value in (1, 2):
                    model.zero_grad()
                    first(method(torch.full((2, 4), float(value + dw.rank())))).sum().backward()
                    gradient = model.inner.weight.grad
                    equal[f"{option}, {kind}"] = torch.equal(gradient, torch.full((4, 4), 2.0 * value + 1))
    return equal


def test_ddp_finds_the_outputs_that_it_needs() -> None:
    """``find_unused_parameters`` and ``static_graph`` average the gradients, whatever the outputs are in."""
    for equal in run_ranks(_where_outputs_are_needed, 2):
        assert [name for name, is_equal in equal.items() if not is_equal] == []
        assert len(equal) == 2 * len(KINDS)
