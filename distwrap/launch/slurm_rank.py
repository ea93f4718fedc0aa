"""A rank that is a task of a Slurm job, for a call under ``launcher="slurm"``: its outcome is a file."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from distwrap.environments import Placement, detect
from distwrap.launch import worker
from distwrap.launch.logs import copied
from distwrap.launch.outcome import OutcomeFolder
from distwrap.launch.task import Assignment
from distwrap.wording import print_notice

BEAT = "caller"  # the name of a file that changes while the caller is there

_LOOK_SECONDS = 5.0


def rank_main(plan: Assignment, folder: str, orphan_seconds: float, log_dir: str | None) -> None:
    """Be the rank that this task of the job is."""
    # submitit's handlers would ignore an end, and before the time limit requeue the job, or raise an error of its own.
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    rank, place = int(os.environ["SLURM_PROCID"]), Path(folder)
    if rank == 0:
        watched = (place, orphan_seconds)
        threading.Thread(target=_end_without_caller, args=watched, name="distwrap-caller", daemon=True).start()
    with copied(log_dir, rank):
        # Slurm ends the processes of a job with it.
        code = worker.work(worker.FolderLink(OutcomeFolder(place), lambda: _assignment(plan), is_child=False))
    worker.leave(code)


def _assignment(plan: Assignment) -> Assignment:
    context = plan.context
    assert context is not None
    # Slurm has brought the caller's variables along, beside those of the task.
    return replace(plan, placement=_placement(), context=replace(context, environ=dict(os.environ)))


def _placement() -> Placement:
    if os.environ["SLURM_NTASKS"] == "1":  # otherwise no sign of an outer launcher
        job = f"slurm {os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        return Placement(master_addr="127.0.0.1", source="slurm", job=job)
    placement = detect(os.environ)
    assert isinstance(placement, Placement)
    return placement


def _end_without_caller(folder: Path, seconds: float) -> None:
    """End this rank, and with it the others, when the caller's file has not changed for so long."""
    last, changed = "", time.monotonic()
    while True:
        time.sleep(min(_LOOK_SECONDS, seconds / 2))
        try:
            beat = (folder / BEAT).read_text()
        except OSError:
            beat = last
        if beat != last:
            last, changed = beat, time.monotonic()
        if time.monotonic() > changed + seconds:
            print_notice(
                f"the process that submitted this job has not been heard of for {seconds:g} s, so the job ends"
            )
            sys.stdout.flush()
            sys.stderr.flush()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
