"""Resuming where the last run stopped: the newest checkpoint that any node has, on every rank."""

import os
import socket
from typing import Any

from distwrap.checkpoint import load
from distwrap.checkpoint.saving import load_into
from distwrap.errors import CheckpointError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import current_world


def resume_from(path: str | os.PathLike[str], into: Any = None) -> Any:
    """Load what `save` last wrote to a path, or return ``None`` where it has not written yet; alike on every rank.

    Put it before the loop, and a run that is started again, by `max_restarts`, a requeued job or by hand, goes on. The
    nodes need no common disk: where they have different files the newest is sent to all ranks.

    Args:
        path: the file that the loop gives to `save`; of a numbered series the link to its latest.
        into: objects in the nesting in which they are saved, that are to go on from there; as for `load`.

    Returns:
        The state, on the CPU, or ``None``.

    Raises:
        CheckpointError: the file is there, and cannot be loaded; on all ranks.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "last.pt")
        >>> resume_from(path) is None
        True
        >>> from distwrap import save
        >>> save({"epoch": 3}, path)
        >>> resume_from(path)
        {'epoch': 3}
    """
    files = gather_object(_file(path))
    newest = max((file for file in files if file is not None), default=None)
    if newest is None:
        return None
    source, rank = files.index(newest), current_world().placement.rank
    everybody = all(file == newest for file in files)
    problem, state = "", None
    if everybody or rank == source:
        try:
            state = load(path)
        except CheckpointError as error:
            problem = f"{error} (rank {rank} on {socket.gethostname()})"
    problems = [text for text in gather_object(problem) if text]
    if problems:
        raise CheckpointError(problems[0])
    state = state if everybody else broadcast(state, source)
    if into is not None:
        load_into(into, state)
    return state


def _file(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return when a file was written, in seconds, and its length in bytes; ``None`` where there is none."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    return int(stat.st_mtime), stat.st_size
