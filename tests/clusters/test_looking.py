"""Looking at runs of any launcher by `where`, on one host and on several."""

from __future__ import annotations

import re
import signal
import subprocess
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from distwrap.cli import main
from distwrap.network.waiting import wait_until
from tests.clusters import looked_at
from tests.clusters.namespaces import Hosts
from tests.clusters.running import PYTHON, environment, started, wait_for_line
from tests.clusters.slurm import Slurm
from tests.clusters.test_hosts import BOTH
from tests.clusters.test_mpi import MPICH, OPEN_MPI, needs

pytestmark = pytest.mark.slow("starts interpreters, under launchers of all kinds")
in_nightly = pytest.mark.nightly(row="hosts", why="timing/test_where.py finds ranks by their callers, elastic's too")

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

HERE = re.compile(r"(  ranks? [01](, 1)? (in \w+ )?at looked_at\.py:\d+, step \d+\n){1,2}")


def wait_for_ranks(pid: int) -> str:
    """Wait until `where` has the place of both ranks in their loop; return what it says."""

    def both() -> str:
        said = look_at(pid, "where")
        return said if HERE.fullmatch(said.partition("\n")[2]) and re.search(r"\bstep [2-9]\d", said) else ""

    said = wait_until(both, 90, longest_pause=0.5)
    assert said, look_at(pid, "where")
    return said


@in_nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_by_the_launchers_number(launcher: str) -> None:
    """`where PID` knows the process that a user has started, also where that is the launcher's, or a shell."""
    command = LAUNCHERS[launcher]
    needs(command[0])
    if launcher == "a namespace of processes" and subprocess.run([*command[:4], "true"], check=False).returncode:
        pytest.skip("this machine allows no namespaces of processes")
    with started(command) as process:
        wait_for_ranks(process.pid)
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

    def look() -> bool:
        words = ["srun", "--overlap", "--jobid", number, "-N2", "-n2", "--label", *DISTWRAP, "where"]
        done = slurm.run(*words, **environment())
        of_tasks = [[line for line in done.stdout.splitlines() if line.startswith(f"{task}: ")] for task in (0, 1)]
        own = [{line.partition(": ")[2] for line in lines if "looked_at.py" in line} for lines in of_tasks]
        return all(own)  # others may run on the machine

    assert wait_until(look, 90, longest_pause=0.2)
    slurm.run("scancel", number)


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
            wait_for_ranks(pid)


def another_kernel(folder: Path) -> list[str]:
    """Return how a command is run so that it takes its node for another than this one."""
    boot = folder / "boot_id"
    boot.write_text("another-kernel\n")
    inside = f'mount --bind {boot} /proc/sys/kernel/random/boot_id && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", inside, "sh"]


@in_nightly
def test_two_hosts_with_a_kernel_each(two_hosts: Hosts, tmp_path: Path) -> None:
    """Where all ranks are is asked for, as SIGQUIT to a caller does."""
    here = two_hosts.command("hosta", *TRAINING)
    there = two_hosts.command("hostb", *another_kernel(tmp_path), *TRAINING)
    with started(here, **BOTH) as first, started(there, **BOTH) as second:
        for pid in (first.pid, second.pid):
            wait_for_ranks(pid)
        first.send_signal(signal.SIGQUIT)
        wait_for_line(first, "where the ranks are")
