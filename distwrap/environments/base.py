"""Where a process stands among the others, or which machine it is on that should have some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from distwrap.errors import PlacementError


@dataclass(frozen=True)
class Placement:
    """Who this process is in its world. All values come from one source.

    Attributes:
        rank: 0 … world_size - 1, unique in the world.
        world_size: how many processes there are.
        local_rank: 0 … local_world_size - 1, unique on this machine.
        local_world_size: how many of the processes are on this machine.
        node_rank: 0 … nnodes - 1, which machine this is.
        nnodes: how many machines there are.
        master_addr: where the processes meet; ``None`` where no address is needed, as for ranks that distwrap started
            on one machine.
        master_port: the port there; ``None`` where one is derived from `job`.
        source: who said so: ``"single"``, ``"distwrap"``, ``"torchrun"``, ``"slurm"``, ``"open_mpi"``, …
        job: what tells this run from others on the same machines, where no port is given.
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
                f"{self.source} says {self.local_world_size} processes on this machine, but {self.world_size} in all."
            )


@dataclass(frozen=True)
class Node:
    """Which machine this is, where a launcher starts one process a machine and leaves its ranks to us.

    Attributes:
        nnodes: how many machines there are, or ``"MIN:MAX"``.
        node_rank: which one this is; ``None`` where the machines agree on it themselves.
        nprocs: how many ranks to start here; ``None`` leaves it to the options.
        endpoint: where the machines meet, ``"host:port"``; ``None`` on one machine.
        max_restarts: ``None`` leaves it to the options.
        source: who said so.
    """

    nnodes: int | str
    node_rank: int | None
    nprocs: int | None
    endpoint: str | None
    source: str
    max_restarts: int | None = None


class Detector(Protocol):
    """Reads one launcher's variables.

    Returns a placement where that launcher started this process as a rank, a machine where it started it to start
    ranks, and else the reason why it was not that launcher, in words. Raises PlacementError where the launcher's
    variables are there but incomplete or contradictory.
    """

    def __call__(self, env: Mapping[str, str], /) -> Placement | Node | str: ...
