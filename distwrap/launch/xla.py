"""``launcher="xla"``: ranks that torch_xla starts, one for each of its devices, for ``strategy="xla"``.

Source: https://docs.pytorch.org/xla/master/learn/api-guide.html, torch_xla.launch
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Literal

from distwrap import locked_folder
from distwrap.data import workers
from distwrap.errors import LaunchError, OptionError
from distwrap.launch.base import Job, Launcher
from distwrap.launch.outcome import Outcome, OutcomeFolder, raise_if_failed
from distwrap.launch.store_file import place
from distwrap.launch.task import Assignment
from distwrap.launch.xla_rank import rank_main

_KIND = "xla"  # of our temporary folders


class XlaLauncher(Launcher):
    """Processes of torch_xla, which are as many as it has devices here, and whose outcomes come home in files."""

    name = "xla"
    runs_one_rank = True

    def count(self, nprocs: int | Literal["auto"]) -> int:
        if nprocs not in ("auto", 1):
            raise OptionError(
                f"nprocs={nprocs}: torch_xla starts a rank for each of its devices: leave nprocs at 'auto', and say "
                f"which devices it sees by TPU_VISIBLE_CHIPS."
            )
        return 1  # at least; how many there are nobody may ask before they are started

    def check(self, job: Job) -> None:
        from distwrap.strategies.xla import XLAStrategy

        if not isinstance(job.task.options.strategy, XLAStrategy):
            raise LaunchError("launcher='xla' is for strategy='xla', on torch_xla's devices.")

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        import torch_xla

        locked_folder.remove_abandoned(_KIND)
        folder = locked_folder.make(_KIND)
        failure: Exception | None = None
        try:
            with place() as store:
                try:
                    torch_xla.launch(rank_main, args=(pickle.dumps(replace(plan, store=store)), str(folder)))
                except Exception as error:  # noqa: BLE001 - as of a process that is gone; a rank has told more
                    failure = error
            outcomes = [outcome for outcome, _ in OutcomeFolder(folder).read()]
        finally:
            locked_folder.remove(folder)
            workers.remove_what_is_left()
        raise_if_failed(outcomes)
        if failure is not None or not outcomes:
            raise LaunchError(f"launcher='xla': torch_xla.launch() has failed: {failure!r}.") from failure
        return outcomes
