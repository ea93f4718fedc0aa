"""``launcher="external"``: ranks that an outer launcher must have started already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from distwrap.errors import LaunchError
from distwrap.launch.assignment import Assignment
from distwrap.launch.base import Job, Launcher
from distwrap.launch.outcome import Outcome


class ExternalLauncher(Launcher):
    """None at all: where this is asked whether a launch can begin, no outer launcher has started this process."""

    name = "external"
    several_nodes = True
    runs_one_rank = True

    def check(self, job: Job) -> NoReturn:
        raise LaunchError(
            "launcher='external' waits for an outer launcher, and none has started this process. Start the script "
            "with `torchrun --nproc-per-node=2 train.py`, or choose launcher='auto'."
        )

    def run(self, job: Job, plan: Assignment) -> Sequence[Outcome]:
        self.check(job)
