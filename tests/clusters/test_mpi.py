"""The same script under real MPI launchers: on this machine, and over two hosts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.clusters.namespaces import Hosts
from tests.clusters.running import JOB, assert_like_one_process, is_like_one_process, run

pytestmark = pytest.mark.slow("starts interpreters under mpirun")
in_nightly = pytest.mark.nightly(row="mpi", why="test_mpich_over_two_hosts")

OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
MPICH = ["mpirun.mpich"]


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"not installed: {program}")


@in_nightly
@pytest.mark.parametrize(("command", "source"), [(OPEN_MPI, "open_mpi"), (MPICH, "mpich")], ids=["open_mpi", "mpich"])
def test_two_runs_of_two_ranks_here(command: list[str], source: str) -> None:
    """`mpirun -np 2` needs no address and no port: two runs at once find a port each, by the job or its parent."""
    needs(command[0])
    one, two = (" ".join([*command, "-np", "2", *JOB, epochs]) for epochs in ("1", "2"))
    done = run(["sh", "-c", f"{one} & first=$!; {two}; second=$?; wait $first && exit $second"])
    assert done.code == 0, done.output
    places = [line["place"] for line in done.starts()]
    assert [(place["rank"], place["local_rank"], place["source"]) for place in places] == [
        (0, 0, source),
        (0, 0, source),
        (1, 1, source),
        (1, 1, source),
    ]
    assert {place["master_addr"] for place in places} == {"127.0.0.1"}
    one_epoch, two_epochs = ([value for value in done.values() if is_like_one_process(value, n)] for n in (1, 2))
    assert [len(one_epoch), len(two_epochs)] == [2, 2], done.values()


@in_nightly
def test_a_failure_has_its_cause() -> None:
    """The rank that failed prints its exception, and the other says who failed, not that a connection was closed."""
    needs(MPICH[0])
    done = run([*MPICH, "-np", "2", *JOB], JOB_FAILS="raise@1")
    assert done.code != 0
    assert "ValueError: rank 1 stumbles in epoch 1" in done.output


@in_nightly
def test_open_mpi_over_two_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    """Over two hosts the user names rank 0's machine; the interface that leads there is found."""
    needs(OPEN_MPI[0])
    hosts = ",".join(f"{two_hosts.address(name)}:1" for name in two_hosts.names)
    shell = two_hosts.remote_shell(tmp_path)
    network = f"{two_hosts.subnet}.0/24"
    mca = ["plm_rsh_agent", str(shell), "oob_tcp_if_include", network, "btl_tcp_if_include", network]
    words = [word for i in range(0, len(mca), 2) for word in ("--mca", mca[i], mca[i + 1])]
    done = run([*OPEN_MPI, "-np", "2", "--host", hosts, *words, "-x", "MASTER_ADDR=hosta", "-x", "PYTHONPATH", *JOB])
    assert done.code == 0, done.output
    starts = done.starts()
    assert [(line["host"], line["interface"]) for line in starts] == [("hosta", "eth0"), ("hostb", "eth0")]
    assert [line["place"]["node_rank"] for line in starts] == [0, 1]
    for value in done.values():
        assert_like_one_process(value)


def test_mpich_over_two_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    """MPICH's ranks on two hosts; without a word of where they meet they are told what to export."""
    needs(MPICH[0])
    shell = two_hosts.remote_shell(tmp_path)
    hosts = ",".join(two_hosts.address(name) for name in two_hosts.names)
    launch = [*MPICH, "-launcher", "ssh", "-launcher-exec", str(shell), "-hosts", hosts, "-ppn", "1"]
    launch += ["-iface", two_hosts.bridge]
    done = run([*launch, *JOB])
    assert "export MASTER_ADDR, the name of that node" in done.output
    done = run([*launch, "-genv", "MASTER_ADDR", "hosta", *JOB])
    assert done.code == 0, done.output
    assert [(line["host"], line["place"]["node_rank"]) for line in done.starts()] == [("hosta", 0), ("hostb", 1)]
    for value in done.values():
        assert_like_one_process(value)
