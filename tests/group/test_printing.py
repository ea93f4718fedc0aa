"""One line, not one a rank; and lines that say whose they are."""

from __future__ import annotations

import logging
import sys

import pytest

import distwrap as dw
from distwrap.testing import run_ranks


def test_print_prints_on_rank_zero_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """It takes what the builtin takes; on all ranks each line says its rank, in one piece."""

    def on_rank() -> None:
        dw.print("loss", 0.5, sep="=", end=";\n", flush=True)
        dw.print("to", "stderr", file=sys.stderr)
        dw.barrier()
        dw.print("here", dw.rank(), all_ranks=True)
        dw.print("a", "b", sep=None, end=None, file=sys.stderr, all_ranks=True)

    run_ranks(on_rank, 2)
    printed = capfd.readouterr()
    first, *others = printed.out.splitlines()
    assert (first, sorted(others)) == ("loss=0.5;", ["[rank 0] here 0", "[rank 1] here 1"])
    assert sorted(printed.err.splitlines()) == ["[rank 0] a b", "[rank 1] a b", "to stderr"]


def test_in_a_single_process_print_is_the_builtin(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone it prints the same, without a rank, on all ranks or not."""
    dw.print("a", 1, sep="-", end="!")
    dw.print("b", all_ranks=True)
    assert capsys.readouterr().out == "a-1!b\n"
    with pytest.raises(TypeError):
        dw.print("a", sep=1)  # type: ignore[arg-type]


def logged(ranks: int, caplog: pytest.LogCaptureFixture) -> list[list[tuple[str, str, str]]]:
    def on_rank() -> list[tuple[str, str, str]]:
        records: list[logging.LogRecord] = []
        plain = logging.getLogger("a program")
        plain.setLevel(logging.INFO)
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        plain.addHandler(handler)
        try:
            log = dw.get_logger("a program", {"run": "first"})
            for epoch in range(2):
                log.info("epoch %d of 100 %%", epoch)
                log.warning("slow", once=True)
                log.error("best %s", epoch, rank_zero=True, once=True)
            log.debug("too low", once=True)
            log.log(logging.INFO, "plain")
        finally:
            plain.removeHandler(handler)
        assert {record.run for record in records} == {"first"}  # type: ignore[attr-defined]
        return [(record.levelname, record.getMessage(), record.funcName) for record in records]

    return run_ranks(on_rank, ranks) if ranks > 1 else [on_rank()]


def expected(front: str, is_first: bool) -> list[tuple[str, str, str]]:
    lines = [("INFO", "epoch 0 of 100 %"), ("WARNING", "slow"), ("ERROR", "best 0")]
    lines += [("INFO", "epoch 1 of 100 %"), ("INFO", "plain")]
    return [(level, front + text, "on_rank") for level, text in lines if is_first or level != "ERROR"]


def test_a_logger_says_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    """In front of each message; once in a run, or on rank 0 alone, where asked for; the caller is the caller."""
    assert logged(2, caplog) == [expected("[rank 0] ", True), expected("[rank 1] ", False)]


def test_in_a_single_process_a_logger_is_a_plain_one(caplog: pytest.LogCaptureFixture) -> None:
    """Alone a message has no rank in front."""
    assert logged(1, caplog) == [expected("", True)]


def test_an_exception_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The words of logging go through."""
    try:
        raise ValueError("no")
    except ValueError:
        dw.get_logger().exception("it failed")
    assert caplog.records[-1].exc_info is not None
    assert caplog.records[-1].name == "root"
