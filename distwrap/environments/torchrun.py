"""torch's variables: of torchrun and its kin (elastic, Composer, AzureML's PyTorch jobs, Bagua), or set by hand.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; bagua/distributed/launch.py (its
local size has been LOCAL_SIZE and LOCAL_WORLD_SIZE); https://learn.microsoft.com/azure/machine-learning
how-to-train-distributed-gpu (NODE_RANK).
"""

from __future__ import annotations

from collections.abc import Mapping

from distwrap.environments.base import Placement
from distwrap.environments.reading import quoted, whole
from distwrap.errors import PlacementError

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun and elastic alone

# MASTER_ADDR and MASTER_PORT alone claim nothing: people export them in a shell profile.
CLAIMS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def detect(env: Mapping[str, str]) -> Placement | str:
    """Read a complete set; `refuse_half_set` judges an incomplete one once no other launcher explains it."""
    if not any(name in env for name in CLAIMS):
        return f"no {', '.join(CLAIMS)}"
    missing = [name for name in REQUIRED if name not in env]
    if missing:
        return f"no {', '.join(missing)}"
    rank, world_size, local_rank = (whole(env, name) for name in CLAIMS)
    size = next((name for name in _LOCAL_SIZES if name in env), None)
    if size is None and (rank != local_rank or ("NODE_RANK" in env and world_size > 1)):
        raise PlacementError(
            f"{quoted(env, ('RANK', 'LOCAL_RANK', 'NODE_RANK'))} say that there may be several machines, but not how "
            f"many ranks are on this one: set LOCAL_WORLD_SIZE."
        )
    local_world_size = world_size if size is None else whole(env, size)
    each = max(1, local_world_size)
    # torchrun has GROUP_RANK, Composer and AzureML NODE_RANK; without, machines are taken to be filled one by one.
    node = "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK"
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=whole(env, node, default=rank // each),
        nnodes=whole(env, "GROUP_WORLD_SIZE", default=max(1, -(-world_size // each))),
        master_addr=env["MASTER_ADDR"],
        master_port=whole(env, "MASTER_PORT"),
        source="torchrun",
    )


def refuse_half_set(env: Mapping[str, str]) -> None:
    """Refuse variables that say half of who we are, by listing what is there and what is not."""
    claimed = [name for name in CLAIMS if name in env]
    if not claimed:
        return
    missing = [name for name in REQUIRED if name not in env]
    if not missing:
        return
    machines = (
        " If RANK and WORLD_SIZE count machines here (Kubeflow, DLC), say how many ranks each is to start: set "
        "NPROC_PER_NODE."
        if "LOCAL_RANK" in missing and {"RANK", "WORLD_SIZE"}.issubset(claimed)
        else ""
    )
    raise PlacementError(
        f"the environment is half set for a distributed run: it has {quoted(env, REQUIRED)}, but not "
        f"{', '.join(missing)}.{machines} Set all of {', '.join(REQUIRED)} (torchrun does), or unset "
        f"{', '.join(claimed)}."
    )


def refuse_contradiction(env: Mapping[str, str], other: Placement, names: tuple[str, str, str]) -> None:
    """Refuse torch's variables, whole or in part, where they disagree with those of the launcher of this very process.

    A launcher inside of another overrides the outer one's word, and then there are at least as many ranks.

    Args:
        env: the environment.
        other: what the other launcher says.
        names: its variables for rank, world size and local rank, for the error.
    """
    if AGENT in env:
        return
    theirs = (other.rank, other.world_size, other.local_rank)
    size = whole(env, "WORLD_SIZE") if "WORLD_SIZE" in env else other.world_size
    whole_set = all(name in env for name in REQUIRED)
    if whole_set and size > other.world_size:
        return
    for mine, value, name in zip(CLAIMS, theirs, names, strict=True):
        if mine in env and whole(env, mine) != value:
            said = f"{name}={env[name]}" if name in env else f"{other.source} says {value}"
            raise PlacementError(
                f"two launchers contradict each other: {mine}={env[mine]}, but {said}. Unset {mine} where "
                f"{other.source} starts the ranks (in a job script, `export RANK=…` before the launch is the same on "
                f"every rank), or start them with torchrun alone."
            )
