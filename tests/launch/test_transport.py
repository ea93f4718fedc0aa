"""What goes to the ranks and comes back: by value or by name, at any size, and named where it cannot be pickled."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap import distributed
from distwrap.errors import SerializationError, WorkerError
from distwrap.launch.pickling import dumps, loads
from distwrap.launch.transport import find_unpicklable
from tests.interpreters import run_python

LOCK = threading.Lock()
LAUNCHERS = ["fork", "forkserver"]


class ImportableError(Exception):
    """Takes two arguments, as the simple ones do."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class BreaksWhenUnpickledError(Exception):
    """Pickles well, and raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return float, (str(self),)


class KeywordError(OSError):
    """Takes keywords alone, and makes its words of them."""

    def __init__(self, *, path: str, code: int) -> None:
        super().__init__(code, "cannot be read", path)
        self.code = code


class WordyError(ValueError):
    """Would say everything twice if its class were called with its words."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is wrong")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.slow("moves hundreds of megabytes")
def test_100_mb_come_back(launcher: str) -> None:
    """A result far larger than a pipe's buffer comes back whole, from every rank."""

    @distributed(nprocs=2, launcher=launcher, returns="all")
    def big() -> torch.Tensor:
        return torch.full((25_000_000,), float(dw.rank()))

    first, second = big()
    assert first.sum().item() == 0
    assert second.numel() == 25_000_000
    assert second.min().item() == second.max().item() == 1


def test_large_arguments_go_out() -> None:
    """An argument larger than a pipe's buffer reaches every rank."""

    @distributed(nprocs=2, launcher="forkserver", returns="all")
    def total(x: torch.Tensor) -> float:
        return x.sum().item()

    assert total(torch.ones(5_000_000)) == [5_000_000, 5_000_000]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_unpicklable_result_is_named(launcher: str) -> None:
    """A result that cannot be pickled is named by its path in the result."""

    @distributed(nprocs=2, launcher=launcher)
    def locked() -> dict[str, Any]:
        return {"history": [1, {"lock": threading.Lock()}]}

    with pytest.raises(
        SerializationError, match=r"returned on rank 0 .*item 'lock' of item 1 of item 'history' of the value is a lock"
    ):
        locked()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_exception_in_its_own_type(launcher: str) -> None:
    """The caller gets the rank's exception in its own type, with the rank, the host and the traceback over there."""

    @distributed(nprocs=2, launcher=launcher)
    def fails() -> None:
        if dw.rank() == 1:
            raise ImportableError(7, "seven")
        dw.barrier()

    with pytest.raises(ImportableError) as caught:
        fails()
    assert caught.value.args == (7, "seven")
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert caught.value.host == socket.gethostname()  # type: ignore[attr-defined]
    assert caught.value.exitcode == 1  # type: ignore[attr-defined]
    assert caught.value.signal is None  # type: ignore[attr-defined]
    assert "in fails" in str(caught.value.__cause__)
    assert "rank 1 on" in str(caught.value.__cause__)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exception_with_attributes_that_ours_have(launcher: str) -> None:
    """What another's exception calls signal, exitcode or secondary says nothing of the rank's end."""

    @distributed(launcher=launcher, nprocs=2)
    def fails() -> None:
        if dw.rank() == 1:
            error: Any = ValueError("mine")
            error.signal, error.exitcode, error.secondary = threading.Lock(), lambda: 0, True
            raise error

    with pytest.raises(WorkerError, match=r"ValueError: mine \(this exception cannot be pickled"):
        fails()

    @distributed(launcher=launcher, nprocs=2)
    def fails_first() -> None:
        if dw.rank() == 1:
            error: Any = ValueError("mine")
            error.signal = error.secondary = True
            raise error

    with pytest.raises(ValueError, match="mine"):
        fails_first()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_exception_class_of_the_callers_function(launcher: str) -> None:
    """An exception class defined inside a function is the caller's, where the function was sent; a fork's is a copy."""

    class LocalError(Exception):
        pass

    @distributed(nprocs=2, launcher=launcher)
    def fails() -> None:
        raise LocalError("here")

    with pytest.raises(Exception, match="here") as caught:
        fails()
    assert caught.type.__name__ == "LocalError"
    assert (caught.type is LocalError) is (launcher != "fork")


def test_class_of_the_caller_is_not_changed_by_the_way_back() -> None:
    """An object of a class sent by value comes back as the caller's own class, whose methods stay what they were."""

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def twice(self) -> int:
            return 2 * self.x

    method = Point.twice

    @distributed(nprocs=2, launcher="forkserver")
    def make() -> Point:
        return Point(4)

    assert type(make()) is Point
    assert Point.twice is method


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_unpicklable_exception_is_told(launcher: str) -> None:
    """An exception that does not survive pickling arrives as text, with its name."""

    @distributed(nprocs=2, launcher=launcher)
    def fails(error: str) -> None:
        if error == "locked":
            problem = ValueError("held")
            problem.lock = threading.Lock()  # type: ignore[attr-defined]
            raise problem
        raise BreaksWhenUnpickledError("3: three")

    with pytest.raises(WorkerError, match=r"ValueError: held \(this exception cannot be pickled"):
        fails("locked")
    with pytest.raises(WorkerError, match=r"BreaksWhenUnpickledError: 3: three"):
        fails("breaks")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_exceptions_whose_class_takes_other_arguments_than_their_words(launcher: str) -> None:
    """Exceptions with keyword-only arguments, or that make their words, come back in their type, as they were."""

    @distributed(nprocs=2, launcher=launcher)
    def fails(wordy: bool) -> None:
        if wordy:
            raise WordyError("it")
        raise KeywordError(path="a.txt", code=13)

    with pytest.raises(KeywordError) as caught:
        fails(False)
    assert (caught.value.code, caught.value.errno, caught.value.filename) == (13, 13, "a.txt")
    with pytest.raises(WordyError, match=r"^it is wrong$"):
        fails(True)


def test_unpicklable_closure_is_named_before_any_process_starts() -> None:
    """What the function cannot take along is named by its path, with the ways out."""
    lock = threading.Lock()

    @distributed(nprocs=2, launcher="forkserver")
    def uses() -> None:
        lock.acquire()

    with pytest.raises(
        SerializationError, match=r"closure variable 'lock' of the function is a lock .*launcher='fork'"
    ):
        uses()


def test_unpicklable_argument_is_named() -> None:
    """An argument that cannot be pickled is named by its path."""

    @distributed(nprocs=2, launcher="forkserver")
    def takes(config: Any) -> None: ...

    with pytest.raises(SerializationError, match=r"item 'lock' of item 0 of the arguments is a lock"):
        takes({"lock": threading.Lock()})


def test_fork_needs_nothing_picklable() -> None:
    """Forked ranks have what the caller has."""
    held = threading.Lock()
    held.acquire()

    @distributed(nprocs=2, launcher="fork", returns="all")
    def uses(config: Any) -> bool:
        return config["lock"].locked()

    assert uses({"lock": held}) == [True, True]


def test_sys_exit_is_the_callers_exit() -> None:
    """sys.exit(3) on a rank is SystemExit(3) in the caller."""

    @distributed(nprocs=2, launcher="forkserver")
    def leaves() -> None:
        sys.exit(3)

    with pytest.raises(SystemExit) as caught:
        leaves()
    assert caught.value.code == 3


def test_code_by_value_has_its_file() -> None:
    """A traceback, or a report of a hang, names the line of a function that went by value."""

    def outer() -> Any:
        def inner() -> int:
            return 1

        return inner

    received = loads(dumps(outer))
    assert received is not outer
    assert received().__code__.co_filename == __file__


def test_find_unpicklable_in_objects_and_globals() -> None:
    """The search goes through attributes, methods and globals."""

    class Holder:
        def __init__(self) -> None:
            self.inner = {"deep": LOCK}

        def run(self) -> Any:
            return LOCK

    path, culprit = find_unpicklable((Holder(),), pickle.dumps, ("the object",))
    assert culprit is LOCK
    assert path == "item 'deep' of attribute 'inner' of the object"


@pytest.mark.slow("a program")
def test_without_cloudpickle_a_nested_function_is_refused(tmp_path: Path) -> None:
    """Without cloudpickle a function goes by name, and one that has none is refused with the ways out."""
    script = tmp_path / "nested.py"
    script.write_text(
        "import sys; sys.modules['cloudpickle'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'cloudpickle' else find(name, *a)\n"
        "from distwrap import distributed\n"
        "def outer():\n"
        "    @distributed(nprocs=2, launcher='forkserver')\n"
        "    def nested(): pass\n"
        "    nested()\n"
        "if __name__ == '__main__': outer()\n"
    )
    done = run_python(script, timeout=60)
    assert "SerializationError" in done.stderr
    assert "nested() (nested.py:6) cannot be sent" in done.stderr
    assert "pip install 'distwrap[notebook]'" in done.stderr
