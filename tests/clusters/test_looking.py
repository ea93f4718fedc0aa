"""Looking at runs of any launcher by `top` and `where`, and a trace over two hosts whose clocks differ."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest

from distwrap.cli import main
from distwrap.network.waiting import wait_until
from tests.clusters import looked_at
from tests.clusters.namespaces import Hosts
from tests.clusters.running import PYTHON, ended, environment, started, wait_for_line
from tests.clusters.slurm import Slurm
from tests.clusters.test_hosts import BOTH
from tests.clusters.test_mpi import MPICH, OPEN_MPI, needs
from tests.timing.test_trace import arrows_of, ranks_of, read

pytestmark = pytest.mark.slow("starts interpreters, under launchers of all kinds")
in_nightly = pytest.mark.nightly(row="hosts", why="process/ asks ranks where they are on one host")

TRAINING = [PYTHON, looked_at.__file__, "100"]
DISTWRAP = [PYTHON, "-m", "distwrap"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
LAUNCHERS = {
    "torchrun": [*TORCHRUN, *TRAINING[1:]],
    "Open MPI": [*OPEN_MPI, "-np", "2", *TRAINING],
    "MPICH": [*MPICH, "-np", "2", *TRAINING],
    "a shell": ["sh", "-c", f"DISTWRAP_NPROCS=2 {' '.join(TRAINING)}; true"],
    "a namespace of processes": [
        *("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c"),
        f"DISTWRAP_NPROCS=2 {' '.join(TRAINING)}; true",
    ],
}

# Clocks of one kernel cannot differ, and so the C library that a process asks tells it another time of day.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
int clock_gettime(clockid_t which, struct timespec *t) {
    static int (*plain)(clockid_t, struct timespec *);
    if (!plain) plain = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = plain(which, t);
    if (!failed && which == CLOCK_REALTIME) t->tv_sec += 30;
    return failed;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def table_of(look: Callable[[], str]) -> list[list[str]]:
    """Wait until two ranks are well on their way; return the words of their lines."""

    def found() -> list[list[str]]:
        lines = [line.split() for line in look().splitlines()[2:]]
        return lines if len(lines) >= 2 and all(line[4].isdigit() and int(line[4]) > 20 for line in lines[:2]) else []

    lines = wait_until(found, 90, longest_pause=0.2)
    assert lines, look()
    return lines


@in_nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_by_the_launchers_number(launcher: str) -> None:
    """`top PID` knows the process that a user has started, also where that is the launcher's, or a shell."""
    command = LAUNCHERS[launcher]
    needs(command[0])
    if launcher == "a namespace of processes" and subprocess.run([*command[:4], "true"], check=False).returncode:
        pytest.skip("this machine allows no namespaces of processes")
    with started(command) as process:
        table = partial(table_of, partial(look_at, process.pid, "top", "--once"))
        slow, waits = table()
        assert [slow[0], waits[0]] == ["0", "1"]
        assert 2 < float(slow[5]) < 21
        assert 2 < float(waits[5]) < 21
        assert wait_until(lambda: int(table()[1][6]) > 50, 90, longest_pause=0.2), table()
        where = look_at(process.pid, "where")
        assert re.search(r"\brank 0 |\branks 0, 1 ", where), where
        assert " at looked_at.py:" in where
        if "MPI" in launcher:  # whose ranks would outlive what is killed
            process.terminate()
            process.wait(30)


@in_nightly
def test_under_srun(slurm: Slurm) -> None:
    """A step beside the training shows its ranks on each of the job's nodes."""
    printed = slurm.folder / "looked_at"
    words = ["--parsable", "-N2", "-n2", "-o", str(printed), *_script(slurm.folder)]
    job = slurm.run("sbatch", *words, DISTWRAP_QUIET="0")
    number = job.stdout.strip()
    assert number, job.stderr
    # A look starts an interpreter on each node, which would take the cores from ranks that have not begun.
    assert wait_until(lambda: printed.exists() and "distwrap: loader at" in printed.read_text(), 90, longest_pause=0.2)

    def look() -> str:
        words = ["srun", "--overlap", "--jobid", number, "-N2", "-n2", "--label", *DISTWRAP, "top", "--once"]
        done = slurm.run(*words, **environment())
        of_tasks = [
            [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith(f"{task}: ")]
            for task in (0, 1)
        ]
        of_first, of_second = (_own(lines) for lines in of_tasks)
        both = of_first if len(of_first) == len(of_second) else []  # one node may have been asked before the other
        return "\n".join(["", "", *both])

    assert [line[0] for line in table_of(look)] == ["0", "1"]
    slurm.run("scancel", number)


def _own(lines: list[str]) -> list[str]:
    """Return the lines of this test's ranks: others may run on the machine."""
    return [line for line in lines if "looked_at.py" in line]


def _script(folder: Path) -> list[str]:
    script = folder / "looked_at.sh"
    exports = [f"export {name}='{value}'" for name, value in environment().items() if name.startswith("PYTHON")]
    script.write_text("\n".join(["#!/bin/sh", *exports, f"srun {' '.join(TRAINING)}", ""]))
    return [str(script)]


def look_at(pid: int, *words: str) -> str:
    """Look at the run of a process, here: an interpreter for each look would take the cores from the ranks."""
    with redirect_stdout(StringIO()) as printed:
        main([*words, str(pid)])
    return printed.getvalue()


@in_nightly
def test_two_hosts_of_one_kernel(two_hosts: Hosts) -> None:
    """Callers on several hosts: each is known by its number, and the ranks of one kernel see each other."""
    with ExitStack() as stack:
        callers = [stack.enter_context(started(two_hosts.command(name, *TRAINING), **BOTH)) for name in two_hosts.names]
        for pid in (caller.pid for caller in callers):
            lines = table_of(partial(look_at, pid, "top", "--once"))
            assert [line[2] for line in lines] == ["hosta", "hostb"]


def another_kernel(folder: Path) -> list[str]:
    """Return how a command is run so that it takes its node for another than this one."""
    boot = folder / "boot_id"
    boot.write_text("another-kernel\n")
    inside = f'mount --bind {boot} /proc/sys/kernel/random/boot_id && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", inside, "sh"]


@in_nightly
def test_two_hosts_with_a_kernel_each(two_hosts: Hosts, tmp_path: Path) -> None:
    """A table has the ranks of a node; where all ranks are is asked for, as SIGQUIT to a caller does."""
    here = two_hosts.command("hosta", *TRAINING)
    there = two_hosts.command("hostb", *another_kernel(tmp_path), *TRAINING)
    with started(here, **BOTH) as first, started(there, **BOTH) as second:
        for pid, own, other in ((first.pid, "0", "1"), (second.pid, "1", "0")):
            everywhere = re.compile(r"(  ranks? [01](, 1)? (in \w+ )?at looked_at\.py:\d+, step \d+\n){1,2}")
            found = wait_until(
                lambda: everywhere.fullmatch(look_at(pid, "where").partition("\n")[2]),  # noqa: B023
                90,
                longest_pause=0.5,
            )
            assert found, look_at(pid, "where")
            *_, line, last = look_at(pid, "top", "--once").splitlines()
            assert line.split()[0] == own
            assert last == f"rank {other} is on another node, or not started yet"
        first.send_signal(signal.SIGQUIT)
        wait_for_line(first, "where the ranks are")


@in_nightly
def test_a_trace_over_hosts_whose_clocks_differ(two_hosts: Hosts, tmp_path: Path) -> None:
    """A clock that is 30 s ahead is set right: an exchange ends at one time on both, and arrows lead forwards."""
    needs("gcc")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    command = [PYTHON, looked_at.__file__, "trace", str(tmp_path / "trace.json")]
    with ExitStack() as stack:
        first = stack.enter_context(started(two_hosts.command("hosta", *command), **BOTH))
        ahead = two_hosts.command("hostb", *another_kernel(tmp_path), *command)
        second = stack.enter_context(started(ahead, **BOTH, LD_PRELOAD=str(library)))
        outcomes = [ended(first), ended(second)]
    assert [each.code for each in outcomes] == [0, 0], outcomes
    events = read(tmp_path / "trace.json")
    ranks = ranks_of(events)
    assert sorted(ranks.values()) == ["rank 0", "rank 1"]
    assert [(ranks[start["pid"]], ranks[end["pid"]]) for start, end in arrows_of(events)] == [("rank 0", "rank 1")] * 5
    exchanges = [event for event in events if event["name"] == "distwrap: exchange"]
    ends: dict[str, list[float]] = {"rank 0": [], "rank 1": []}
    for event in exchanges:
        ends[ranks[event["pid"]]].append(event["ts"] + event["dur"])
    apart = [abs(one - other) for one, other in zip(*ends.values(), strict=True)]
    assert sorted(apart)[2] < 20_000, apart
