"""A decorated function behaves in every place where a function can stand."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import distwrap as dw
from distwrap import distributed, launch
from distwrap.versions import CLASS_METHODS_DO_NOT_BIND


@distributed(nprocs=2)
def at_top_level(a: int, b: int = 2) -> tuple[int, int]:
    """Add."""
    return a + b, dw.world_size()


class Trainer:
    """Holds something that a rank needs."""

    scale = 3

    def __init__(self, base: int) -> None:
        self.base = base

    @distributed(nprocs=2)
    def fit(self, n: int) -> tuple[int, int]:
        return self.base + n, dw.world_size()

    @classmethod
    @distributed(nprocs=2)
    def of_class(cls, n: int) -> tuple[int, int]:
        return cls.scale * n, dw.world_size()

    @distributed(nprocs=2)
    @classmethod
    def of_class_outside(cls, n: int) -> tuple[int, int]:
        return cls.scale * n, dw.world_size()

    @staticmethod
    @distributed(nprocs=2)
    def static(n: int) -> tuple[int, int]:
        return n, dw.world_size()

    @distributed(nprocs=2)
    @staticmethod
    def static_outside(n: int) -> tuple[int, int]:
        return n, dw.world_size()


class Tuned(Trainer):
    scale = 5

    @distributed(nprocs=2)
    def fit(self, n: int) -> tuple[int, int]:
        return super().fit(n)[0] * 10, dw.world_size()


LAUNCHERS = ["fork", "forkserver"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_function(launcher: str) -> None:
    """A function takes positional and keyword arguments."""
    assert at_top_level.options(launcher=launcher)(1, b=5) == (6, 2)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_method(launcher: str) -> None:
    """A method reaches its object's state on the ranks."""
    assert Trainer(4).fit.options(launcher=launcher)(1) == (5, 2)


def test_overridden_method() -> None:
    """An overriding decorated method calls the decorated one above it, which joins instead of launching."""
    assert Tuned(4).fit(1) == (50, 2)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", ["of_class", "of_class_outside"])
def test_class_method(name: str, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class method gets the class it was called on, with the decorator above or below @classmethod."""
    monkeypatch.setenv("DISTWRAP_LAUNCHER", launcher)
    assert getattr(Trainer, name)(2) == (6, 2)
    assert getattr(Tuned, name)(2) == (10, 2)


@pytest.mark.parametrize("name", ["of_class", "of_class_outside"])
def test_options_of_a_class_method(name: str) -> None:
    """Options know the class too; where Python hides it, an error says where the decorator is to be."""
    if name == "of_class" and CLASS_METHODS_DO_NOT_BIND:
        with pytest.raises(TypeError, match=r"Trainer\.of_class\.options\(\) .*Write @distributed above @classmethod"):
            Tuned.of_class.options(nprocs=2)
    else:
        assert getattr(Tuned, name).options(nprocs=2)(2) == (10, 2)


@pytest.mark.parametrize("name", ["static", "static_outside"])
def test_static_method(name: str) -> None:
    """A static method gets no object, with the decorator above or below @staticmethod."""
    assert getattr(Trainer, name)(2) == (2, 2)
    assert getattr(Trainer(1), name).options(launcher="forkserver")(2) == (2, 2)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nested_function(launcher: str) -> None:
    """A nested function takes its closure along."""
    secret = [1, 2]

    @distributed(nprocs=2, launcher=launcher)
    def nested() -> tuple[list[int], int]:
        return secret, dw.world_size()

    assert nested() == ([1, 2], 2)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lambda(launcher: str) -> None:
    """A lambda is a function too."""
    assert distributed(nprocs=2, launcher=launcher)(lambda n: n + dw.world_size())(3) == 5


def test_callable_object() -> None:
    """An object that can be called can be decorated."""

    class Adder:
        def __call__(self, n: int) -> int:
            return n + dw.world_size()

    assert distributed(nprocs=2, launcher="forkserver")(Adder())(1) == 3


def test_a_decorated_function_inside_another_joins() -> None:
    """A decorated function that is called inside a rank runs there, and launches nothing."""

    @distributed(nprocs=2, launcher="forkserver", returns="all")
    def outer() -> tuple[int, int]:
        return at_top_level(dw.rank())

    assert outer() == [(2, 2), (3, 2)]


def test_a_failure_while_the_ranks_meet_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun the other ranks hear of a strategy that fails to arrange the ranks, and the world is left."""
    error, done = KeyError("setup"), []

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(launch.setup, "join", fails)
    monkeypatch.setattr(launch.failures, "tell", done.append)
    monkeypatch.setattr(launch.setup, "abandon_process_group", lambda **_: done.append("left"))
    for name, value in zip(("RANK", "LOCAL_RANK"), "00", strict=True):
        monkeypatch.setenv(name, value)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(KeyError, match="setup"):
        distributed(dw.rank)()
    assert done == [error, "left"]


def test_it_looks_like_the_function() -> None:
    """Name, docstring and signature are the function's, and the plain one is at hand."""
    assert at_top_level.__name__ == "at_top_level"
    assert at_top_level.__doc__ == "Add."
    assert list(inspect.signature(at_top_level).parameters) == ["a", "b"]
    assert at_top_level.__wrapped__(1) == (3, 1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda fn: pickle.loads(pickle.dumps(fn))])
def test_copies_launch_too(duplicate: Callable[[Any], Any]) -> None:
    """A copy and a pickled and unpickled one still launch."""
    assert duplicate(at_top_level)(1) == (3, 2)


def test_pickle_goes_by_name() -> None:
    """A decorated function is found again under its name, and a bound one keeps its object."""
    assert pickle.loads(pickle.dumps(at_top_level)) is at_top_level
    assert pickle.loads(pickle.dumps(Trainer(4).fit))(1) == (5, 2)


def test_options_for_one_call() -> None:
    """`.options()` changes one call, and not the decorated function."""
    assert at_top_level.options(nprocs=3)(1) == (3, 3)
    assert at_top_level(1) == (3, 2)


def test_all_ranks_values() -> None:
    """returns="all" gives the list of values in rank order, also of one process."""

    @distributed(returns="all", nprocs=3)
    def which() -> int:
        return dw.rank()

    assert which() == [0, 1, 2]
    assert which.options(nprocs=1)() == [0]


def test_bare() -> None:
    """Bare @distributed runs in this process where there is no accelerator."""

    @distributed
    def which() -> tuple[int, int]:
        return dw.rank(), dw.world_size()

    assert which()[0] == 0
    assert which.__wrapped__() == (0, 1)


class TestRefusals:
    """What cannot be decorated is refused when it is decorated, with a clear answer."""

    def test_twice(self) -> None:
        """Two decorators."""
        with pytest.raises(ValueError, match=r"at_top_level is decorated with @distributed twice"):
            distributed(at_top_level)

    def test_coroutine(self) -> None:
        """An async function."""

        async def fetch() -> None: ...

        with pytest.raises(ValueError, match=r"fetch is async: .*asyncio\.run"):
            distributed(fetch)

    def test_generator(self) -> None:
        """A generator."""

        def count() -> Any:
            yield 1

        with pytest.raises(ValueError, match=r"count is a generator: .*Return a list"):
            distributed(nprocs=2)(count)

    def test_class(self) -> None:
        """A class, and what is not callable at all."""
        with pytest.raises(ValueError, match=r"not the class .*Trainer"):
            distributed(Trainer)
        with pytest.raises(ValueError, match="not 3"):
            distributed(3)  # type: ignore[call-overload]

    def test_no_function(self) -> None:
        """The decorator with options, called like the function that it was never given."""
        main = distributed(nprocs=2)
        with pytest.raises(ValueError, match=r"not None: write it above one, or say main = distributed\(…\)\(train\)"):
            main()  # type: ignore[call-arg]

    def test_unknown_option(self) -> None:
        """A misspelt option names the right one."""
        with pytest.raises(ValueError, match=r"unknown option 'n_procs'\. Did you mean 'nprocs'\?"):
            distributed(n_procs=2)  # type: ignore[call-overload]
