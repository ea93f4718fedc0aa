"""Where the ranks of a launch meet. On one machine: in a file without a name, in the caller's memory.

No port is needed that somebody would have to pick, or that a stranger could connect to; no name is looked up, so a
slow name server delays nothing; and when the caller dies, nothing is left.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from distwrap.environments import Placement, distwrap_environment
from distwrap.launch.node_plan import NodePlan
from distwrap.launch.nodes import Nodes


@dataclass(frozen=True)
class Meeting:
    """A launch as its caller sees it.

    Attributes:
        place: where the ranks meet.
        ranks: those that this caller starts.
        world_size: how many there are in all.
        placement: places one of them.
        nodes: the callers on the other machines; ``None`` where there are none.
    """

    place: str
    ranks: tuple[int, ...]
    world_size: int
    placement: Callable[[int], Placement]
    nodes: Nodes | None = None


@contextmanager
def meeting(machines: NodePlan, nprocs: int, seconds: float) -> Iterator[Meeting]:
    """Prepare where the ranks meet; with other machines, once the callers of all of them are here.

    Args:
        machines: which take part.
        nprocs: how many ranks to start here.
        seconds: for the other machines to come.
    """
    if not machines.several:
        with place() as path:
            yield Meeting(
                path, tuple(range(nprocs)), nprocs, lambda rank: distwrap_environment.on_one_machine(rank, nprocs)
            )
        return
    nodes = Nodes(machines, nprocs, seconds)
    try:
        yield Meeting(nodes.place, nodes.ranks, nodes.world_size, nodes.placement, nodes)
    except BaseException as error:
        nodes.tell(error)
        raise
    finally:
        nodes.close()


@contextmanager
def place() -> Iterator[str]:
    """Hold the file for torch's FileStore, and yield the path under which this user's processes find it."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        fd = os.memfd_create("distwrap-store")
        try:
            yield f"/proc/{os.getpid()}/fd/{fd}"
        finally:
            os.close(fd)
        return
    with tempfile.TemporaryDirectory(prefix="distwrap-") as folder:  # readable by this user alone
        yield os.path.join(folder, "store")
