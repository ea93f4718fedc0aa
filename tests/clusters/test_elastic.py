"""Restarts: after a rank's failure, after its death, after the loss of a whole host."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clusters.namespaces import Hosts
from tests.clusters.running import JOB, PYTHON, assert_like_one_process, ended, run, started, wait_for_line

pytestmark = pytest.mark.slow("restarts over hosts")
in_nightly = pytest.mark.nightly(row="hosts", why="launch/test_elastic.py, on one host")


def torchrun(*words: str) -> list[str]:
    return [PYTHON, "-m", "torch.distributed.run", *words, JOB[1]]


@in_nightly
@pytest.mark.parametrize("launcher", ["auto", "spawn"])
def test_failed_ranks_start_again(launcher: str, tmp_path: Path) -> None:
    """After an exception, and after a death, the run goes on from its checkpoint, to the weights of one process."""
    env = {"DISTWRAP_NPROCS": "2", "DISTWRAP_MAX_RESTARTS": "2", "DISTWRAP_LAUNCHER": launcher}
    done = run([*JOB, "4", str(tmp_path / "last.pt")], JOB_FAILS="raise@1,die@3", **env)
    assert done.code == 0, done.output
    assert [line["first"] for line in done.told if "start" in line] == [0, 0, 1, 1, 3, 3]
    assert re.search("restart 1 of at most 2: rank 1 on .* raised ValueError: rank 1 stumbles", done.output), (
        done.output
    )
    assert re.search("restart 2 of at most 2: .*died without raising an exception", done.output), done.output
    assert_like_one_process(done.values()[0], 4)


@in_nightly
def test_when_no_restart_is_left(tmp_path: Path) -> None:
    """The last attempt's failure is raised in the caller, in its own type, once."""
    done = run([*JOB, "4"], JOB_FAILS="always@2", DISTWRAP_NPROCS="2", DISTWRAP_MAX_RESTARTS="1")
    assert done.code == 1
    assert done.output.rstrip().endswith("ValueError: rank 1 stumbles in epoch 2"), done.output
    assert done.output.count("Traceback (most recent call last):") == 2, done.output  # there, and here
    assert "torch.distributed.elastic" not in done.output


@in_nightly
def test_under_torchrun(tmp_path: Path) -> None:
    """torchrun's own restarts find a fresh meeting place too."""
    done = run(
        [*torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1"), "4", str(tmp_path / "last.pt")],
        JOB_FAILS="raise@2",
    )
    assert done.code == 0, done.output
    assert [line["first"] for line in done.told if "start" in line] == [0, 0, 2, 2]
    for value in done.values():
        assert_like_one_process(value, 4)


@in_nightly
def test_two_agents_of_torchrun_here() -> None:
    """Two agents on one machine are two nodes."""
    words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29447"]
    with ExitStack() as stack:
        command = torchrun(*words, "--rdzv-id=x", "--local-addr=127.0.0.1")
        processes = [stack.enter_context(started(command)) for _ in range(2)]
        both = [ended(process) for process in processes]
    assert [each.code for each in both] == [0, 0], both
    assert sorted(line["place"]["node_rank"] for each in both for line in each.starts()) == [0, 1]
    for each in both:
        assert_like_one_process(each.values()[0])


@in_nightly
def test_a_rank_and_then_a_whole_host_are_lost(two_hosts: Hosts, tmp_path: Path) -> None:
    """With nnodes="1:2" training goes on after both, on one host, to the weights of one process."""
    env = {"DISTWRAP_NNODES": "1:2", "DISTWRAP_RDZV_ENDPOINT": "hosta:29448", "DISTWRAP_NPROCS": "1"}
    command = [*JOB, "24", str(tmp_path / "last.pt")]
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                started(
                    two_hosts.command(name, *command),
                    **env,
                    DISTWRAP_MAX_RESTARTS="3",
                    JOB_SLOW="0.4@2",
                    JOB_FAILS="die@2",
                )
            )
            for name in two_hosts.names
        )
        seen = wait_for_line(first, '"epoch": 5')
        two_hosts.kill_all_on("hostb")
        done = ended(first)
        second.wait(10)
    assert done.code == 0, done.output
    starts = [line for line in [*seen.told, *done.told] if "start" in line]
    assert [line["place"]["world_size"] for line in starts] == [2, 2, 1]
    assert starts[0]["first"] == 0
    assert starts[1]["first"] == 2
    assert starts[2]["first"] >= 5
    assert_like_one_process(done.values()[0], 24)


@in_nightly
def test_a_host_that_comes_later_joins(two_hosts: Hosts, tmp_path: Path) -> None:
    """A second host that comes while the first one trains makes it go on with both."""
    env = {"DISTWRAP_NNODES": "1:2", "DISTWRAP_RDZV_ENDPOINT": "hosta:29449", "DISTWRAP_NPROCS": "1"}
    command = [*JOB, "60", str(tmp_path / "last.pt")]
    with ExitStack() as stack:
        first = stack.enter_context(started(two_hosts.command("hosta", *command), **env, JOB_SLOW="0.4@1"))
        seen = wait_for_line(first, '"epoch": 1')
        second = stack.enter_context(started(two_hosts.command("hostb", *command), **env, JOB_SLOW="0.4@1"))
        done, other = ended(first), ended(second)
    assert done.code == other.code == 0, done.output + other.output
    assert [line["place"]["world_size"] for line in [*seen.told, *done.told] if "start" in line] == [1, 2]
    values = [value for value in [*done.values(), *other.values()] if isinstance(value, list)]
    assert len(values) == 1  # rank 0's, wherever it is by now
    assert_like_one_process(values[0], 60)


@in_nightly
def test_too_few_hosts(two_hosts: Hosts) -> None:
    """A host alone at an endpoint that nobody holds says so."""
    env = {"DISTWRAP_NNODES": "1:2", "DISTWRAP_RDZV_ENDPOINT": f"{two_hosts.nobody}:29450", "DISTWRAP_NPROCS": "1"}
    with started(two_hosts.command("hostb", *JOB), **env, JOB_REPLY="2") as process:
        alone = ended(process)
    assert f"no node answers ({two_hosts.nobody} port 29450" in alone.output, alone.output


@in_nightly
def test_what_an_outer_launcher_has_decided_is_said() -> None:
    """Options that torchrun decides are left to it, with a line each, and what to use there."""
    done = run(torchrun("--standalone", "--nproc-per-node=2"), DISTWRAP_NPROCS="3", DISTWRAP_MAX_RESTARTS="1")
    assert done.code == 0, done.output
    assert done.output.count("nprocs=3 is left to torchrun, which has started 2 here") == 1
    assert done.output.count("max_restarts=1 is left to torchrun: torchrun has --max-restarts") == 1
