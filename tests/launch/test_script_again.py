"""launcher="script": the other ranks run the same script with the same arguments, from the same folder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.interpreters import run_python
from tests.slow import nightly

LIMIT = 60.0

MOVES = """
import argparse, json, os, sys
import distwrap as dw

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("words", nargs="*")
arguments = parser.parse_args()
sys.argv = ["changed"]
os.chdir("runs")

@dw.distributed(nprocs=2, launcher="script", returns="all")
def main():
    return os.getcwd(), arguments.lr, arguments.words

if __name__ == "__main__":
    print(json.dumps(main()))
"""

HYDRA = """
import json, os
import hydra
from omegaconf import DictConfig
import distwrap as dw

@dw.distributed(nprocs=2, launcher="script", returns="all")
def train(lr):
    from hydra.core.hydra_config import HydraConfig
    return os.getcwd(), lr, HydraConfig.get().runtime.output_dir

@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    result = train(config.lr)
    if dw.is_rank_zero():
        with open(os.environ["RESULT"], "w") as file:
            json.dump(result, file)

if __name__ == "__main__":
    main()
"""


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_python(*arguments, cwd=folder, env={**os.environ, **env}, timeout=LIMIT)


@pytest.mark.parametrize("how", [["./moves.py"], ["-m", "moves"]], ids=str)
@pytest.mark.slow("programs under launcher='script'")
def test_argparse_and_another_folder(how: list[str], tmp_path: Path) -> None:
    """A script that parses arguments, changes sys.argv and goes to another folder does so in each rank anew."""
    (tmp_path / "moves.py").write_text(MOVES)
    (tmp_path / "runs").mkdir()
    done = run(tmp_path, *how, "--lr", "0.5", "two words", "ä")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[str(tmp_path / "runs"), 0.5, ["two words", "ä"]]] * 2


@pytest.mark.slow("a program under Hydra")
@pytest.mark.parametrize(
    "chdir", ["true", nightly("false", row="products", why="[true], and test_argparse_and_another_folder")]
)
def test_hydra(chdir: str, tmp_path: Path) -> None:
    """Under Hydra all ranks share rank 0's run folder, and none makes another one."""
    (tmp_path / "train.py").write_text(HYDRA)
    result = tmp_path / "result.json"
    done = run(tmp_path, "train.py", "+lr=0.5", f"hydra.job.chdir={chdir}", RESULT=str(result))
    assert done.returncode == 0, done.stderr
    (first, second) = json.loads(result.read_text())
    assert first == second
    assert first[1] == 0.5
    assert (first[0] == first[2]) == (chdir == "true")
    made = list(tmp_path.glob("outputs/*/*"))
    assert made == [Path(first[2])]
    assert sorted(path.name for path in made[0].iterdir()) == [".hydra", "train.log", "train_rank_1.log"]


@pytest.mark.slow("programs under Hydra")
def test_hydra_multirun(tmp_path: Path) -> None:
    """A multirun is refused, with the launcher that can do it; with that one it works."""
    (tmp_path / "train.py").write_text(HYDRA)
    result = str(tmp_path / "result.json")
    done = run(tmp_path, "train.py", "--multirun", "+lr=0.5,0.25", RESULT=result)
    assert done.returncode == 1
    assert "Use launcher='forkserver'" in done.stderr
    done = run(tmp_path, "train.py", "--multirun", "+lr=0.5,0.25", RESULT=result, DISTWRAP_LAUNCHER="forkserver")
    assert "HydraConfig was not set" in done.stderr or done.returncode == 0, done.stderr
