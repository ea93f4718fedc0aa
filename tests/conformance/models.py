"""Behaviours of a wrapped model as an object: names, attributes, copies, buffers, evaluation."""

import copy
import pickle
from collections import Counter
from typing import Any

import torch
from torch import nn

from distwrap.errors import ModelError
from distwrap.group.collectives import gather_object
from distwrap.model import unwrap_model
from distwrap.strategies import wrap_model, wrap_optimizer
from distwrap.testing.nets import BLOCKS, WIDTH, SmallNet, small
from distwrap.testing.sides import OneProcess, Trial, compare, epoch, fit, sgd
from tests.conformance.base import behaviour


class DescribedNet(SmallNet):
    """Net with a method that runs no forward."""

    def describe(self) -> str:
        """Return a few words on the net."""
        return f"{len(self.blocks)} blocks, scale {self.scale}"


@behaviour()
def attributes(trial: Trial) -> None:
    """Read, set and call the user's attributes on the wrapped model; what is set counts in the loss."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small(DescribedNet))
        assert model.scale == 1.0
        model.scale = 3.0
        model.note = "mine"
        net: Any = unwrap_model(model)
        assert (net.note, net.scale) == ("mine", 3.0)
        assert model.describe() == f"{BLOCKS} blocks, scale 3.0"
        return fit(side, model=model, epochs=1)

    trial.same(loop)


class MeteredNet(SmallNet):
    """Net whose methods call an object of the user's once a call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        self.calls["forward"] += 1
        return super().forward(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error."""
        self.calls["loss"] += 1
        return super().loss(x, y)


class MeteredSGD(torch.optim.SGD):
    """SGD whose step calls an object of the user's too."""

    def __init__(self, parameters: Any, calls: Counter[str]) -> None:
        self.calls = calls
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        self.calls["step"] += 1
        return super().step(closure)


@behaviour()
def the_users_code_runs_once_a_call(trial: Trial) -> None:
    """Run a loss method, a forward and an optimizer's step exactly as often as the loop calls them."""

    def loop(side: OneProcess) -> Any:
        net = small(MeteredNet)
        model = side.wrap(net)
        optimizer = side.prepare(wrap_optimizer(MeteredSGD(model.parameters(), net.calls), scope="element"))
        epoch(side, model, optimizer)
        with torch.no_grad():
            model.eval()(next(side.batches())[0])
        return dict(net.calls)

    trial.same(loop)


@behaviour()
def submodules(trial: Trial) -> None:
    """Reach the parts of the model by their names."""
    model = trial.wrap(small())
    assert len(model.blocks) == BLOCKS
    assert isinstance(model.blocks[0].norm, nn.LayerNorm)
    assert model.head is model.get_submodule("head")
    names = [name for name, _ in small().named_modules()]
    assert [name for name, _ in model.named_modules()] == names, "named_modules() names other parts"


@behaviour()
def is_an_instance(trial: Trial) -> None:
    """Be an instance of the user's class, and of ``nn.Module``."""
    model = trial.wrap(small())
    assert isinstance(model, SmallNet), f"a wrapped SmallNet is a {type(model).__qualname__} alone"
    assert isinstance(model, nn.Module)


@behaviour()
def unwrapping(trial: Trial) -> None:
    """Give the user's own model back by `unwrap_model`."""
    net = small()
    model = trial.wrap(net)
    assert unwrap_model(model) is net, "unwrap_model() returns another model than was wrapped"


@behaviour()
def wrapping_twice(trial: Trial) -> None:
    """Refuse to wrap a wrapped model, by a `ModelError`."""
    model = trial.wrap(small())
    if model is unwrap_model(model):
        return  # it is the user's own, as in a single process
    try:
        wrap_model(model)
    except ModelError:
        return
    raise AssertionError("a wrapped model was wrapped once more")


@behaviour()
def parameter_names(trial: Trial) -> None:
    """Name the parameters as the plain model does, before and after a step."""
    names = [name for name, _ in small().named_parameters()]
    model = trial.wrap(small())
    optimizer = trial.prepare(sgd(model.parameters()))
    for _ in range(2):
        found = [name for name, _ in model.named_parameters()]
        assert found == names, f"named_parameters() names {found}"
        epoch(trial, model, optimizer)


@behaviour()
def training_flag(trial: Trial) -> None:
    """Set the flag of all parts by ``train()`` and ``eval()``, which return the model."""
    model = trial.wrap(small())
    assert model.eval() is model
    assert not any(part.training for part in unwrap_model(model).modules()), "eval() left a part in training"
    assert model.train() is model
    assert model.training
    assert all(part.training for part in unwrap_model(model).modules()), "train() left a part in evaluation"


@behaviour(may_refuse=True)
def deepcopy(trial: Trial) -> None:
    """Copy a wrapped model: the copy computes the same, and is nobody else's; or refuse by name."""
    model = trial.wrap(small())
    _is_a_copy(trial, model, copy.deepcopy(model))


@behaviour(may_refuse=True)
def pickling(trial: Trial) -> None:
    """Pickle a wrapped model and back: it computes the same, and is nobody else's; or refuse by name."""
    model = trial.wrap(small())
    _is_a_copy(trial, model, pickle.loads(pickle.dumps(model)))


def _is_a_copy(trial: Trial, model: Any, copied: Any) -> None:
    optimizer = trial.prepare(sgd(model.parameters()))
    epoch(trial, model, optimizer)
    x, _ = next(trial.batches())
    with torch.no_grad():
        compare(copied(x), small()(x.cpu()))


class BufferedNet(SmallNet):
    """Net with a buffer that its state dict holds, and one that it does not."""

    shift: torch.Tensor
    passing: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))
        self.register_buffer("passing", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        found: torch.Tensor = super().forward(x) + self.shift.mean() * self.passing
        return found


@behaviour()
def buffers(trial: Trial) -> None:
    """Compute with buffers, and keep the persistent ones in the state."""
    trial.same(lambda side: fit(side, model=side.wrap(small(BufferedNet)), epochs=1))


class NormedNet(SmallNet):
    """Net with a batch norm before its first layer, whose statistics each rank gathers over its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(6, affine=False)
        for name in ("embed", "blocks", "head"):  # after it, as they are used
            self._modules[name] = self._modules.pop(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        return super().forward(self.statistics(x))


@behaviour()
def batch_norm(trial: Trial) -> None:
    """Evaluate with the same running statistics on all ranks, and keep them in the state."""
    model = trial.wrap(small(NormedNet))
    optimizer = trial.prepare(sgd(model.parameters()))
    epoch(trial, model, optimizer)
    model.eval()
    x, _ = next(trial.alone.batches())
    with torch.no_grad():
        outputs = gather_object(model(x))
    for number, found in enumerate(outputs):
        assert torch.equal(found, outputs[0]), f"in evaluation rank {number} computes other outputs than rank 0"
    state = trial.weights(model)
    assert state["statistics.num_batches_tracked"] >= 2, "the state lacks the statistics of two batches"
    plain = small(NormedNet)
    plain.load_state_dict(state)
    compare(plain.eval()(x).detach(), outputs[0])


@behaviour()
def evaluation(trial: Trial) -> None:
    """Evaluate under ``no_grad()`` on every rank: the outputs are those of one process."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small()).eval()
        whole = next(side.alone.batches())[0]
        with torch.no_grad():
            return model(whole)

    trial.same(loop)


@behaviour()
def evaluation_under_inference_mode(trial: Trial) -> None:
    """Evaluate under ``inference_mode()``, and train on."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        epoch(side, model, optimizer)
        whole = next(side.alone.batches())[0]
        with torch.inference_mode():
            outputs = model.eval()(whole)
        model.train()
        epoch(side, model, optimizer)
        return side.weights(model), outputs.clone()

    trial.same(loop)


@behaviour(may_refuse=True)
def evaluation_on_one_share(trial: Trial) -> None:
    """Evaluate on the ranks of share 0 alone while the others go on, or refuse by name; never hang."""
    model = trial.wrap(small())
    optimizer = trial.prepare(sgd(model.parameters()))
    x, _ = next(trial.alone.batches())
    if trial.rank == 0:
        model.eval()
        with torch.no_grad():
            compare(model(x), small()(x))
        model.train()
    epoch(trial, model, optimizer)
