"""A launcher of another package."""

from __future__ import annotations

from collections.abc import Sequence

from distwrap.launch.base import Job
from distwrap.launch.local import LocalLauncher
from distwrap.launch.logs import Streams
from distwrap.launch.processes import CommandProcess, Process, python_command


class NiceLauncher(LocalLauncher):
    """Fresh interpreters that leave the processor to others."""

    name = "nice"

    def start(self, job: Job, rank: int, earlier: Sequence[Process], streams: Streams | None) -> Process:
        return CommandProcess(rank, _command, streams=streams)


def _command(fd: int) -> list[str]:
    return ["nice", "-n", "3", *python_command(f"from distwrap.launch.spawn import main; main({fd})")]
