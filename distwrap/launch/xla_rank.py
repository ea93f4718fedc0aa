"""A rank that torch_xla has started, for a call under ``launcher="xla"``; it runs in a thread of its process."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from distwrap.environments import distwrap_environment
from distwrap.launch import worker
from distwrap.launch.outcome import Outcome, write_whole
from distwrap.launch.task import Assignment


def be_a_rank(_: int, plan: bytes, folder: str) -> None:
    """Be a rank; torch_xla calls this in each of its processes, with the pickled plan."""
    code = worker.work(_XlaLink(pickle.loads(plan), Path(folder)))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # torch_xla ends the others then


class _XlaLink:
    """The link of a rank that torch_xla has started: its outcome is a file in a folder of the launch."""

    def __init__(self, plan: Assignment, folder: Path) -> None:
        self._plan, self._folder = plan, folder

    def tie(self) -> None:
        worker.tie_to_parent()

    def assignment(self) -> Assignment:
        from torch_xla import runtime

        rank, size, around = int(runtime.global_ordinal()), int(runtime.world_size()), self._plan.surroundings
        if around is not None:  # torch_xla tells its processes by variables which devices are theirs
            around = replace(around, environ={**around.environ, **os.environ})
        return replace(self._plan, placement=distwrap_environment.on_one_node(rank, size), surroundings=around)

    def report(self, outcome: Outcome) -> None:
        write_whole(self._folder / f"rank-{outcome.rank:06}", pickle.dumps(outcome))
