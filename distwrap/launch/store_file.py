"""Store in which the ranks of a launch meet. On one node it is a file in the caller's memory, and a board beside it.

No port is needed that somebody would have to pick, or that a stranger could connect to; no name is looked up, so a
slow name server delays nothing; and when the caller dies, nothing is left.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from distwrap.environments import Placement, distwrap_environment
from distwrap.launch.peer_launchers import PeerLaunchers
from distwrap.launch.task import NodePlan
from distwrap.network import memory_file
from distwrap.supervision import shared_status
from distwrap.supervision.shared_status import BOARD


@dataclass(frozen=True)
class Rendezvous:
    """The store and the ranks of a launch, as its caller sees them.

    Attributes:
        store: its address, or the path of its file.
        ranks: the ranks that this caller starts.
        world_size: number of ranks on all nodes.
        placement: returns the placement of one of the ranks that this caller starts.
        others: connection to the callers on the other nodes; ``None`` where there are none.
        number: of this meeting among those of the same ranks.
    """

    store: str
    ranks: tuple[int, ...]
    world_size: int
    placement: Callable[[int], Placement]
    others: PeerLaunchers | None = None
    number: int = 1


def on_one_node(store: str, nprocs: int) -> Rendezvous:
    """Return the meeting of all ranks on this node."""
    return Rendezvous(store, tuple(range(nprocs)), nprocs, lambda rank: distwrap_environment.on_one_node(rank, nprocs))


@contextmanager
def meeting(plan: NodePlan, nprocs: int, seconds: float) -> Iterator[Rendezvous]:
    """Hold the store in which the ranks meet; on several nodes, wait for the callers of all of them first.

    Args:
        plan: the nodes that take part.
        nprocs: number of ranks to start on this node.
        seconds: time limit for the other nodes to arrive.
    """
    if not plan.several:
        with place() as path:
            yield on_one_node(path, nprocs)
        return
    others = PeerLaunchers(plan, nprocs, seconds)
    try:
        yield Rendezvous(others.place, others.ranks, others.world_size, others.placement, others)
    except BaseException as error:
        others.tell(error)
        raise
    finally:
        others.close()


@contextmanager
def place() -> Iterator[str]:
    """Hold the file for torch's FileStore, and the ranks' board beside it; yield the path of the store."""
    if memory_file.ARE_POSSIBLE:
        fds = [memory_file.make(name) for name in ("distwrap-store", BOARD)]
        path, beside = map(memory_file.path_of, fds)
        try:
            shared_status.hold(path, beside)
            yield path
        finally:
            for fd in fds:
                os.close(fd)
        return
    with tempfile.TemporaryDirectory(prefix="distwrap-") as folder:  # readable by this user alone
        path, beside = (os.path.join(folder, name) for name in ("store", "board"))
        shared_status.hold(path, beside)
        yield path
