"""A rank that torch_xla has started, for a call under ``launcher="xla"``; it runs in a thread of its process."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace

from distwrap.environments import distwrap_environment
from distwrap.launch import worker
from distwrap.launch.outcome import OutcomeFolder
from distwrap.launch.task import Assignment


def rank_main(_: int, plan: bytes, folder: str) -> None:
    """Be a rank; torch_xla calls this in each of its processes, with the pickled plan."""
    code = worker.work(worker.FolderLink(OutcomeFolder(folder), lambda: _assignment(pickle.loads(plan))))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # torch_xla ends the others then


def _assignment(plan: Assignment) -> Assignment:
    from torch_xla import runtime

    rank, size, around = int(runtime.global_ordinal()), int(runtime.world_size()), plan.context
    if around is not None:  # torch_xla tells its processes by variables which devices are theirs
        around = replace(around, environ={**around.environ, **os.environ})
    return replace(plan, placement=distwrap_environment.on_one_node(rank, size), context=around)
