"""``launcher="script"``: this process is rank 0, and the other ranks run the same command line again.

Nothing is pickled. Each of the other ranks runs the script from its top, reaches the decorated call, joins, and parks
at the call's end: if rank 0 makes another decorated call, they take rank 0's result of the last one and run on to it;
else they leave when rank 0 does. What they do is in `distwrap.launch.script_rank`, what rank 0 knows of them in
`distwrap.launch.parked_ranks`, and how it is itself watched and interrupted in `distwrap.launch.script_rank_zero`.
"""

import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from distwrap import retrofit
from distwrap.data import workers
from distwrap.environments import distwrap_environment
from distwrap.environments.variables import variables_set
from distwrap.errors import LaunchError
from distwrap.group.setup import abandon_process_group, teardown_process_group
from distwrap.launch import command_line, script_rank, transport
from distwrap.launch.base import Job, Launcher
from distwrap.launch.logs import redirected
from distwrap.launch.outcome import Outcome, success
from distwrap.launch.parked_ranks import ParkedRanks
from distwrap.launch.script_rank_zero import RankZero, Supervision
from distwrap.launch.signals import interrupt_listener
from distwrap.launch.store_file import on_one_node
from distwrap.launch.supervisor import print_where_all_are
from distwrap.launch.task import Assignment
from distwrap.launch.worker import take_part, use_threads
from distwrap.network.rendezvous import next_meeting

_parked = ParkedRanks()


class ScriptLauncher(Launcher):
    """The command line again for the other ranks; this process is rank 0."""

    name = "script"
    writes_logs = True

    def check(self, job: Job) -> None:
        name = job.task.name
        if script_rank.is_one():
            asked = job.task.options.launcher
            if asked != "script":
                raise LaunchError(
                    f"{name} has launcher={asked!r} in a script whose other calls have launcher='script', so "
                    f"each of its ranks would launch ranks of its own. Use the same launcher for all calls in a script."
                )
            return
        if _parked.failed:
            raise LaunchError(
                f"{_parked.failed} has failed before, and with launcher='script' the other ranks, which run the script "
                f"from its top, cannot come to {name} again. Use launcher='forkserver' to go on after a failure."
            )
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("launcher='script' runs rank 0 in the caller, so the call must be in the main thread.")
        if _parked.processes and len(_parked.processes) != job.nprocs - 1:
            raise LaunchError(
                f"launcher='script' has {len(_parked.processes) + 1} ranks from the first decorated call, and this one "
                f"asks for {job.nprocs}. Ask for the same number in all calls, or use launcher='forkserver'."
            )
        if not _parked.processes:
            command_line.command(0)  # or there is none that could run again

    def plan(self, job: Job) -> Assignment:
        return self.plan_in_place(job)

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        if script_rank.is_one():
            self._value = script_rank.run(job, plan)
            return []
        return self._run_rank_zero(job, plan)

    def collect_result(self, job: Job, outcomes: Any) -> Any:
        if job.returns == "rank0" or script_rank.is_one():
            return self._value
        return [self._value, *(transport.unpack_result(o.value) for o in outcomes if o.value is not None)]

    def _run_rank_zero(self, job: Job, plan: Assignment) -> list[Outcome]:
        met = replace(on_one_node(_parked.store_until_exit(), job.nprocs), number=next_meeting())
        _parked.wake_or_start(job, met, plan)
        plan = replace(plan, placement=met.placement(0), store=met.store)
        zero = RankZero()
        watch = Supervision(zero, list(_parked.processes), met)
        with (
            variables_set(distwrap_environment.variables(plan.placement, self.name, met.store)),
            ExitStack() as stack,
            redirected(_parked.logs.streams(0)),
            interrupt_listener(watch.interrupt, lambda: print_where_all_are(met)),
            zero.hear_of_failures(),
        ):
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            watch.start()
            first: BaseException | None = None
            try:
                try:
                    use_threads(plan)
                    with zero.working():
                        value, found = take_part(plan, job.task, zero.stalled)
                    self._value = _parked.last_value = retrofit.unwrapped(value, found)
                    zero.report(success(0, None))
                    teardown_process_group()
                    return watch.outcomes()
                except BaseException as error:  # noqa: BLE001 - it is raised below, or what has caused it
                    first = error
                    cause = _end(job, zero, watch, first)
            except RuntimeError as error:  # torch's handler for loader workers, before `_end` could switch it off
                first = first or error
                cause = _end(job, zero, watch, first)
            if cause is first:
                raise first
            raise cause from cause.__cause__


def _end(job: Job, zero: RankZero, watch: Supervision, error: BaseException) -> BaseException:
    """After a failure of rank 0, end the others, who could keep the teardown waiting; return the first cause."""
    with workers.news_kept_away():
        zero.leave()  # the interruption may have come in the way of that
        _parked.failed = job.task.name
        try:
            return watch.cause_of(error)
        finally:
            try:
                _parked.end(interrupt=watch.interrupted)
            finally:
                abandon_process_group(destroy=True)
