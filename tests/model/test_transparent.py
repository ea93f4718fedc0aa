"""A wrapped model answers like the user's own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.testing import run_ranks
from tests.model.nets import Net
from tests.slow import slow

Body = Callable[[nn.Module, Net], object]

KINDS = ["ddp", "local"]


def wrapped(kind: str, body: Body) -> None:
    """Run the assertions of `body` on a wrapped model and the model in it, on every rank."""

    def on_rank() -> None:
        net = Net()
        model = dw.wrap_model(net, precision="bf16" if kind == "local" else "32")
        assert model is not net
        body(model, net)

    run_ranks(on_rank, 2 if kind == "ddp" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_methods_and_properties_are_the_models(kind: str) -> None:
    """What the model has is read through the wrapper, also where DDP has something of that name."""

    def body(model: nn.Module, net: Net) -> None:
        assert model.classes is net.classes
        assert model.describe() == "2 classes at step 0"
        assert model.width == 4
        assert (model.dim, model.device) == (7, "anywhere")
        assert model.body is net.body
        assert "describe" in dir(model)

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_is_an_instance_of_the_users_class(kind: str) -> None:
    """``isinstance`` holds for the user's class and its bases, and for DistributedDataParallel under DDP."""

    def body(model: nn.Module, net: Net) -> None:
        assert isinstance(model, Net)
        assert isinstance(model, nn.Module)
        assert isinstance(model, nn.parallel.DistributedDataParallel) == (kind == "ddp")
        assert not isinstance(model, nn.Linear)
        assert model.__class__ is Net

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_attributes_stay_missing(kind: str) -> None:
    """What neither has, and a property that raises AttributeError, is an AttributeError."""

    def body(model: nn.Module, net: Net) -> None:
        for name in ("unset", "nothing_of_that_name"):
            assert not hasattr(model, name)
            with pytest.raises(AttributeError, match=name):
                getattr(model, name)

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_setting_and_deleting_reaches_the_model(kind: str) -> None:
    """An attribute set through the wrapper, private ones too, is what the model's methods see."""

    def body(model: nn.Module, net: Net) -> None:
        model._step, model.classes, model.new = 3, ["cat"], 1
        assert net.describe() == "1 classes at step 3"
        assert net.new == 1
        del model.new
        assert not hasattr(net, "new")
        assert not hasattr(model, "new")

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_wrapping_leaves_nothing_on_the_model(kind: str) -> None:
    """The wrapper's own attributes stay its own."""

    def body(model: nn.Module, net: Net) -> None:
        assert set(vars(net)) == set(vars(Net()))
        assert (net.dim, net.device) == (7, "anywhere")

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_eval_reach_every_module(kind: str) -> None:
    """``eval()`` and ``train()`` set the flag of the model itself and of all its parts, and return the wrapper."""

    def body(model: nn.Module, net: Net) -> None:
        assert model.eval() is model
        assert not any(part.training for part in (model, net, net.body, net.norm))
        assert model.train() is model
        assert all(part.training for part in (model, net, net.body, net.norm))

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_moves_and_apply_reach_the_models_own_tensors(kind: str) -> None:
    """``.float()`` and ``apply`` act on parameters that sit on the model itself, not on a child.

    Under DDP, which would go on with the old tensors, a change is refused, and one that changes nothing passes.
    """

    def body(model: nn.Module, net: Net) -> None:
        if kind == "ddp":
            assert model.double() is model.to("cpu") is model.cpu() is model
            for change in (model.float, model.half, lambda: model.to("meta"), lambda: model.to(torch.bfloat16)):
                with pytest.raises(ModelError, match=r"'gain' from torch.float64"):
                    change()
            assert {p.dtype for p in net.parameters()} == {torch.float64}
        else:
            assert model.float() is model
            assert {p.dtype for p in net.parameters()} == {torch.float32}
        seen: list[nn.Module] = []
        assert model.apply(seen.append) is model
        assert seen == [net.body, net.norm, net]

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_names_have_no_prefix(kind: str) -> None:
    """Parameters, buffers, modules, children and the state dict are named as in the model."""

    def body(model: nn.Module, net: Net) -> None:
        assert list(model.named_parameters()) == list(net.named_parameters())
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in net.named_buffers()]
        assert list(model.named_modules()) == list(net.named_modules())
        assert list(model.named_children()) == list(net.named_children())
        assert list(model.children()) == list(net.children())
        assert list(model.state_dict()) == list(net.state_dict())
        assert model.state_dict()._metadata == net.state_dict()._metadata
        assert model.get_parameter("body.weight") is net.body.weight

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_what_was_saved_with_or_without_a_wrapper(kind: str) -> None:
    """All four pairs of saved wrapped or plain, loaded wrapped or plain, and what torch's own wrappers saved."""

    def body(model: nn.Module, net: Net) -> None:
        model.load_state_dict(Net(seed=1).state_dict())
        saved_wrapped = copy.deepcopy(model.state_dict())
        saved_plain = Net(seed=1).state_dict()
        saved_by_others = {f"_orig_mod.module.{name}": value for name, value in saved_plain.items()}  # both of them
        pairs = [(model, state) for state in (saved_wrapped, saved_plain, saved_by_others)]
        pairs += [(net, state) for state in (saved_wrapped, saved_plain)]
        pairs.append((model, dw.add_module_prefix(saved_plain)))
        for target, state in pairs:
            net.load_state_dict(Net(seed=2).state_dict())
            assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
            assert all(torch.equal(value, saved_plain[name]) for name, value in net.state_dict().items())

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_keeps_the_version_of_what_was_saved(kind: str) -> None:
    """A module that converts old checkpoints by their version sees the version that was saved."""

    class Versioned(nn.Linear):
        _version = 5
        seen: list[object] = []

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):  # type: ignore[no-untyped-def]
            self.seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def on_rank() -> None:
        plain = Versioned(1, 1)
        model = dw.wrap_model(plain, precision="bf16")
        model.load_state_dict(model.state_dict())
        model.load_state_dict(dw.add_module_prefix(plain.state_dict()))
        assert plain.seen == [5, 5]

    run_ranks(on_rank, 2 if kind == "ddp" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_strict_loading_reports_the_models_own_names(kind: str) -> None:
    """Missing and unexpected keys are still an error, and are named without a prefix."""

    def body(model: nn.Module, net: Net) -> None:
        state = dict(net.state_dict(), extra=torch.zeros(1))
        del state["gain"]
        with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"gain".*Unexpected key.*"extra"'):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["gain"], ["extra"])

    wrapped(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_as_a_part_of_another_module(kind: str) -> None:
    """Inside another module the wrapper saves no prefix, loads with and without, and follows train and moves."""

    def body(model: nn.Module, net: Net) -> None:
        parent = nn.ModuleDict({"net": model})
        plain = nn.ModuleDict({"net": Net(seed=1)})
        assert list(parent.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in parent.named_parameters()] == [n for n, _ in plain.named_parameters()]
        for state in (
            plain.state_dict(),
            {key.replace("net.", "net.module."): value for key, value in plain.state_dict().items()},
        ):
            net.load_state_dict(Net(seed=2).state_dict())
            parent.load_state_dict(state)
            assert torch.equal(net.body.weight, plain["net"].body.weight)
            assert torch.equal(net.gain, plain["net"].gain)
        with pytest.raises(RuntimeError, match="Unexpected key"):
            parent.load_state_dict({**plain.state_dict(), "net.extra": torch.zeros(1)})
        parent.eval()
        assert not net.training
        if kind == "ddp":
            with pytest.raises(ModelError, match="after wrap_model"):
                parent.float()
        else:
            assert parent.float() is parent
            assert net.gain.dtype == torch.float32

    wrapped(kind, body)


def test_a_child_called_module_survives() -> None:
    """A model whose only child is really called ``module`` saves and loads, alone and as a part of another module."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    model = dw.wrap_model(Holder(), precision="bf16")
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    model.load_state_dict(Holder().state_dict())
    parent = nn.ModuleList([model])
    assert str(parent.load_state_dict(nn.ModuleList([Holder()]).state_dict())) == "<All keys matched successfully>"


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_the_plain_model(kind: str) -> None:
    """Copied, pickled and saved whole, it is the plain model with the same weights, and no process group."""

    def body(model: nn.Module, net: Net) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
        for other in (*copies, copy.copy(model)):
            assert type(other) is Net
            assert other is not net
            assert torch.equal(other.gain, net.gain)
        assert all(other.gain is not net.gain for other in copies)
        assert type(copy.deepcopy({"model": model})["model"]) is Net

    wrapped(kind, body)


def test_sequences_can_be_indexed() -> None:
    """The parts of a wrapped Sequential are reached by index, slice and iteration."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = dw.wrap_model(layers, precision="bf16")
    assert model[0] is layers[0]
    assert list(model) == list(layers)
    assert type(model[:1]) is nn.Sequential
    assert type(model) is not nn.Sequential


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_with_and_without_gradients(kind: str) -> None:
    """A forward hook on the wrapper, and one on a part, runs once for every call."""

    def body(model: nn.Module, net: Net) -> None:
        calls: list[str] = []
        model.register_forward_hook(lambda *_: calls.append("whole"))
        net.body.register_forward_hook(lambda *_: calls.append("part"))
        x = torch.randn(4, 3, dtype=torch.float64)
        model(x)
        with torch.no_grad():
            model(x)
        assert calls == ["part", "whole"] * 2

    wrapped(kind, body)


def test_new_parameters_after_wrapping_are_refused() -> None:
    """A part with new parameters, which DDP would not average, cannot be set on a model that is wrapped."""

    def body(model: nn.Module, net: Net) -> None:
        before = net.body
        with pytest.raises(ModelError, match="'body' would add"):
            model.body = nn.Linear(3, 4)
        with pytest.raises(ModelError, match="'gain' would add"):
            model.gain = nn.Parameter(torch.ones(4))
        assert net.body is before
        model.extra = nn.ReLU()
        model.body = before
        assert isinstance(net.extra, nn.ReLU)

    wrapped("ddp", body)


@pytest.mark.slow("compiles a model")
def test_unwrap_model_undoes_any_nesting() -> None:
    """Out of distwrap, DDP, DataParallel and torch.compile in any order comes the user's own object."""

    def body(model: nn.Module, net: Net) -> None:
        nestings = [net, model, torch.compile(model), torch.compile(net), nn.DataParallel(torch.compile(net))]
        nestings += [torch.compile(nn.DataParallel(model)), nn.parallel.DistributedDataParallel(net)]
        nestings += [dw.wrap_model(torch.compile(net))]
        assert all(dw.unwrap_model(nesting) is net for nesting in nestings)

    wrapped("ddp", body)


@pytest.mark.parametrize("kind", ["ddp", slow("local", why="compiles a model")])
@pytest.mark.slow("others of its kind are in make test")
def test_a_compiled_model_has_no_prefix_either(kind: str) -> None:
    """Around a compiled model all names are the user's, alone and as a part of another module."""

    def body(_: nn.Module, net: Net) -> None:
        model = dw.wrap_model(torch.compile(net), precision="bf16")
        assert list(model.named_parameters()) == list(net.named_parameters())
        assert list(model.state_dict()) == list(net.state_dict())
        parent = nn.ModuleList([model])
        parent.load_state_dict(nn.ModuleList([Net(seed=1)]).state_dict())
        assert torch.equal(net.body.weight, Net(seed=1).body.weight)
        assert next(iter(torch.compile(nn.DataParallel(Net())).state_dict())) == "_orig_mod.module.gain"

    wrapped(kind, body)
