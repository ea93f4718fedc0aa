"""What our own launchers tell their ranks: torchrun's names, so that other code finds them, and where to meet."""

from __future__ import annotations

from collections.abc import Mapping

from distwrap.environments.base import Placement

STORE = "DISTWRAP_STORE"  # the file in which the ranks meet; on several machines tcp://host:port/launch
LAUNCHER = "DISTWRAP_LAUNCHED"  # which launcher started them


def detect(env: Mapping[str, str]) -> Placement | str:
    """Read what `variables` has written."""
    if STORE not in env:
        return f"no {STORE}"
    host, port = address(env[STORE])
    return Placement(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_rank=int(env["LOCAL_RANK"]),
        local_world_size=int(env["LOCAL_WORLD_SIZE"]),
        node_rank=int(env["GROUP_RANK"]),
        nnodes=int(env["GROUP_WORLD_SIZE"]),
        master_addr=host,
        master_port=port,
        source="distwrap",
    )


def address(store: str) -> tuple[str | None, int | None]:
    """Take a host and a port out of a place to meet; neither where it is a file.

    Example:
        >>> address("tcp://[fd00::2]:29400/17")
        ('fd00::2', 29400)
    """
    if not store.startswith("tcp://"):
        return None, None
    host, _, port = store.removeprefix("tcp://").rpartition("/")[0].rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def variables(placement: Placement, launcher: str, store: str) -> dict[str, str]:
    """Write the variables for a rank that one of our launchers starts."""
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.nnodes),
        LAUNCHER: launcher,
        STORE: store,
    }


def on_one_machine(rank: int, world_size: int) -> Placement:
    """Place a rank among others that are all on this machine."""
    return Placement(rank, world_size, local_rank=rank, local_world_size=world_size, source="distwrap")
