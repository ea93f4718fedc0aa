"""What one rank does for all."""

from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path

import pytest

import distwrap as dw
from distwrap.errors import OptionError, WorkerError
from distwrap.testing import run_ranks


@dw.rank_zero_only
def report(value: int) -> int:
    """Report a value."""
    return value


class Logger:
    def __init__(self) -> None:
        self.lines: list[str] = []

    @dw.rank_zero_only
    def log(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    @dw.rank_zero_only(default=-1)
    @classmethod
    def name(cls) -> str:
        return cls.__name__


def test_functions_and_methods_run_on_rank_zero_alone() -> None:
    """Bare on a function or method, the other ranks skip the body and get None, or the default that was given."""

    def on_rank() -> tuple[object, ...]:
        logger = Logger()
        return report(3), logger.log("a"), logger.log("b"), logger.lines, Logger.name(), logger.name()

    assert run_ranks(on_rank, 2) == [(3, 1, 2, ["a", "b"], "Logger", "Logger"), (None, None, None, [], -1, -1)]


def test_in_a_single_process_it_is_the_plain_function() -> None:
    """Alone the function runs, under its own name, docstring and signature."""
    assert report(3) == 3
    assert (report.__name__, report.__doc__) == ("report", "Report a value.")
    assert dw.rank_zero_only(broadcast=True)(lambda: 4)() == 4
    with pytest.raises(KeyError):
        dw.rank_zero_only(broadcast=True)(dict.__getitem__)({}, "a")


def test_broadcast_gives_the_value_to_every_rank() -> None:
    """With ``broadcast=True`` rank 0's value is everybody's; rank 0 keeps its own object."""

    def on_rank() -> tuple[object, list[int]]:
        ran = []

        @dw.rank_zero_only(broadcast=True)
        def choose(base: int) -> dict[str, int]:
            ran.append(dw.rank())
            return {"port": base + dw.rank()}

        return choose(10), ran

    assert run_ranks(on_rank, 2) == [({"port": 10}, [0]), ({"port": 10}, [])]


def test_broadcast_gives_the_exception_to_every_rank() -> None:
    """An exception of rank 0 is raised on every rank in its own type, and the next call works."""

    def on_rank() -> int:
        @dw.rank_zero_only(broadcast=True)
        def fail() -> None:
            raise FileNotFoundError(2, "no such file", "config.yaml")

        with pytest.raises(FileNotFoundError, match=r"config\.yaml"):
            fail()
        return dw.rank_zero_only(broadcast=True)(dw.rank)()

    assert run_ranks(on_rank, 2, timeout=20) == [0, 0]


def test_broadcast_of_what_cannot_be_pickled_is_an_error_on_every_rank() -> None:
    """A value that cannot be sent is an error on every rank, which names what it is."""

    def on_rank() -> str:
        with pytest.raises(TypeError) as failure:
            dw.rank_zero_only(broadcast=True)(lambda: (i for i in "abc"))()
        return str(failure.value)

    one, other = run_ranks(on_rank, 2, timeout=20)
    assert one == other
    assert one.startswith("rank 0's generator cannot be sent to the other ranks")


def test_local_means_the_first_rank_of_each_machine() -> None:
    """With ``local=True`` the first rank of this machine runs, and with ``broadcast`` it answers for the machine."""

    def on_rank() -> tuple[object, object]:
        alone = dw.rank_zero_only(local=True)(dw.local_rank)()
        return alone, dw.rank_zero_only(local=True, broadcast=True)(dw.local_rank)()

    assert run_ranks(on_rank, 2) == [(0, 0), (None, 0)]


def test_it_travels_with_the_function_that_calls_it() -> None:
    """A decorated function can be pickled, copied, and sent to the ranks inside another one."""

    @dw.rank_zero_only(default="quiet")
    def speak() -> str:
        return "aloud"

    assert run_ranks(lambda: speak(), 2) == ["aloud", "quiet"]
    assert pickle.loads(pickle.dumps(report)) is report
    assert pickle.loads(pickle.dumps(Logger().log))("a") == 1
    assert copy.deepcopy({"f": report})["f"](5) == 5
    assert copy.copy(speak)() == "aloud"


def test_only_plain_functions_are_taken() -> None:
    """What is no function, or would run later, is refused where it is decorated."""

    async def coroutine() -> None: ...

    for wrong in (3, coroutine):
        with pytest.raises(OptionError, match="rank_zero_only"):
            dw.rank_zero_only(wrong)  # type: ignore[call-overload]


def test_rank_zero_goes_first(tmp_path: Path) -> None:
    """The others enter after rank 0 has left, so what it wrote is there, whole."""

    def on_rank() -> str:
        with dw.rank_zero_first():
            if dw.rank() == 0:
                time.sleep(0.2)
                (tmp_path / "data").write_text("whole")
            return (tmp_path / "data").read_text()

    assert run_ranks(on_rank, 2, timeout=20) == ["whole", "whole"]


def test_a_failure_of_the_first_leaves_nobody_waiting() -> None:
    """Where rank 0 fails inside, it raises its own error, the others a WorkerError, and the world still works."""

    def on_rank() -> tuple[str, list[int]]:
        entered = []
        try:
            with dw.rank_zero_first():
                entered.append(dw.rank())
                raise ConnectionError("no network")
        except (ConnectionError, WorkerError) as error:
            kind = type(error).__name__
        return kind, dw.gather_object(len(entered))

    assert run_ranks(on_rank, 2, timeout=20) == [("ConnectionError", [1, 0]), ("WorkerError", [1, 0])]


def test_a_failure_of_another_rank_is_its_own() -> None:
    """An error inside on rank 1, after rank 0 has left, is raised there as it is."""

    def on_rank() -> bool:
        if dw.rank() == 0:
            with dw.rank_zero_first():
                return True
        with pytest.raises(ZeroDivisionError), dw.rank_zero_first():
            1 / 0  # noqa: B018
        return True

    assert run_ranks(on_rank, 2, timeout=20) == [True, True]


def test_on_rank_zero_makes_one_object_and_quiet_twins() -> None:
    """The factory runs on rank 0 alone; elsewhere any call, attribute, item and ``with`` is taken and does nothing."""

    def on_rank() -> tuple[bool, list[int]]:
        made = []

        class Run:
            def __init__(self) -> None:
                made.append(dw.rank())
                self.config: dict[str, int] = {}

            def log(self, *_: object) -> Run:
                return self

            def __enter__(self) -> Run:
                return self

            def __exit__(self, *_: object) -> None: ...

        with dw.on_rank_zero(Run) as run:
            run.log(1).log(2)
            run.config["lr"] = 1
            run.note = "text"
            assert list(run.config) == (["lr"] if dw.rank() == 0 else [])
        return bool(run), made

    assert run_ranks(on_rank, 2) == [(True, [0]), (False, [])]
    assert dw.on_rank_zero(list) == []
