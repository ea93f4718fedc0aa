from __future__ import annotations

import os
import sys
from collections import OrderedDict
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from distwrap import add_module_prefix, strip_module_prefix
from distwrap.errors import StateDictError


class Beside(nn.Module):
    """A model with a child that is really called ``module``, beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.module = nn.Linear(3, 1)


class Alone(nn.Module):
    """A model whose only child is called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)


class Nested(nn.Module):
    """A model with the same name on two levels: ``weight`` and ``module.weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.module = nn.Linear(1, 1)


class Compiled(nn.Module):
    """A model as torch.compile wraps it, without the seconds that it takes to import the compiler."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


def compiled(model: nn.Module) -> Any:
    return Compiled(model)


@pytest.mark.slow("imports the compiler")
def test_the_compiler_wraps_as_these_tests_do() -> None:
    """Its models have the names, and the versions beside them, that those of this file have."""
    with patch.dict(os.environ):  # it leaves a variable of its own
        theirs: Any = torch.compile(Beside())
    ours = compiled(Beside())
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert strip_module_prefix(theirs.state_dict())._metadata == strip_module_prefix(ours.state_dict())._metadata  # type: ignore[attr-defined]


WRAPPERS = {
    "plain": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "compile in DataParallel": lambda model: nn.DataParallel(compiled(model)),
    "DataParallel in compile": lambda model: compiled(nn.DataParallel(model)),
    "DataParallel around both": lambda model: nn.DataParallel(compiled(nn.DataParallel(model))),
}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("weight", "weight"),
        ("module.weight", "weight"),
        ("_orig_mod.weight", "weight"),
        ("module._orig_mod.weight", "weight"),
        ("_orig_mod.module.weight", "weight"),
        ("module._orig_mod.module.0.weight", "0.weight"),
        ("module.module.weight", "weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("layers.0._orig_mod.weight", "layers.0.weight"),
        ("encoder.module._orig_mod.weight", "encoder.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("submodule.weight", "submodule.weight"),
    ],
)
def test_wrappers_names_are_removed(key: str, name: str) -> None:
    """What wrappers put into a key is removed in any nesting, and nothing that merely looks like it."""
    assert strip_module_prefix({key: 1}) == {name: 1}


@each_wrapper
def test_a_child_called_module_survives_beside_others(wrapper: str) -> None:
    """A model's own child called module keeps its name, whatever was around the model when it was saved."""
    model = Beside()
    wrapped = WRAPPERS[wrapper](model)
    assert list(strip_module_prefix(wrapped.state_dict())) == list(model.state_dict())


@each_wrapper
@pytest.mark.parametrize("kind", [Beside, Alone, Nested])
def test_keys_become_those_of_the_target(wrapper: str, kind: type[nn.Module]) -> None:
    """With a target, what any wrapper saved fits the bare model, its children called module too."""
    model = kind()
    wrapped = WRAPPERS[wrapper](model)
    state = strip_module_prefix(wrapped.state_dict(), target=kind())
    assert list(state) == list(model.state_dict())
    kind().load_state_dict(state)


@each_wrapper
@pytest.mark.parametrize("kind", [Beside, Alone, Nested])
def test_keys_become_those_of_a_wrapped_target(wrapper: str, kind: type[nn.Module]) -> None:
    """With a wrapped target, what the bare model saved gets the prefix that the target wants."""
    wanted = WRAPPERS[wrapper](kind())
    state = strip_module_prefix(kind().state_dict(), target=wanted)
    assert list(state) == list(wanted.state_dict())


@pytest.mark.parametrize("as_target", [lambda m: m, lambda m: m.state_dict(), lambda m: list(m.state_dict())])
def test_a_target_may_be_a_model_a_state_dict_or_keys(as_target: Any) -> None:
    """What is to be loaded may be given as a model, as its state dict, or as keys."""
    saved = nn.DataParallel(Alone()).state_dict()
    assert list(strip_module_prefix(saved, target=as_target(Alone()))) == ["module.weight", "module.bias"]


def test_a_target_undoes_a_wrapper_around_a_part() -> None:
    """A part of the model that was wrapped alone gets the target's names, which without a target cannot be known."""
    saved = {"encoder.module.weight": 1, "head.weight": 2}
    assert strip_module_prefix(saved) == saved
    assert strip_module_prefix(saved, target=["encoder.weight", "head.weight"]) == {
        "encoder.weight": 1,
        "head.weight": 2,
    }


def test_keys_that_the_target_lacks_are_stripped() -> None:
    """A key of which the target knows nothing is stripped all the same, for the loader to report."""
    saved = {"module.weight": 1, "module.extra": 2}
    assert strip_module_prefix(saved, target=["weight"]) == {"weight": 1, "extra": 2}


def test_a_compiled_child_called_module_survives_beside_others() -> None:
    """A child called module that was compiled alone loses the compiler's mark, and keeps its own name."""
    model = Beside()
    names = list(model.state_dict())
    model.module = compiled(model.module)
    stripped = strip_module_prefix(model.state_dict())
    assert list(stripped) == names
    assert set(stripped._metadata) >= set(Beside().state_dict()._metadata)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_type_and_order_are_kept(kind: type[dict[str, int]]) -> None:
    """The result is of the same type and in the same order, and the one given is as it was."""
    saved = kind({"module.b": 1, "module.a": 2})
    stripped = strip_module_prefix(saved)
    assert type(stripped) is kind
    assert list(stripped.items()) == [("b", 1), ("a", 2)]
    assert list(saved) == ["module.b", "module.a"]


@each_wrapper
@pytest.mark.parametrize("targeted", [False, True])
def test_metadata_is_kept_under_the_new_names(wrapper: str, targeted: bool) -> None:
    """The versions that torch keeps beside the keys are found under the bare model's names."""
    model = Beside()
    saved = WRAPPERS[wrapper](model).state_dict()
    before = dict(saved._metadata)
    stripped: Any = strip_module_prefix(saved, target=model if targeted else None)
    bare: Any = model.state_dict()
    assert dict(stripped._metadata) == dict(bare._metadata)
    assert stripped._metadata["encoder.1"] == {"version": 2}
    assert saved._metadata == before


def test_tensors_are_not_copied() -> None:
    """The values are the very same objects, on the same storage."""
    model = Beside()
    stripped = strip_module_prefix(nn.DataParallel(model).state_dict())
    for name, tensor in model.state_dict().items():
        assert stripped[name].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("target", [None, ["weight"]])
def test_keys_that_would_become_one_are_refused(target: Any) -> None:
    """Two keys that lose what tells them apart are refused by name, and none of the two wins in silence."""
    saved = {"_orig_mod.weight": 1, "weight": 2}
    message = "'_orig_mod.weight' and 'weight'"
    with pytest.raises(StateDictError, match=message):
        strip_module_prefix(saved, target=target)


def test_names_must_be_text() -> None:
    """A dict whose keys are no names is no state dict, and is refused by the first such key."""
    with pytest.raises(StateDictError, match="has 3"):
        strip_module_prefix({"weight": 1, 3: 2})  # type: ignore[dict-item]


def test_an_empty_state_dict_stays_empty() -> None:
    """A model without parameters has nothing to strip."""
    assert strip_module_prefix({}) == {}
    assert strip_module_prefix({}, target=nn.Identity()) == {}


def test_adding_and_stripping_is_no_change() -> None:
    """A prefix that was added comes off again, and keys, order, type and metadata are those of before."""
    state: Any = Beside().state_dict()
    back: Any = strip_module_prefix(add_module_prefix(state))
    assert list(back) == list(state)
    assert type(back) is type(state)
    assert back._metadata == state._metadata


def test_an_added_prefix_is_what_a_wrapper_loads() -> None:
    """With the prefix added, a bare model's weights fit DataParallel strictly, and carry its versions."""
    model, wrapped = Beside(), nn.DataParallel(Beside())
    prefixed: Any = add_module_prefix(model.state_dict())
    wrapped.load_state_dict(prefixed)
    assert prefixed._metadata["module.encoder.1"] == {"version": 2}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wrapped.parameters(), strict=True))


def test_stripping_calls_as_much_for_each_of_many_keys() -> None:
    """A hundred times as many keys cost a hundred times as many calls, of Python's functions and of C's."""

    def calls_for(keys: int) -> int:
        saved = {f"module._orig_mod.layers.{number}.attention.weight": number for number in range(keys)}
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            strip_module_prefix(saved)
        finally:
            sys.setprofile(None)
        return counted

    assert calls_for(100_000) < 101 * calls_for(1000)
