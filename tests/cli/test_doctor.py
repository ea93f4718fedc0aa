"""The doctor: what it says, its exit code, JSON, the plot; with real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distwrap.cli import main
from distwrap.cli.doctor_report import disagreements
from distwrap.cli.facts import Facts, look
from distwrap.cli.measure import AllReduceTime
from tests.clusters.running import run
from tests.forked_commands import PYTHON, forked_commands

DOCTOR = [PYTHON, "-m", "distwrap", "doctor"]


def test_it_says_what_would_be_decided_and_tests_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Every heading is there, two ranks exchange, and the exit code is 0."""
    assert main(["doctor", "--nprocs", "2"]) == 0
    said = capsys.readouterr().out
    for heading in ("Who started this process: no launcher", "What @distributed does here", "Real test: 2 rank(s)"):
        assert heading in said
    for what in ("ranks", "launcher", "threads", "device", "backend", "network", "shared memory", "open files"):
        assert f"\n  {what} " in said
    assert "slurm      no SLURM_JOB_ID" in said
    assert "64 MiB" in said
    assert "all on the CPU" in said
    assert said.endswith("No problems found.\n")


@pytest.mark.slow("measures and draws")
def test_the_plot(tmp_path: Path) -> None:
    """--plot draws a picture, from a shell of its own."""
    picture = tmp_path / "out.png"
    done = run([*DOCTOR, "--nprocs", "2", "--plot", str(picture)])
    assert done.code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow("others of its kind are in make test")
def test_json_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """One object, with every rank's facts and the sizes measured."""
    assert main(["doctor", "--nprocs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert [each["size"] for each in found["all_reduce"]][:2] == [1024, 4096]
    assert all(each["seconds"] > 0 for each in found["all_reduce"])


def test_looking_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """--no-test starts nothing."""
    assert main(["doctor", "--no-test"]) == 0
    assert "Real test" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OMPI_COMM_WORLD_RANK", "0", "half set for open_mpi"),
        ("DISTWRAP_NPROC", "2", "Did you mean 'DISTWRAP_NPROCS'?"),
        ("DISTWRAP_NNODES", "2", "nnodes=2 needs rdzv_endpoint"),
        ("GLOO_SOCKET_IFNAME", "wlan7", "has no interface wlan7"),
    ],
)
def test_a_problem_is_exit_code_1(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot work is said in the words of the error, and nothing is started."""
    monkeypatch.setenv(variable, value)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert message in said
    assert "Problem: " in said
    assert "Real test" not in said


def test_a_failed_test_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that is not there is found by the test, and told."""
    monkeypatch.setenv("DISTWRAP_BACKEND", "mpi")
    assert main(["doctor", "--nprocs", "2"]) == 1
    assert "Problem: the real test failed: " in capsys.readouterr().out


def test_without_a_command_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m distwrap` alone says which commands there are, and what each does."""
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "doctor" in said
    assert "remove prefixes" in said


def test_bad_arguments_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own words, and its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--nproc", "two"])
    assert caught.value.code == 2
    assert "invalid int value: 'two'" in capsys.readouterr().err


@pytest.mark.slow("under torchrun")
def test_under_torchrun_it_speaks_for_the_whole_job() -> None:
    """Every rank runs it, and one report comes out, with the ranks that torchrun started."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([PYTHON, *torchrun, "-m", *DOCTOR[2:]], **forked_commands())
    assert done.code == 0, done.output
    assert done.output.count("Who started this process: torchrun") == 1
    assert "2 on 1 node(s), started by torchrun; this is rank 0" in done.output
    assert "Real test: 2 rank(s)" in done.output


def test_machines_that_disagree_are_named() -> None:
    """Another version, another variable, another backend: by the host's name and both values."""
    first = Facts("n1", versions={"torch": "2.13"}, variables={"NCCL_DEBUG": "INFO"}, decided={"backend": "nccl"})
    other = Facts("n2", rank=4, versions={"torch": "2.12"}, variables={}, decided={"backend": "gloo"})
    assert disagreements([first, first, other, other]) == [
        "n2 has torch 2.12, and n1, where rank 0 is, 2.13",
        "n2 has NCCL_DEBUG not set, and n1, where rank 0 is, INFO",
        "n2 uses gloo, and n1, where rank 0 is, nccl",
    ]


def test_what_differs_between_ranks_by_design_is_no_disagreement() -> None:
    """Each rank may see another device, and each machine may call its interface otherwise."""
    ranks = [Facts("n", variables={"CUDA_VISIBLE_DEVICES": str(i), "GLOO_SOCKET_IFNAME": f"e{i}"}) for i in range(2)]
    assert disagreements(ranks) == []


def test_the_bandwidth_of_a_link() -> None:
    """Two ranks send what they have once, many nearly twice, as nccl-tests counts it."""
    assert AllReduceTime(1000, 1.0).bus_bandwidth(2) == 1000
    assert AllReduceTime(1000, 1.0).bus_bandwidth(4) == 1500


def test_looking_changes_nothing() -> None:
    """The facts are read off: no environment, no module of an optional extra."""
    before = set(sys.modules)
    look()
    assert not {"matplotlib", "psutil"} & (set(sys.modules) - before)


@pytest.mark.parametrize("count", ["0", "-3"])
def test_a_wrong_number_of_ranks(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused at once, with the exit code of a wrong argument."""
    assert main(["doctor", "--no-test", "--nprocs", count]) == 2
    assert f"--nprocs={count}: it must be a whole number of at least 1" in capsys.readouterr().err
