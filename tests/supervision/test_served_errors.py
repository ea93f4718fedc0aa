"""A served function that fails answers whoever asked, and the rank that serves goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import distwrap as dw
from distwrap.errors import WorkerError
from distwrap.group.world import current_world
from distwrap.testing import run_ranks

LIMIT = 60.0


KINDS = (OSError, RuntimeError, KeyError)


def _asks() -> list[tuple[str, bytes]]:
    """Ask rank 0 for what it fails to make, and then for what it makes."""

    def broken(kind: int, *_: object) -> bytes:
        raise KINDS[kind]("on purpose")

    channel = current_world().channel
    assert channel is not None
    if dw.rank() == 0:
        channel.work.serve("broken", broken)
        channel.work.serve("whole", lambda *_: b"-")
    dw.barrier()
    told = []
    for kind in range(len(KINDS)) if dw.rank() == 1 else ():
        with pytest.raises(WorkerError) as caught:
            channel.work.ask("broken", 0, kind)
        told.append((str(caught.value), channel.work.ask("whole", 0)))
        assert caught.value.rank == 0
    dw.barrier()
    return told


def test_an_exception_in_a_served_function_is_the_answer() -> None:
    """It is raised on the rank that asks, with the traceback of the rank that serves, which serves on."""
    told = run_ranks(_asks, 2, timeout=LIMIT)[1]
    for kind, (said, answer) in zip(KINDS, told, strict=True):
        assert said.startswith("rank 1 asked rank 0 for 'broken', and rank 0 failed to make the answer:\n\nTraceback")
        assert "in broken\n" in said
        assert said.endswith((f"{kind.__name__}: on purpose\n", "KeyError: 'on purpose'\n"))
        assert answer == b"-"


def _leaves_broken() -> str:
    channel = current_world().channel
    assert channel is not None
    if dw.rank() == 0:
        channel.work.serve("broken", lambda *_: b"" + None)  # type: ignore[operator]
    dw.barrier()
    if dw.rank() == 0:
        return ""
    while not current_world().store.check(["left/0"]):  # type: ignore[union-attr]
        pass
    with pytest.raises(WorkerError, match="rank 0 failed") as caught:
        channel.work.ask("broken", 0)
    return str(caught.value)


def test_what_is_served_last_may_fail_too() -> None:
    """A rank that leaves while what it serves is broken leaves in order, and who asks later is told."""
    assert "TypeError" in run_ranks(_leaves_broken, 2, timeout=LIMIT)[1]


def _waits_for_who_failed(said: Path) -> None:
    if dw.rank() == 0:
        raise KeyError("the cause")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which comes soon after the cause is known
    try:
        with dw.rank_zero_first():
            pass
    except Exception as error:
        said.write_text(f"{type(error).__name__}: {error}")
        raise


def test_who_waits_for_a_rank_that_has_failed(tmp_path: Path) -> None:
    """It is told of the failure, and not that the other has left the function; the cause is what the caller gets."""
    with pytest.raises(KeyError, match="the cause"):
        run_ranks(_waits_for_who_failed, 2, tmp_path / "said", timeout=LIMIT)
    said = (tmp_path / "said").read_text()
    assert said == "WorkerError: rank 1 waits for the work of rank 0, which has failed."
