"""Placement of a process among the ranks, or the node on which it is to start some, as the environment says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from distwrap.errors import PlacementError


@dataclass(frozen=True)
class Placement:
    """Place of this process in its world. All values come from one source.

    Attributes:
        rank: number of this process, 0 … world_size - 1.
        world_size: number of processes on all nodes.
        local_rank: number of this process on its node, 0 … local_world_size - 1.
        local_world_size: number of processes on this node.
        node_rank: number of this node, 0 … nnodes - 1.
        nnodes: number of nodes.
        master_addr: host at which the ranks meet; ``None`` where no address is needed, as for ranks that distwrap
            started on one node.
        master_port: port there; ``None`` where it is derived from `job`.
        source: name of the launcher that said so: ``"single"``, ``"distwrap"``, ``"torchrun"``, ``"slurm"``, …; a
            detector of another package that gives none gets its own name here.
        job: text that no other run on the same nodes has, where no port is given; the file in which the ranks meet,
            where there is no address either.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nnodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    source: str = "single"
    job: str = ""

    def __post_init__(self) -> None:
        for name, index, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
            ("node rank", self.node_rank, self.nnodes),
        ):
            if not 0 <= index < size:
                raise PlacementError(f"{self.source} says {name} {index} of {size}: it must be 0 to {size - 1}.")
        if self.local_world_size > self.world_size:
            raise PlacementError(
                f"{self.source} says {self.local_world_size} processes on this node, but {self.world_size} in all."
            )


@dataclass(frozen=True)
class Node:
    """Node of this process, where a launcher starts one process on each node and leaves the ranks there to it.

    Attributes:
        nnodes: number of nodes, or ``"MIN:MAX"``.
        node_rank: number of this node; ``None`` where the nodes agree on it themselves.
        nprocs: number of ranks to start here; ``None`` leaves it to the options.
        endpoint: where the nodes meet, ``"host:port"``; ``None`` on one node.
        max_restarts: number of restarts; ``None`` leaves it to the options.
        source: name of the launcher that said so.
    """

    nnodes: int | str
    node_rank: int | None
    nprocs: int | None
    endpoint: str | None
    source: str
    max_restarts: int | None = None


class Detector(Protocol):
    """Reader of one launcher's variables.

    Returns a placement where that launcher started this process as a rank, a node where it started it to start ranks,
    and else in words why it was not that launcher. Raises PlacementError where the launcher's variables are there but
    incomplete or contradictory.
    """

    def __call__(self, env: Mapping[str, str], /) -> Placement | Node | str: ...
