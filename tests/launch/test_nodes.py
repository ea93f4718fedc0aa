"""Callers that meet: two on one machine stand in for two machines; tests/clusters/ has hosts of their own."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from distwrap import NodeSummary
from tests.clusters import job
from tests.clusters.running import ROOT, Ended, assert_like_one_process, ended, started
from tests.forked_commands import PYTHON
from tests.ports import free_port

JOB = [PYTHON, job.__file__]
PROGRAM = [PYTHON, "-m", "tests.launch.machines_program"]
PROGRAMS = "several callers, each with ranks"


def two_callers(command: list[str], *each: dict[str, str], **env: str) -> list[Ended]:
    """Run a command twice at once, as two machines would."""
    endpoint = f"127.0.0.1:{free_port()}"
    common = {"DISTWRAP_NNODES": "2", "DISTWRAP_RDZV_ENDPOINT": endpoint, "DISTWRAP_TIMEOUT": "60", **env}
    with ExitStack() as stack:
        running = [stack.enter_context(started(command, **{**common, **more})) for more in each or ({}, {})]
        return [ended(process) for process in running]


@pytest.mark.slow(PROGRAMS)
def test_one_world() -> None:
    """Two callers make one world, though each starts its ranks in another way; the value is on node 0."""
    ways = ({"DISTWRAP_LAUNCHER": launcher} for launcher in ("forkserver", "spawn"))
    both = two_callers(JOB, *ways, DISTWRAP_NPROCS="1")
    assert [each.code for each in both] == [0, 0], "\n".join(each.output for each in both)
    values = sorted((value for each in both for value in each.values()), key=lambda value: isinstance(value, str))
    assert_like_one_process(values[0])
    assert values[1].startswith("node 1: rank 1 of 2 done in ")


@pytest.mark.slow(PROGRAMS)
def test_what_comes_home(tmp_path: Path) -> None:
    """returns="all" has every machine's values, trained weights are on both, each has the logs of its own ranks."""
    each: list[dict[str, str]] = [
        {"DISTWRAP_NODE_RANK": str(i), "DISTWRAP_LOG_DIR": str(tmp_path / str(i))} for i in range(2)
    ]
    first, second = two_callers_with_folders(tmp_path, each)
    assert first.code == second.code == 0, first.output + second.output
    told, other = ({name: value for line in each.told for name, value in line.items()} for each in (first, second))
    assert told["all"] == [[10 * rank, [float(rank)] * 2] for rank in range(4)]
    assert other["all"].startswith("node 1: ranks 2, 3 of 4")
    assert told["weights"] == other["weights"]
    assert float(told["formatted"]) >= 0
    assert other["formatted"].startswith("node 1")
    assert told["logs"] == [f"rank_{rank}.{kind}.log" for rank in (0, 1) for kind in ("stderr", "stdout")]
    assert set(other["logs"]) >= {f"rank_{rank}.stdout.log" for rank in (2, 3)}
    assert "printed by rank 3" in (tmp_path / "1" / "rank_3.stdout.log").read_text()


def two_callers_with_folders(folder: Path, each: list[dict[str, str]]) -> list[Ended]:
    endpoint = f"127.0.0.1:{free_port()}"
    common = {"DISTWRAP_NNODES": "2", "DISTWRAP_RDZV_ENDPOINT": endpoint, "DISTWRAP_TIMEOUT": "20"}
    with ExitStack() as stack:
        running = [
            stack.enter_context(started([*PROGRAM, str(folder / str(i))], **{**common, **more}))
            for i, more in enumerate(each)
        ]
        return [ended(process) for process in running]


@pytest.mark.slow(PROGRAMS)
def test_helpers_alone_on_machines() -> None:
    """setup_process_group() is the rank of a machine that is to have one, and refuses to be one of several."""
    script = [PYTHON, str(Path(ROOT, "examples", "helpers_only.py")), "--epochs", "1"]
    recipe = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with ExitStack() as stack:
        running = [stack.enter_context(started(script, **recipe, NODE_RANK=str(i))) for i in range(2)]
        first, second = (ended(process) for process in running)
    assert first.code == second.code == 0, first.output + second.output
    assert "on 2 rank(s)" in first.output
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "4", "MASTER_ADDR": "127.0.0.1"}
    with started(script, **pod) as process:
        alone = ended(process)
    assert "kubeflow has started this process for a whole node (2 nodes, 4 rank(s) on each)" in alone.output
    assert "Decorate the function with @distributed" in alone.output


@pytest.mark.slow(PROGRAMS)
def test_a_third_is_one_too_many() -> None:
    """A machine more than there should be is told so."""
    three = two_callers(JOB, {}, {}, {}, DISTWRAP_NPROCS="1", JOB_SLOW="1")
    assert sorted(each.code for each in three) == [0, 0, 1]
    outcast = next(each for each in three if each.code)
    assert "is one node too many: all 2 nodes are here already" in outcast.output, outcast.output


def test_a_summary_takes_any_format() -> None:
    """The one script that all machines run may format the value as a number."""
    summary = NodeSummary(1, (2, 3), 4, "hosta", 1.25)
    assert f"{summary:.3f}" == str(summary) == "node 1: ranks 2, 3 of 4 done in 1.2 s; the result is on hosta"


@pytest.mark.slow(PROGRAMS)
def test_a_port_that_somebody_else_has() -> None:
    """Of a port that neither caller can listen at, both say who cannot and why, and not just that nobody answers."""
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", free_port()))
        env = {
            "DISTWRAP_NNODES": "2",
            "DISTWRAP_RDZV_ENDPOINT": f"127.0.0.1:{somebody.getsockname()[1]}",
            "DISTWRAP_TIMEOUT": "2",
            "DISTWRAP_NPROCS": "1",
        }
        with started(JOB, **env) as process:
            told = ended(process).output
    assert "cannot listen at port" in told
    assert "Choose another port. No caller of this run has it either" in told
