"""How a process ended, in words."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import pytest

import distwrap as dw
from distwrap import distributed
from distwrap.launch import supervisor
from distwrap.launch.processes import CommandProcess, OomCount, describe_exit


def test_exit_codes_in_words() -> None:
    """Exit codes are put into words, with the usual reason for a signal."""
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(None).startswith("it still runs")
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV (a crash in native code)"
    assert "/dev/shm: " in describe_exit(-signal.SIGBUS)
    assert describe_exit(-99) == "killed by signal 99"


def test_sigkill_is_told_from_want_of_memory() -> None:
    """What the kernel has counted decides whether SIGKILL came from it; where nobody counts, it is a guess."""
    assert "most likely because memory ran out" in describe_exit(-9)
    assert "not because memory ran out" in describe_exit(-9, oom_kills=0)
    assert "the kernel killed 2 processes of this control group during the run" in describe_exit(-9, 2)


def test_this_group_is_counted() -> None:
    """Where the system counts, nothing is killed for want of memory while nothing happens."""
    assert OomCount()() in (0, None)


@pytest.mark.parametrize("launcher", ["fork", "forkserver"])
def test_a_bad_end_after_success(launcher: str) -> None:
    """A rank that breaks while it leaves costs no result, but a warning that says how."""

    @distributed(nprocs=2, launcher=launcher)
    def breaks() -> str:
        import atexit

        if dw.rank() == 1:
            atexit.register(os._exit, 4)
        return "whole"

    with pytest.warns(RuntimeWarning, match=r"rank 1 on .* finished its work, and its result is complete.*exit code 4"):
        assert breaks() == "whole"


def test_an_end_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not end after its work is stopped, and its result is there."""
    monkeypatch.setattr(supervisor, "EXIT_SECONDS", 0.5)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.5)

    @distributed(nprocs=2, launcher="fork")
    def lingers() -> str:
        import atexit
        import time

        atexit.register(time.sleep, 100)
        return "whole"

    with pytest.warns(RuntimeWarning, match="did not end within 0.5 s"):
        assert lingers() == "whole"


def test_exit_handlers_of_a_fork() -> None:
    """What a forked rank registers for its end runs, and what the caller has registered does not run there."""

    @distributed(nprocs=2, launcher="fork")
    def registers(path: str) -> None:
        import atexit

        atexit.register(Path(path, f"rank{dw.rank()}").touch)

    import atexit
    import tempfile

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        mine = atexit.register(Path(folder, "caller").touch)
        registers(folder)
        atexit.unregister(mine)
        assert sorted(os.listdir(folder)) == ["rank0", "rank1"]


def test_sys_exit_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """`sys.exit(3)` on a rank ends the caller with 3, and a line says which rank it was."""

    @distributed(nprocs=2, launcher="forkserver")
    def leaves() -> None:
        if dw.rank() == 1:
            sys.exit(3)
        dw.barrier()

    with pytest.raises(SystemExit) as caught:
        leaves()
    assert caught.value.code == 3
    assert "distwrap: rank 1 on " in (said := capfd.readouterr().err)
    assert "called sys.exit(3)" in said


def test_no_signal_goes_to_a_process_that_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another program's by then."""
    process, sent = CommandProcess(0, lambda _: ["true"]), list[object]()
    assert process.exitcode(60) == 0
    monkeypatch.setattr(os, "kill", lambda *words: sent.append(words))
    process.signal(signal.SIGKILL)
    assert not sent
    process.close()
