"""Variables that our own launchers set for their ranks: torchrun's names, which other code knows, and the store."""

from collections.abc import Mapping
from typing import Any

from distwrap.environments.base import Placement
from distwrap.environments.variables import DEFAULT_PORT

STORE = "DISTWRAP_STORE"  # the file in which the ranks meet; on several nodes tcp://host:port/launch
LAUNCHER = "DISTWRAP_LAUNCHED"  # the launcher that started them
SCRIPT = "DISTWRAP_SCRIPT_FD"  # in a process that runs the script again: the descriptor of its link to rank 0

_FIELDS = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_world_size",
    "GROUP_RANK": "node_rank",
    "GROUP_WORLD_SIZE": "nnodes",
}


def detect(env: Mapping[str, str]) -> Placement | str:
    """Read the variables that `variables` has made."""
    if STORE not in env:
        return f"no {STORE}"
    host, port = address(env[STORE])
    numbers: dict[str, Any] = {field: int(env[name]) for name, field in _FIELDS.items()}
    return Placement(**numbers, master_addr=host, master_port=port, source="distwrap")


def address(store: str) -> tuple[str | None, int | None]:
    """Return the host and the port in a store's address; ``None`` for both where it is a file.

    Example:
        >>> address("tcp://[fd00::2]:29400/17")
        ('fd00::2', 29400)
    """
    if not store.startswith("tcp://"):
        return None, None
    host, _, port = store.removeprefix("tcp://").rpartition("/")[0].rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def variables(placement: Placement, launcher: str, store: str) -> dict[str, str]:
    """Return the variables for a rank that one of our launchers starts."""
    numbers = {name: str(getattr(placement, field)) for name, field in _FIELDS.items()}
    return {**numbers, LAUNCHER: launcher, STORE: store}


def lacking(placement: Placement, env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables that a rank does not have, from which other libraries read its place.

    Accelerate and transformers would see one process without them, and train on all of the data on each rank. Where
    ranks meet in a file nobody listens at the port.
    """
    numbers = {name: getattr(placement, field) for name, field in _FIELDS.items()}
    meeting = {
        "MASTER_ADDR": placement.master_addr or "127.0.0.1",
        "MASTER_PORT": placement.master_port or DEFAULT_PORT,
    }
    return {name: str(value) for name, value in {**numbers, **meeting}.items() if name not in env}


def on_one_node(rank: int, world_size: int) -> Placement:
    """Return the placement of a rank among others that are all on this node."""
    return Placement(rank, world_size, local_rank=rank, local_world_size=world_size, source="distwrap")
