"""The same script under real Slurm."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.clusters.running import JOB, Ended, assert_like_one_process, environment, is_like_one_process
from tests.clusters.slurm import Slurm
from tests.limits import SOON

pytestmark = pytest.mark.slow("runs jobs under a Slurm of its own")
in_nightly = pytest.mark.nightly(row="slurm", why="test_uneven_tasks")


def srun(slurm: Slurm, *words: str, **env: str) -> Ended:
    done = slurm.run("srun", *words, seconds=120, **environment(**env))
    return Ended.of(done.returncode, done.stdout + done.stderr)


def submit(slurm: Slurm, folder: Path, lines: str, *options: str) -> str:
    """Submit a job script; return the job's number."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    done = slurm.run("sbatch", "--parsable", "-o", str(folder / "out"), "--open-mode=append", *options, str(script))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def finished(slurm: Slurm, job: str, folder: Path, seconds: float = 150) -> Ended:
    """Wait until a job is done for good, and read what it wrote."""
    deadline = time.monotonic() + seconds
    while (state := _state(slurm, job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "PREEMPTED", "REQUEUED"):
        assert time.monotonic() < deadline, slurm.run("scontrol", "show", "job", job).stdout
        time.sleep(0.2)
    output = (folder / "out").read_text()
    return Ended.of(0 if state == "COMPLETED" else 1, f"{output}{state}: {slurm.run('squeue').stdout}")


def _state(slurm: Slurm, job: str) -> str:
    shown = slurm.run("scontrol", "show", "job", job).stdout
    return shown.partition("JobState=")[2].partition(" ")[0]


SEEN = """
import os, distwrap as dw
from accelerate import Accelerator

@dw.distributed(timeout=60)
def main():
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    return dw.gather_object((Accelerator(cpu=True).num_processes, [*map(os.environ.get, names[:4])]))

if __name__ == "__main__":
    print(main(), "MASTER_ADDR" in os.environ)
"""


def test_another_library_sees_the_world_of_srun(slurm: Slurm, tmp_path: Path) -> None:
    """Accelerate, which reads torchrun's variables, finds the ranks; without srun a line says that it was forgotten."""
    script = tmp_path / "seen.py"
    script.write_text(SEEN)
    done = srun(slurm, "-n2", sys.executable, str(script))
    assert done.code == 0, done.output
    both = [(2, ["0", "0", "2", "2"]), (2, ["1", "1", "2", "2"])]
    assert done.output.count(f"{both} False") == 2, done.output
    alone = slurm.run("salloc", "-n2", sys.executable, str(script), **environment(DISTWRAP_QUIET="0"))
    assert "[(1, [None, None, None, None])] False" in alone.stdout
    assert "which asked for 2 tasks: srun starts one for each" in alone.stderr


@in_nightly
def test_two_nodes_and_four_tasks(slurm: Slurm, tmp_path: Path) -> None:
    """`srun -N2 -n4` makes one world: ranks know their nodes, weights are as of one process, one report comes."""
    path = tmp_path / "new" / "times.json"
    done = srun(slurm, "-N2", "-n4", *JOB, DISTWRAP_QUIET="0", DISTWRAP_REPORT=str(path))
    assert done.code == 0, done.output
    places = [line["place"] for line in done.starts()]
    assert [place["rank"] for place in places] == [0, 1, 2, 3]
    assert [place["node_rank"] for place in places] in ([0, 0, 1, 1], [0, 0, 0, 1])
    assert {place["source"] for place in places} == {"slurm"}
    assert {place["nnodes"] for place in places} == {2}
    assert len(done.values()) == 4  # the script goes on on every rank, as under any outer launcher
    for value in done.values():
        assert_like_one_process(value)
    assert done.output.count("distwrap report:") == 1
    assert [rank["rank"] for rank in json.loads(path.read_text())["ranks"]] == [0, 1, 2, 3]


def test_uneven_tasks(slurm: Slurm) -> None:
    """Three tasks on two nodes: two here and one there."""
    done = srun(slurm, "-N2", "-n3", *JOB, "1")
    assert done.code == 0, done.output
    places = [line["place"] for line in done.starts()]
    assert [(place["local_rank"], place["local_world_size"], place["node_rank"]) for place in places] == [
        (0, 2, 0),
        (1, 2, 0),
        (0, 1, 1),
    ]
    assert_like_one_process(done.values()[0], 1)


@in_nightly
def test_a_batch_script_without_a_step(slurm: Slurm, tmp_path: Path) -> None:
    """In sbatch's own shell nobody has started tasks: the ranks are launched here, and do not wait for others."""
    job = submit(slurm, tmp_path, f"DISTWRAP_NPROCS=2 {' '.join(JOB)}", "-N2", "-n4")
    done = finished(slurm, job, tmp_path)
    assert done.code == 0, done.output
    places = [line["place"] for line in done.starts()]
    assert [(place["world_size"], place["source"]) for place in places] == [(2, "distwrap")] * 2
    assert_like_one_process(done.values()[0])


@in_nightly
def test_the_doctor_speaks_for_the_whole_step(slurm: Slurm) -> None:
    """Every task runs it, and one report comes out, with both nodes' ranks."""
    done = srun(slurm, "-N2", "-n2", "--ntasks-per-node=1", JOB[0], "-m", "distwrap", "doctor")
    assert done.code == 0, done.output
    assert done.output.count("Who started this process: slurm") == 1
    assert "2 on 2 node(s), started by slurm; this is rank 0" in done.output
    assert "Real test: 2 rank(s)" in done.output
    assert "No problems found." in done.output


@in_nightly
def test_a_batch_script_with_two_steps_at_once(slurm: Slurm, tmp_path: Path) -> None:
    """sbatch with srun inside is the same as srun, and two steps of one job on the same nodes are two worlds."""
    step = f"srun --overlap -N2 -n2 --ntasks-per-node=1 {' '.join(JOB)}"
    lines = f"{step} 1 & first=$!; {step} 2; second=$?; wait $first && exit $second"
    done = finished(slurm, submit(slurm, tmp_path, lines, "-N2", "-n2"), tmp_path)
    assert done.code == 0, done.output
    worlds: dict[str, list[int]] = {}
    for line in done.starts():
        worlds.setdefault(line["place"]["job"], []).append(line["place"]["node_rank"])
    assert list(worlds.values()) == [[0, 1], [0, 1]]
    one_epoch, two_epochs = ([value for value in done.values() if is_like_one_process(value, n)] for n in (1, 2))
    assert [len(one_epoch), len(two_epochs)] == [2, 2], done.values()


@in_nightly
def test_a_rank_that_dies_ends_the_step(slurm: Slurm) -> None:
    """A failure on one node reaches the others, with the first cause, though srun itself would wait."""
    start = time.monotonic()
    done = srun(slurm, "-N2", "-n2", "--ntasks-per-node=1", *JOB, JOB_FAILS="raise@1")
    assert done.code != 0
    assert "ValueError: rank 1 stumbles in epoch 1" in done.output
    assert "rank 0 ends, because rank 1 on" in done.output or "rank 1 on" in done.output
    assert time.monotonic() - start < SOON


@in_nightly
def test_a_requeued_job_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """A job that a job of a higher priority pushes out is queued again, and goes on from its checkpoint."""
    last = tmp_path / "last.pt"
    # A script that ended by itself before it is pushed out would count as failed, and not be queued again.
    lines = f"""[ -n "$SLURM_RESTART_COUNT" ] || export JOB_SLOW=0.5
srun {" ".join(JOB)} 24 {last} || sleep 60"""
    job = submit(slurm, tmp_path, lines, "-N2", "-n2", "--ntasks-per-node=1", "-p", "low", "--exclusive", "--requeue")
    _wait_for((tmp_path / "out"), '"epoch": 2', 60)
    # As at the beginning of a partition's grace time, whose end the controller would look for every half a minute only.
    ended = slurm.run("scancel", "--signal=TERM", f"{job}.0")
    assert ended.returncode == 0, ended.stderr
    _wait_for((tmp_path / "out"), "srun: error: ", 60)
    urgent = slurm.run("srun", "-p", "high", "-N3", "-n3", "--exclusive", "true", seconds=100)
    assert urgent.returncode == 0, urgent.stderr
    done = finished(slurm, job, tmp_path)
    assert done.code == 0, done.output
    firsts = [line["first"] for line in done.told if "start" in line]
    assert firsts[:2] == [0, 0]
    assert firsts[2:]
    assert min(firsts[2:]) >= 2
    assert_like_one_process(done.values()[-1], 24)


def _wait_for(file: Path, text: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, file.read_text() if file.exists() else "no output"
        time.sleep(0.1)
