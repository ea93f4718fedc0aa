"""Exceptions that cross machines: in their own type where that is safe, in words where not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distwrap.errors import CollectiveError, WorkerDiedError, WorkerError
from distwrap.launch.outcome import Outcome, raise_if_failed
from distwrap.supervision.failure import Failure


class Custom(Exception):
    """One that takes what JSON takes."""


class Picky(Exception):
    """One that takes other arguments than it holds, and has an attribute that JSON cannot hold."""

    def __init__(self, *, detail: int) -> None:
        super().__init__(f"detail {detail}")
        self.detail, self.place = detail, object()


def raised(error: BaseException, **changed: Any) -> BaseException:
    """Return what is raised here of what comes over the network, from rank 3 on another host."""
    text = Failure.of(error, 3, host="n2", pid=0).to_json()
    failure = Failure.from_json(json.dumps({**json.loads(text), **changed}))
    with pytest.raises(BaseException) as caught:
        raise_if_failed([Outcome(3, failure=failure)])
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("k", 3),
        Custom("a", 1),
        Picky(detail=1),
        CollectiveError("c"),
        WorkerDiedError("d"),
        OSError(2, "no"),
    ],
)
def test_an_exception_comes_in_its_own_type(error: Exception) -> None:
    """One whose type is known here, and whose arguments are plain, is made again, with rank and host."""
    made = raised(error)
    assert type(made) is type(error)
    assert (made.args, str(made)) == (error.args, str(error))
    assert getattr(made, "detail", None) == getattr(error, "detail", None)
    assert (made.rank, made.host) == (3, "n2")  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [ValueError(object()), KeyboardInterrupt(), SystemExit(3)])
def test_what_cannot_be_made_again_is_told_in_words(error: BaseException) -> None:
    """Others, and what is no exception to raise elsewhere, come as a WorkerError that quotes them."""
    made = raised(error)
    assert type(made) is WorkerError
    assert str(made).startswith(f"rank 3 on n2 raised {type(error).__name__}")


def test_nothing_is_imported_or_called_for_an_exception() -> None:
    """A type that is not loaded, or is no exception, is not looked for."""
    for kind in (["antigravity", "Error"], ["builtins", "print"], ["os", "system"], ["builtins", "object"]):
        assert type(raised(ValueError("echo"), kind=kind)) is WorkerError


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 9999, '{"kind": 3}', '{"kind": ["a", "b"], "rank": "x"}'])
def test_a_text_that_is_no_failure(text: str) -> None:
    """Whatever a stranger has written is told as one kind of error."""
    with pytest.raises(ValueError, match="is no failure of a rank"):
        Failure.from_json(text)
