"""Launch ranks as processes of this one's own, on this node and, where callers on others do so too, on several."""

import contextlib
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace

from distwrap.data import workers
from distwrap.group.setup import ARRIVAL_SECONDS
from distwrap.launch.base import Job, Launcher, tell_of_crowd
from distwrap.launch.logs import Logs, Streams
from distwrap.launch.outcome import Outcome
from distwrap.launch.processes import Process
from distwrap.launch.signals import SignalForwarder
from distwrap.launch.store_file import Rendezvous, meeting
from distwrap.launch.supervisor import print_where_all_are, stop, supervise
from distwrap.launch.task import Assignment


class LocalLauncher(Launcher):
    """Processes of this one's own; a subclass says how one is started."""

    several_nodes = True
    writes_logs = True

    def start(self, job: Job, rank: int, earlier: Sequence[Process], streams: Streams | None) -> Process:
        """Start the process of a rank, which waits for its assignment.

        Args:
            job: what it is to run.
            rank: the rank.
            earlier: the processes of the ranks before it.
            streams: its standard output and error; ``None`` for this process's.
        """
        raise NotImplementedError

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        options = job.task.options
        with SignalForwarder() as signals, meeting(job.nodes, job.nprocs, min(options.timeout, ARRIVAL_SECONDS)) as met:
            with contextlib.closing(Logs(options.log_dir, met.ranks)) as logs:
                outcomes = self._supervised(job, plan, met, logs, signals)
            if met.others is not None:
                met.others.finish()
                self.summary = met.others.summary() if met.others.node_rank > 0 else None
        return outcomes

    def _supervised(
        self, job: Job, plan: Assignment, met: Rendezvous, logs: Logs, signals: SignalForwarder
    ) -> list[Outcome]:
        sys.stdout.flush()
        sys.stderr.flush()
        tell_of_crowd(len(met.ranks))
        processes: list[Process] = []
        try:
            for rank in met.ranks:
                processes.append(self.start(job, rank, processes, logs.streams(rank)))
            logs.start()
            if met.others is not None:
                met.others.start()
            for process in processes:
                assignment = replace(plan, placement=met.placement(process.rank), store=met.store)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead at birth; who waits will say so
                    process.conn.send_bytes(pickle.dumps(assignment, pickle.HIGHEST_PROTOCOL))
        except BaseException:
            stop(processes, all_they_started=True)
            raise
        signals.listen(processes, lambda: print_where_all_are(met))
        try:
            return supervise(processes, met, seconds=job.seconds, signals=signals)
        finally:
            workers.remove_what_is_left()
