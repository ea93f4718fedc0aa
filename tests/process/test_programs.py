"""Programs of users under a real `python`: the main guard, options of Python, memory, and what a start imports."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distwrap as dw
from distwrap import distributed
from distwrap.launch import forkserver
from tests.launch.test_script import TWO_CALLS

pytestmark = pytest.mark.slow("starts interpreters, each of which imports torch")

ROOT = Path(__file__).parents[2]
LIMIT = 100.0
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(*words: str, folder: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python` with these words, and return all that it printed; fail with another exit code."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


NO_GUARD = """
import os, pickle, sys
import distwrap as dw

print("top")

class Config:
    lr = 0.5

class Mine(Exception):
    pass

@dw.distributed(nprocs=2, launcher=sys.argv[1])
def main(config):
    pickle.loads(pickle.dumps(Config()))  # by name, on the rank
    if config is None:
        raise Mine("none")
    return Config(), sys.flags.no_user_site, sys.warnoptions, os.environ.get("PYTHONHASHSEED")

got, *flags = main(Config())
print("got", type(got) is Config, *flags)
try:
    main(None)
except Mine as error:
    print("caught", error)
"""


@pytest.mark.parametrize("launcher", ["spawn", "forkserver"])
def test_a_script_without_a_guard(launcher: str, tmp_path: Path) -> None:
    """A script needs no main guard and is not imported again; its classes work on the ranks, which have its flags."""
    (tmp_path / "bare.py").write_text(NO_GUARD)
    done = run("-s", "-W", "ignore:a word", "bare.py", launcher, folder=tmp_path)
    assert done.stdout.splitlines() == ["top", "got True 1 ['ignore:a word'] None", "caught none"]


def test_a_script_that_is_run_again(tmp_path: Path) -> None:
    """With Python's own options, the ranks take rank 0's result from call to call, and only rank 0 runs on."""
    (tmp_path / "two.py").write_text(TWO_CALLS)
    done = run("-X", "dev", "-W", "ignore", "two.py", "4", folder=tmp_path)
    ranks = [(rank, [40, 41, 42]) for rank in range(3)]
    assert done.stdout.count("after") == 1
    assert f"after [40, 41, 42] {ranks}" in done.stdout


def test_a_program_from_standard_input() -> None:
    """Where there is no script to run again, that is said."""
    code = "import distwrap as dw\ndw.distributed(nprocs=2, launcher='script')(dw.world_size)()\n"
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert "LaunchError" in done.stderr
    assert "standard input" in done.stderr


AGAIN = """
import os
import distwrap as dw

@dw.distributed(nprocs=2, max_restarts=1, timeout=30)
def main():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dw.barrier()
    if attempt == 0 and dw.rank() == 1:
        os.kill(os.getpid(), 9)
    return attempt, dw.gather(dw.rank()).tolist()

if __name__ == "__main__":
    print("got", main())
"""


def test_a_restart(tmp_path: Path) -> None:
    """Ranks of a script start again after one of them was killed, and the value of the second attempt comes home."""
    (tmp_path / "again.py").write_text(AGAIN)
    assert run("again.py", folder=tmp_path).stdout == "got (1, [0, 1])\n"


JOINS = """
import sys
import distwrap as dw

@dw.distributed(nprocs=7, max_restarts=1)
def main():
    if "fails" in sys.argv and dw.rank() == 1:
        raise ValueError("the first cause")
    return dw.gather(dw.rank()).tolist()

if __name__ == "__main__":
    sys.stdout.write(f"got {main()} {dw.placement().source}\\n")
"""


def test_torchrun(tmp_path: Path) -> None:
    """Ranks that torchrun has started join, and each goes on with the value; what torchrun has decided is said once."""
    (tmp_path / "joins.py").write_text(JOINS)
    done = run(*TORCHRUN, "joins.py", folder=tmp_path, OMP_NUM_THREADS="1", DISTWRAP_QUIET="0")
    assert done.stdout == "got [0, 1] torchrun\n" * 2
    assert done.stderr.count("nprocs=7 is left to torchrun, which has started 2 here") == 1
    assert done.stderr.count("max_restarts=1 is left to torchrun: torchrun has --max-restarts") == 1


def test_a_failure_under_torchrun(tmp_path: Path) -> None:
    """The rank that failed first is the root cause that torchrun names, and its own exit code is 1."""
    (tmp_path / "joins.py").write_text(JOINS)
    done = run(*TORCHRUN, "joins.py", "fails", folder=tmp_path, code=1, OMP_NUM_THREADS="1")
    assert "ValueError: the first cause" in done.stderr
    assert re.search(r"Root Cause (?s:.*)rank      : 1 ", done.stderr), done.stderr
    assert "got" not in done.stdout


FORKED_AGAIN = """
import os, sys, torch
import distwrap as dw

@dw.distributed(nprocs=2, launcher="fork")
def has_compiler():
    return "torch._dynamo" in sys.modules

if __name__ == "__main__":
    before = dict(os.environ)
    print([has_compiler() for _ in range(2)], os.environ == before)
"""


def test_ranks_that_are_forked_again_need_not_import_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with DDP, and takes each rank a second: from the second launch on the caller has it for them."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it then
    (tmp_path / "program.py").write_text(FORKED_AGAIN)
    assert run("program.py", folder=tmp_path).stdout == "[False, True] True\n"


HOARDS = """
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


def test_the_kernel_ends_a_rank_for_want_of_memory(small_group: Path, tmp_path: Path) -> None:
    """A rank that takes more memory than there is comes back with the kernel's count."""
    program = tmp_path / "program.py"
    program.write_text(HOARDS)
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


def test_the_server_ends_with_its_caller_also_while_it_imports(tmp_path: Path) -> None:
    """A caller that ends at once leaves no server that still imports torch, which takes it seconds."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "torch.py").write_text("import time\ntime.sleep(30)\n")
    server = subprocess.Popen(
        [sys.executable, "-c", forkserver._SERVER.format(fd=(pair := socket.socketpair())[1].fileno())],
        pass_fds=[pair[1].fileno()],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
    )
    try:
        pair[1].close()
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(1.0)  # it waits for its imports
        pair[0].close()
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()


def test_a_killed_server_is_replaced() -> None:
    """When somebody kills the server, the next launch starts another."""
    server = forkserver.warm_server()
    server._process.kill()
    server._process.wait(10)
    assert distributed(nprocs=2, launcher="forkserver")(dw.world_size)() == 2
