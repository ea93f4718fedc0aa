"""The decorator and torchrun over two hosts, each with a network of its own, and what goes wrong between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import distwrap
from distwrap.launch.peer_launchers import LOST_SECONDS
from distwrap.network.waiting import wait_until
from tests.clusters.namespaces import Hosts
from tests.clusters.running import JOB, PYTHON, Ended, assert_like_one_process, ended, started, wait_for_line
from tests.limits import SOON

pytestmark = pytest.mark.slow("callers on hosts of their own, network namespaces")
in_nightly = pytest.mark.nightly(
    row="hosts", why="test_the_same_command_on_both, and faults/test_matrix.py on one host"
)

ENDPOINT = "hosta:29444"
BOTH = {"DISTWRAP_NNODES": "2", "DISTWRAP_RDZV_ENDPOINT": ENDPOINT, "DISTWRAP_NPROCS": "1", "DISTWRAP_TIMEOUT": "30"}


@contextmanager
def running(
    hosts: Hosts, *command: str, each: dict[str, dict[str, str]] | None = None, **env: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a command on every host, with what is different on one of them."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(hosts.command(name, *command), **{**env, **(each or {}).get(name, {})}))
            for name in hosts.names
        ]


def on_both(hosts: Hosts, *command: str, each: dict[str, dict[str, str]] | None = None, **env: str) -> list[Ended]:
    """Run a command on every host to its end."""
    with running(hosts, *command, each=each, **env) as processes:
        return [ended(process) for process in processes]


def test_the_same_command_on_both(two_hosts: Hosts) -> None:
    """Without node ranks: the endpoint's host is node 0, gloo takes the interface that leads to the other."""
    first, second = on_both(two_hosts, *JOB, **{**BOTH, "DISTWRAP_NPROCS": "2"})
    assert first.code == second.code == 0, first.output + second.output
    starts = sorted(first.starts() + second.starts(), key=lambda line: int(line["start"]))
    assert [line["host"] for line in starts] == ["hosta", "hosta", "hostb", "hostb"]
    assert {line["interface"] for line in starts} == {"eth0"}
    assert_like_one_process(first.values()[0])
    assert second.values()[0].startswith("node 1: ranks 2, 3 of 4 done in ")
    assert "4 ranks on 2 nodes (hosta), cpu, gloo on eth0" in first.output


@in_nightly
def test_hosts_with_other_numbers_of_ranks(two_hosts: Hosts) -> None:
    """One host may start more ranks than the other."""
    each = {"hosta": {"DISTWRAP_NPROCS": "1"}, "hostb": {"DISTWRAP_NPROCS": "2"}}
    first, second = on_both(two_hosts, *JOB, "1", each=each, **BOTH)
    assert first.code == second.code == 0, first.output + second.output
    places = [line["place"] for line in sorted(first.starts() + second.starts(), key=lambda line: int(line["start"]))]
    assert [(place["node_rank"], place["local_rank"], place["local_world_size"]) for place in places] == [
        (0, 0, 1),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert_like_one_process(first.values()[0], 1)


@in_nightly
@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "DISTWRAP_NPROCS": "1"}, "NODE_RANK"),
        ({"WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "9"}, "RANK"),
        ({"WORLD_SIZE": "2", "NPROC_PER_NODE": "1"}, "RANK"),
    ],
    ids=["by hand", "kubeflow", "dlc"],
)
def test_a_process_is_a_machine(two_hosts: Hosts, variables: dict[str, str], number: str) -> None:
    """Where the environment numbers machines, each starts its ranks."""
    common = {"MASTER_ADDR": "hosta", "MASTER_PORT": "29445", **variables}
    each = {name: {**common, number: str(i)} for i, name in enumerate(two_hosts.names)}
    if "PET_NODE_RANK" in variables:
        each = {name: {**env, "PET_NODE_RANK": env[number]} for name, env in each.items()}
    first, second = on_both(two_hosts, *JOB, each=each)
    assert first.code == second.code == 0, first.output + second.output
    assert [line["place"]["world_size"] for line in first.starts() + second.starts()] == [2, 2]
    assert_like_one_process(first.values()[0])


@in_nightly
def test_the_doctor_over_both(two_hosts: Hosts) -> None:
    """The doctor starts ranks on both hosts, and names the interface and the hosts; node 1 points to node 0."""
    first, second = on_both(two_hosts, PYTHON, "-m", "distwrap", "doctor", "--nprocs", "1", **_without_nprocs())
    assert first.code == second.code == 0, first.output + second.output
    assert "1 on each of 2 to 2 nodes" in first.output
    assert f"network        eth0 ({two_hosts.address('hosta')} leads to hosta)" in first.output
    assert "on hosta, hostb; all on the CPU" in first.output
    assert "the result is on hosta" in second.output


def _without_nprocs() -> dict[str, str]:
    return {name: value for name, value in BOTH.items() if name != "DISTWRAP_NPROCS"}


def by_torchrun(hosts: Hosts, **env: str) -> list[Ended]:
    """Run the job with an agent a host."""
    with ExitStack() as stack:
        processes = []
        for i, name in enumerate(hosts.names):
            words = [
                "--nnodes=2",
                "--nproc-per-node=1",
                f"--node-rank={i}",
                "--master-addr=hosta",
                "--master-port=29446",
            ]
            command = [PYTHON, "-m", "torch.distributed.run", *words, JOB[1]]
            processes.append(stack.enter_context(started(hosts.command(name, *command), **env)))
        return [ended(process) for process in processes]


@in_nightly
def test_torchrun(two_hosts: Hosts) -> None:
    """Under torchrun with an agent a host the script joins."""
    both = by_torchrun(two_hosts)
    assert [each.code for each in both] == [0, 0], both
    assert [line["interface"] for each in both for line in each.starts()] == ["eth0", "eth0"]
    for each in both:
        assert_like_one_process(each.values()[0])


@in_nightly
def test_a_failure_under_torchrun_crosses_hosts(two_hosts: Hosts) -> None:
    """Without a caller of ours the ranks tell each other: the cause is in both hosts' output."""
    first, second = by_torchrun(two_hosts, JOB_FAILS="raise@1")
    assert first.code != 0
    assert second.code != 0
    for each in (first, second):
        assert "ValueError: rank 1 stumbles in epoch 1" in each.output, each.output
    assert "rank 1 on hostb" in first.output


@in_nightly
def test_an_exception_crosses_hosts(two_hosts: Hosts) -> None:
    """What a rank on one host raises is raised in the callers on both, in its own type, with its traceback."""
    first, second = on_both(two_hosts, *JOB, JOB_FAILS="raise@1", **BOTH)
    for each in (first, second):
        assert each.code == 1
        assert each.output.rstrip().endswith("ValueError: rank 1 stumbles in epoch 1"), each.output
        assert "rank 1 on hostb" in each.output
        assert "in fail_if_asked" in each.output


@in_nightly
def test_a_killed_rank_is_told_on_both_hosts(two_hosts: Hosts) -> None:
    """A rank that is killed on one host ends the run on both, with its name."""
    start = time.monotonic()
    for each in on_both(two_hosts, *JOB, JOB_FAILS="die@1", **BOTH):
        assert "WorkerDiedError: rank 1 on hostb" in each.output, each.output
        assert "killed by SIGKILL" in each.output
    assert time.monotonic() - start < SOON


@in_nightly
def test_a_lost_host_is_told(two_hosts: Hosts) -> None:
    """When a whole host goes, the other knows within seconds, by its name."""
    with running(two_hosts, *JOB, "40", JOB_SLOW="0.5", **BOTH) as (first, second):
        wait_for_line(first, '"epoch": 1')
        two_hosts.kill_all_on("hostb")
        start = time.monotonic()
        left = ended(first)
        second.wait(10)
    assert left.code == 1
    assert "node 1 (hostb) is gone" in left.output, left.output
    assert time.monotonic() - start < LOST_SECONDS  # it was noticed by more than its silence


@in_nightly
def test_a_lost_host_zero_is_told(two_hosts: Hosts) -> None:
    """The same where it is the host that holds the store."""
    with running(two_hosts, *JOB, "40", JOB_SLOW="0.5", **BOTH) as (first, second):
        wait_for_line(second, '"epoch": 1')
        two_hosts.kill_all_on("hosta")
        left = ended(second)
        first.wait(10)
    assert left.code == 1
    assert "node 0 (hosta) is gone" in left.output, left.output


@in_nightly
def test_a_link_that_is_cut_for_a_moment(two_hosts: Hosts) -> None:
    """A run survives five seconds without a network."""
    with running(two_hosts, *JOB, "20", JOB_SLOW="0.1", **BOTH) as (first, second):
        wait_for_line(first, '"epoch": 1')
        two_hosts.set_link("hostb", "down")
        time.sleep(5)
        two_hosts.set_link("hostb", "up")
        both = [ended(first), ended(second)]
    assert [each.code for each in both] == [0, 0], both


@in_nightly
def test_a_link_that_is_cut(two_hosts: Hosts) -> None:
    """Without a network both hosts end, each with the other's name, though nothing tells them; none waits in torch."""
    with running(two_hosts, *JOB, "1000", JOB_SLOW="0.1", JOB_LOST="10", **BOTH) as (first, second):
        wait_for_line(first, '"epoch": 1')
        try:
            two_hosts.set_link("hostb", "down")
            start = time.monotonic()
            both = [ended(first), ended(second)]
            seconds = time.monotonic() - start
        finally:
            two_hosts.set_link("hostb", "up")
    assert [each.code for each in both] == [1, 1]
    assert "node 1 (hostb) is gone" in both[0].output, both[0].output
    assert "node 0 (hosta) is gone" in both[1].output, both[1].output
    assert seconds < 2 * LOST_SECONDS


@in_nightly
def test_a_ctrl_c_on_one_host_ends_both(two_hosts: Hosts) -> None:
    """Who presses Ctrl-C on one host does not leave the other waiting."""
    with running(two_hosts, *JOB, "60", JOB_SLOW="0.5", **BOTH) as (first, second):
        wait_for_line(second, '"epoch": 1')
        os.killpg(first.pid, signal.SIGINT)
        left = ended(second)
        ended(first)
    assert left.code == 1
    assert "KeyboardInterrupt" in left.output


@pytest.fixture(scope="module")
def alone(two_hosts: Hosts) -> dict[str, Ended]:
    """Ends of callers that come alone, each to an endpoint of its own or to none; at once, since most of them wait."""
    cases = {
        "a missing host": ("hosta", {"DISTWRAP_TIMEOUT": "3"}),
        "nobody at the endpoint": ("hostb", {"DISTWRAP_TIMEOUT": "3", "DISTWRAP_RDZV_ENDPOINT": "hosta:29451"}),
        "an unreachable master": ("hostb", {"DISTWRAP_RDZV_ENDPOINT": f"{two_hosts.nobody}:29444"}),
        "an unknown name": ("hostb", {"DISTWRAP_TIMEOUT": "3", "DISTWRAP_RDZV_ENDPOINT": "hostq:29444"}),
        "a zero that is not the endpoint": ("hostb", {"DISTWRAP_NODE_RANK": "0"}),
    }
    with ExitStack() as stack:
        processes = {
            case: stack.enter_context(
                started(two_hosts.command(host, *JOB), **{**BOTH, "DISTWRAP_TIMEOUT": "600", "JOB_REPLY": "2", **env})
            )
            for case, (host, env) in cases.items()
        }
        return {case: ended(process) for case, process in processes.items()}


@in_nightly
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "a missing host",
            ["1 of 2 nodes are here (hosta); missing: node(s) 1", "Start the same command on every node."],
        ),
        (
            "nobody at the endpoint",
            ["the node answers, but no program listens at the port ({hosta} port 29451: refused)"],
        ),
        ("an unreachable master", ["no node answers ({nobody} port 29444: ", "eth0 {hostb}", "NCCL_SOCKET_IFNAME"]),
        ("an unknown name", ["cannot resolve the name 'hostq'"]),
        ("a zero that is not the endpoint", ["node_rank=0 on hostb, but rdzv_endpoint=hosta:29444 is not this node"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_caller_that_comes_alone(two_hosts: Hosts, alone: dict[str, Ended], case: str, words: list[str]) -> None:
    """It ends within the limit, and says who is missing, what does not answer, and what it has tried."""
    addresses = {name: two_hosts.address(name) for name in two_hosts.names}
    assert alone[case].code == 1
    for each in words:
        assert each.format(**addresses, nobody=two_hosts.nobody) in alone[case].output, alone[case].output


@in_nightly
@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("wlan0", "has no interface wlan0 that is up. There are: lo (127.0.0.1 ::1), eth0 (10.77."),
        ("^lo", "NCCL understands '^', but gloo"),
        ("eth1", "node 0 (hosta) to node 1 (hostb) through eth1: 192.168.200.1 to 192.168.201.1"),
    ],
)
def test_a_wrong_interface(two_hosts: Hosts, interface: str, message: str) -> None:
    """An interface that is not there, is NCCL's syntax, or leads nowhere, is an error before gloo waits for it."""
    start = time.monotonic()
    first, _ = on_both(two_hosts, *JOB, GLOO_SOCKET_IFNAME=interface, **{**BOTH, "DISTWRAP_TIMEOUT": "600"})
    assert message in first.output, first.output
    assert time.monotonic() - start < SOON


@in_nightly
def test_two_with_the_same_number(two_hosts: Hosts) -> None:
    """Two machines with one node rank are both named, to the one that came second."""
    each = {name: {"DISTWRAP_NODE_RANK": "1"} for name in two_hosts.names}
    env = {**BOTH, "DISTWRAP_NNODES": "3"}
    zero = two_hosts.command("hosta", *JOB)
    with started(zero, **{**env, "DISTWRAP_NODE_RANK": "0"}), running(two_hosts, *JOB, each=each, **env) as callers:
        came_second = wait_until(lambda: [each for each in callers if each.poll() is not None], SOON, longest_pause=0.1)
        assert came_second
        refused = ended(came_second[0])
    assert "there are two nodes with node_rank=1: host" in refused.output, refused.output


@in_nightly
def test_another_version_on_one_host(two_hosts: Hosts, tmp_path: Path) -> None:
    """Two versions of distwrap do not run together; both are quoted."""
    package = Path(distwrap.__file__).parent
    shutil.copytree(package, tmp_path / "distwrap", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "distwrap" / "_version.py").write_text('__version__ = "0.0.1"\n')
    other = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{package.parent}"}
    first, second = on_both(two_hosts, *JOB, each={"hostb": other}, **BOTH)
    assert "node 1 on hostb runs distwrap 0.0.1" in first.output, first.output
    assert "node 1 on hostb runs distwrap 0.0.1" in second.output, second.output
    assert f"node 0 on hosta runs distwrap {distwrap.__version__}" in second.output
