"""Objects of the user's own classes between nodes: only where ranks have a secret, and where from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.clusters.namespaces import Hosts
from tests.clusters.running import PYTHON, Ended, environment
from tests.clusters.slurm import Slurm
from tests.clusters.test_hosts import BOTH, on_both

pytestmark = pytest.mark.slow("runs over nodes")
in_nightly = pytest.mark.nightly(row="slurm", why="network/test_secret.py, on one host")

PROGRAM = """
import os
import distwrap
from distwrap import distributed, gather_object, rank

class Own:
    def __init__(self):
        self.rank = rank()

@distributed(timeout=60)
def main():
    assert gather_object({"rank": rank()}) == [{"rank": 0}, {"rank": 1}]
    found = [each.rank for each in gather_object(Own())]
    os.write(1, f"FOUND {found}\\n".encode())

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A user's script that gathers objects of its own."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """A file of a secret."""
    path = tmp_path / "secret"
    path.write_text(os.urandom(16).hex())
    path.chmod(0o600)
    return str(path)


def srun(slurm: Slurm, program: str, **env: str) -> Ended:
    done = slurm.run("srun", "-N2", "-n2", "--ntasks-per-node=1", PYTHON, program, **environment(**env))
    return Ended.of(done.returncode, done.stdout + done.stderr)


@in_nightly
def test_munge_carries_it_under_slurm(slurm: Slurm, program: str, tmp_path: Path) -> None:
    """Where munge's commands reach its daemon, nothing is to be configured; where they do not, the error says what."""
    for name in ("munge", "unmunge"):
        wrapper = tmp_path / name
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={slurm.folder}/munge/socket "$@"\n')
        wrapper.chmod(0o755)
    done = srun(slurm, program, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.output.count("FOUND [0, 1]") == 2, done.output
    done = srun(slurm, program)
    assert "its Own cannot be sent to the other ranks" in done.output, done.output
    assert "Set DISTWRAP_SECRET_FILE for all of them" in done.output


@in_nightly
@pytest.mark.parametrize("given", ["a file", "trust"])
def test_the_user_gives_one(slurm: Slurm, program: str, secret: str, given: str) -> None:
    """A file that all ranks have lets them through, and so does the word that the network is trusted."""
    done = srun(
        slurm, program, **({"DISTWRAP_SECRET_FILE": secret} if given == "a file" else {"DISTWRAP_TRUST_NETWORK": "1"})
    )
    assert done.output.count("FOUND [0, 1]") == 2, done.output


@in_nightly
def test_over_two_hosts(two_hosts: Hosts, program: str, secret: str) -> None:
    """The same where a caller on each host starts the ranks; a host without the file is told of."""
    first, second = on_both(two_hosts, PYTHON, program, **BOTH, DISTWRAP_SECRET_FILE=secret)
    assert (first.output + second.output).count("FOUND [0, 1]") == 2, first.output + second.output
    for each in on_both(two_hosts, PYTHON, program, **BOTH):
        assert "its Own cannot be sent to the other ranks" in each.output, each.output
    for each in on_both(two_hosts, PYTHON, program, each={"hosta": {"DISTWRAP_SECRET_FILE": secret}}, **BOTH):
        words = "must name the same secret on all ranks: rank 1 on hostb has none, and rank 0 has one"
        assert words in each.output, each.output
