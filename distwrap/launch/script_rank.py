"""Ranks that run the script again, for a call whose rank 0 is `distwrap.launch.script`'s caller."""

import functools
import gc
import os
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from distwrap import retrofit
from distwrap._internals.python import run_interpreter_end
from distwrap.environments import distwrap_environment
from distwrap.errors import LaunchError
from distwrap.group.setup import teardown_process_group
from distwrap.launch import transport
from distwrap.launch.base import Job
from distwrap.launch.outcome import success
from distwrap.launch.task import Assignment
from distwrap.launch.worker import (
    FailureReported,
    PipeLink,
    make_output_readable,
    report_failures,
    stalled,
    take_part,
    use_threads,
)


def is_one() -> bool:
    """Return whether this process is such a rank."""
    return distwrap_environment.SCRIPT in os.environ


def run(job: Job, plan: Assignment) -> Any:
    """Take part in rank 0's call, park at its end, and return rank 0's value when rank 0 makes another."""
    conn = _connection()
    link, rank = PipeLink(conn), int(os.environ["RANK"])
    store, name, secret = _message(conn)
    os.environ[distwrap_environment.STORE] = store
    placement = distwrap_environment.on_one_node(rank, int(os.environ["WORLD_SIZE"]))
    plan = replace(plan, placement=placement, secret=secret)
    try:
        data = report_failures(link, rank, lambda: _run(job, plan, link, name))
    except FailureReported:
        _leave(1)
    link.report(success(rank, data))
    teardown_process_group()
    gc.collect()  # a model that is garbage would keep the group's connections, and the others waiting
    sys.stdout.flush()
    return transport.unpack_result(_message(conn))


def _run(job: Job, plan: Assignment, link: PipeLink, name: str) -> bytes | None:
    """Run the call that rank 0 makes too, and return what it wants of this rank, pickled."""
    rank = plan.placement.rank
    if name != job.task.name:
        raise LaunchError(
            f"rank {rank} has come to {job.task.name}, but rank 0 is at {name}: with launcher='script' every "
            f"rank must make the same decorated calls in the same order. Let no branch before them depend on the "
            f"rank."
        )
    use_threads(plan)
    value, found = take_part(plan, job.task, lambda report: stalled(report, link, rank))
    if job.returns != "all":
        return None
    return transport.pack_result(retrofit.unwrapped(value, found), f"what {name} returned on rank {rank}")


@functools.cache
def _connection() -> Connection:
    """Make this process a rank, and return its connection to rank 0's."""
    conn = Connection(int(os.environ[distwrap_environment.SCRIPT]))
    PipeLink(conn).bind_lifetime()
    make_output_readable()
    return conn


def _message(conn: Connection) -> Any:
    """Wait, as long as it takes, for rank 0's word; leave when it leaves."""
    try:
        return conn.recv()
    except (EOFError, OSError):
        _leave(0)


def _leave(code: int) -> NoReturn:
    run_interpreter_end(threads=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
