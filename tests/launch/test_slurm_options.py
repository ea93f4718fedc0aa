"""launcher="slurm": what is refused before a job, and a controller of Slurm that does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distwrap import distributed
from distwrap.errors import LaunchError, OptionError
from distwrap.launch.slurm import SlurmLauncher
from distwrap.launch.slurm_job import State, has_ended, state_of


@pytest.mark.parametrize(
    ("options", "nprocs", "words"),
    [
        ({}, "auto", "gpus="),
        ({"nodes": 2}, 3, "3 ranks cannot be spread evenly over 2 nodes"),
        ({"nodes": 0}, 1, "at least 1"),
        ({"gpus": -1}, 1, "whole number from 0"),
        ({"wait": -1}, 1, "positive number of seconds"),
        ({"parameters": {"cpus-per-task": 8}}, 1, "cpus_per_task cannot be given there"),
        ({"parameters": {"array": "0-3"}}, 1, "array cannot be given there"),
    ],
)
def test_what_cannot_be_is_refused_before_a_job(options: dict[str, Any], nprocs: Any, words: str) -> None:
    """Options are checked in the caller."""
    with pytest.raises(OptionError, match=words):
        SlurmLauncher(**options).count(nprocs)


def test_one_rank_for_each_gpu() -> None:
    """As everywhere, ``nprocs="auto"`` is the number of devices."""
    assert SlurmLauncher(nodes=2, gpus=4).count("auto") == 8


def scripts(folder: Path, monkeypatch: pytest.MonkeyPatch, **lines: str) -> None:
    """Put programs of these names first on the PATH, and nothing of Slurm's after them."""
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is written."""
    scripts(tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match="there is no sbatch here"):
        distributed(nprocs=2, launcher="slurm")(print)()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out is said."""
    scripts(tmp_path, monkeypatch, sbatch="exit 1")
    with pytest.raises(LaunchError, match=r"cannot be written .* say launcher='slurm\(folder=...\)'"):
        distributed(nprocs=2, launcher=SlurmLauncher(folder=str(tmp_path / "not there")))(print)()


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("exit 1", None),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", None),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", State("gone")),
        ("echo JobId=1 JobState=PREEMPTED Reason=None ExitCode=0:0", State("PREEMPTED", "None", "0:0")),
        ("echo JobId=1 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15", State("TIMEOUT", "TimeLimit", "0:15")),
    ],
)
def test_what_is_unknown_has_not_ended(
    line: str, state: State | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is away for a moment is no end, and no start."""
    scripts(tmp_path, monkeypatch, scontrol=line)
    assert state_of("1") == state
    assert has_ended(state) == (state is not None)
