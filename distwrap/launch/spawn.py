"""``launcher="spawn"``: ranks that are fresh interpreters."""

from collections.abc import Sequence
from multiprocessing.connection import Connection

from distwrap.launch import worker
from distwrap.launch.base import Job
from distwrap.launch.local import LocalLauncher
from distwrap.launch.logs import Streams
from distwrap.launch.processes import CommandProcess, Process, python_command


class SpawnLauncher(LocalLauncher):
    """Fresh interpreters, each of which imports torch anew."""

    name = "spawn"
    start_method = "spawn"

    def start(self, job: Job, rank: int, earlier: Sequence[Process], streams: Streams | None) -> Process:
        return CommandProcess(rank, _command, streams=streams)


def _command(fd: int) -> list[str]:
    return python_command(f"from distwrap.launch.spawn import main; gc.enable(); main({fd})")


def main(fd: int) -> None:
    """Be a rank, in a fresh interpreter that holds the far end of the connection."""
    worker.rank_main(Connection(fd))
