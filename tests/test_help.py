"""What a person finds who asks at run time: help(), dir(), signatures, and the completion of notebooks."""

from __future__ import annotations

import inspect
import pickle
import pydoc
from dataclasses import fields
from typing import Any

import jedi
import pytest

import distwrap
from distwrap.options import Options
from tests.house.package import script

DEFAULTS = {option.name: option.default for option in fields(Options)}
list_names = script("list_names")


@distwrap.distributed(nprocs=1)
def train(epochs: int, *, lr: float = 0.1) -> float:
    """Train the model of the user."""
    return epochs * lr


class Trainer:
    @distwrap.distributed
    def fit(self, epochs: int) -> int:
        """Fit the model of the user."""
        return epochs


def help_of(thing: object) -> str:
    """Return what help() prints."""
    return pydoc.render_doc(thing, renderer=pydoc.plaintext)  # type: ignore[arg-type]


def listed(signature: inspect.Signature) -> dict[str, Any]:
    """Return the keyword-only parameters of a signature with their defaults."""
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def completed(code: str) -> set[str]:
    """Return the names that a notebook offers at the end of a piece of code."""
    return {completion.name for completion in jedi.Interpreter(code, [globals()]).complete()}


def test_the_package_lists_its_names() -> None:
    """help(distwrap) begins with every public name and the first line of its docstring."""
    text = help_of(distwrap).partition("PACKAGE CONTENTS")[0]
    words = " ".join(text.split())
    for name in distwrap._PUBLIC:
        first = (inspect.getdoc(getattr(distwrap, name)) or "").partition("\n")[0]
        assert f" {name}: {' '.join(first.split())} " in f"{words} ", "run python docs/list_names.py"
    assert list_names.listed() in (distwrap.__doc__ or ""), "run python docs/list_names.py"


def test_help_of_each_name_is_whole() -> None:
    """help() of a public name shows its own docstring, and the parameters of a function by name."""
    for name in distwrap._PUBLIC:
        value = getattr(distwrap, name)
        text = help_of(value)
        assert " ".join((inspect.getdoc(value) or "").split()[:8]) in " ".join(text.replace("|", "").split()), name
        if inspect.isfunction(value):
            assert all(parameter in text for parameter in inspect.signature(value).parameters), name


def test_dir_has_what_can_be_asked_for() -> None:
    """dir(distwrap) has the public names, also `print`, and nothing that the package only uses."""
    assert {*distwrap._PUBLIC, "__version__"} <= set(dir(distwrap))
    assert not {"importlib", "typing"} & set(dir(distwrap))


@pytest.mark.parametrize(
    "taker", [distwrap.distributed, train.options, Trainer().fit.options], ids=["distributed", "function", "method"]
)
def test_options_are_in_the_signature(taker: Any) -> None:
    """`distributed` and `.options` list each option with its default, to help() and to whoever asks for a signature."""
    assert listed(inspect.signature(taker)) == DEFAULTS
    text = " ".join(help_of(taker).split())
    assert all(f"{name}: " in text for name in DEFAULTS)


def test_a_decorated_function_shows_the_users_own_help() -> None:
    """help() shows the name, the parameters and the docstring that the user has written; dir() has `options` too."""
    assert "train(epochs: 'int', *, lr: 'float' = 0.1) -> 'float'" in help_of(train)
    assert "Train the model of the user." in help_of(train)
    assert "fit(epochs: 'int') -> 'int'" in help_of(Trainer().fit)
    assert "Fit the model of the user." in help_of(Trainer)
    assert "options" in dir(train)
    assert "options" in dir(Trainer().fit)
    assert pickle.loads(pickle.dumps(train)) is train


@pytest.mark.slow("others of its kind are in make test")
def test_a_notebook_completes_the_names() -> None:
    """Jedi, which completes in IPython, offers the public names, the options, and `options` of a decorated function."""
    found = completed("distwrap.")
    assert set(distwrap._PUBLIC) - {"print"} <= found  # jedi leaves out a builtin's name that is not used yet
    assert {f"{name}=" for name in DEFAULTS} <= completed("distwrap.distributed(")
    assert {f"{name}=" for name in DEFAULTS} <= completed("train.options(")
    assert "options" in completed("train.")
    assert {"epochs=", "lr="} <= completed("train(")


@pytest.mark.parametrize("code", ["distwrap.distributed(", "train.options("])
def test_a_notebook_shows_the_options_of_a_call(code: str) -> None:
    """The signature that a notebook shows within the parentheses has each option by its name."""
    (signature,) = jedi.Interpreter(code, [globals()]).get_signatures()
    assert {parameter.name for parameter in signature.params} - {"fn"} == {*DEFAULTS}


def test_an_editor_shows_the_options_of_a_call() -> None:
    """An editor that reads the source alone, and runs nothing, has the options by their names too."""
    here = jedi.InterpreterEnvironment()  # any other is a process
    signatures = jedi.Script("import distwrap\ndistwrap.distributed(", environment=here).get_signatures()
    assert {*DEFAULTS} <= {parameter.name for parameter in signatures[0].params}
