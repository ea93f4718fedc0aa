"""Ranks that torch elastic's agent starts, for a call under ``launcher="elastic"``: outcomes come home in files."""

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path

from distwrap.environments import Placement, detect
from distwrap.group.world import say
from distwrap.launch import worker
from distwrap.launch.logs import copied
from distwrap.launch.outcome import OutcomeFolder, first_cause
from distwrap.launch.task import Assignment, Task
from distwrap.supervision import shared_status

_AGENTS = ("TORCHELASTIC_", "TORCH_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")  # its variables


def rank_main(plan: Assignment, task: Task | None, folder: str, log_dir: str | None) -> None:
    """Be a rank that torch's agent has started."""
    code, attempt = 1, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    link = worker.FolderLink(OutcomeFolder(folder, attempt), lambda: _assignment(plan, folder, attempt))
    try:
        with copied(log_dir, int(os.environ["RANK"])):
            code = worker.work(link, task)
        if code == 0:
            gc.collect()  # a model that is garbage would keep the group's connections until all ranks are done
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code:
            # Of an exception, also of the one that torch's agent sends to the other ranks, torch's own worker would
            # leave a file that nobody removes. A forked process's exit handlers are its caller's.
            os._exit(1)


def _assignment(plan: Assignment, folder: str, attempt: int) -> Assignment:
    agents = {name: value for name, value in os.environ.items() if name.startswith(_AGENTS)}
    context = plan.context
    if context is not None:
        context = replace(context, environ={**context.environ, **agents})
    placement = detect(os.environ if context is None else context.environ)
    assert isinstance(placement, Placement)
    if plan.secret:  # all ranks are of this caller, and need no port to meet
        file = str(Path(folder, f"store-{attempt}"))
        placement = replace(placement, master_addr=None, master_port=None, job=file)
        shared_status.hold(file, str(Path(folder, f"{shared_status.BOARD}-{attempt}")))
    if placement.rank == 0 and attempt > 0:
        _tell_of_restart(OutcomeFolder(folder, attempt - 1), attempt)
    return replace(plan, context=context, placement=placement)


def _tell_of_restart(before: OutcomeFolder, attempt: int) -> None:
    cause = first_cause(outcome for outcome, _ in before.read())
    why = (
        f"rank {cause.rank} on {cause.host} raised {cause.text}"
        if cause is not None and not cause.secondary
        else "a rank, or a node, died without raising an exception"
    )
    say(f"restart {attempt} of at most {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')}: {why}")
