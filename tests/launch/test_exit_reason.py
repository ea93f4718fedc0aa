"""How a process ended, in words."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import distwrap as dw
from distwrap import distributed
from distwrap.launch.processes import OomCount, describe_exit


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


PROGRAM = """
import distwrap as dw

@dw.distributed(nprocs=2, launcher="fork")
def main():
    if dw.rank() == 1:
        hoard = [bytearray(1 << 24) for _ in range(200)]
    dw.barrier()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group in which 600 MB are all there is; skip where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    old = next((line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1].split(",")), None)
    new = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/")
    if old is not None:
        group, limit = Path("/sys/fs/cgroup/memory") / old.lstrip("/") / "distwrap-test", "memory.limit_in_bytes"
    else:
        group, limit = Path("/sys/fs/cgroup") / new.lstrip("/") / "distwrap-test", "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(600 << 20))
        for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            with contextlib.suppress(OSError):
                (group / swap).write_text("0" if swap.endswith("max") else str(600 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_the_kernel_ends_a_rank_for_want_of_memory(small_group: Path, tmp_path: Path) -> None:
    """A rank that takes more memory than there is comes back with the kernel's count."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program],
        preexec_fn=lambda: (small_group / "cgroup.procs").write_text(str(os.getpid())),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "WorkerDiedError: rank 1 on" in done.stderr
    assert "killed by SIGKILL (the kernel killed 1 process of this control group during the run" in done.stderr


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


@pytest.mark.slow("waits for a rank that does not end")
def test_an_end_that_does_not_come() -> None:
    """A rank that does not end after its work is stopped, and its result is there."""

    @distributed(nprocs=2, launcher="fork")
    def lingers() -> str:
        import atexit
        import time

        atexit.register(time.sleep, 100)
        return "whole"

    with pytest.warns(RuntimeWarning, match="did not end within 7 s, and was killed"):
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
