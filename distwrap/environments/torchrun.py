"""torch's variables, set by torchrun and its relatives (elastic, Composer, AzureML's PyTorch jobs, Bagua) or by hand.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; bagua/distributed/launch.py (its
local size has been LOCAL_SIZE and LOCAL_WORLD_SIZE);
https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu (NODE_RANK).
"""

from collections.abc import Mapping, Sequence

from distwrap.environments.base import Placement
from distwrap.environments.variables import quote, read_int
from distwrap.errors import PlacementError

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun and elastic only

# MASTER_ADDR and MASTER_PORT alone do not make a rank: people export them in a shell profile.
CLAIMS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def detect(env: Mapping[str, str]) -> Placement | str:
    """Read a complete set; `check_complete` judges an incomplete one once no other launcher explains it."""
    if not any(name in env for name in CLAIMS):
        return f"no {', '.join(CLAIMS)}"
    missing = [name for name in REQUIRED if name not in env]
    if missing:
        return f"no {', '.join(missing)}"
    rank, world_size, local_rank = (read_int(env, name) for name in CLAIMS)
    size = next((name for name in _LOCAL_SIZES if name in env), None)
    if size is None and (rank != local_rank or ("NODE_RANK" in env and world_size > 1)):
        raise PlacementError(
            f"{quote(env, ('RANK', 'LOCAL_RANK', 'NODE_RANK'))} say that there may be several nodes, but not how "
            f"many ranks are on this one: set LOCAL_WORLD_SIZE."
        )
    local_world_size = world_size if size is None else read_int(env, size)
    each = max(1, local_world_size)
    # torchrun has GROUP_RANK, Composer and AzureML NODE_RANK; without one of them the ranks fill node after node.
    node = "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK"
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=read_int(env, node, default=rank // each),
        nnodes=read_int(env, "GROUP_WORLD_SIZE", default=max(1, -(-world_size // each))),
        master_addr=env["MASTER_ADDR"],
        master_port=read_int(env, "MASTER_PORT"),
        source="torchrun",
    )


def check_complete(env: Mapping[str, str]) -> None:
    """Raise a PlacementError that lists what is there and what is not if the variables say only half of a rank."""
    claimed = [name for name in CLAIMS if name in env]
    missing = [name for name in REQUIRED if name not in env]
    if not claimed or not missing:
        return
    may_be_nodes = (
        " If RANK and WORLD_SIZE count nodes here (Kubeflow, DLC), say how many ranks each is to start: set "
        "NPROC_PER_NODE."
        if "LOCAL_RANK" in missing and {"RANK", "WORLD_SIZE"}.issubset(claimed)
        else ""
    )
    raise PlacementError(
        f"the environment is half set for a distributed run: it has {quote(env, REQUIRED)}, but not "
        f"{', '.join(missing)}.{may_be_nodes} Set all of {', '.join(REQUIRED)} (torchrun does), or unset "
        f"{', '.join(claimed)}."
    )


def check_agreement(env: Mapping[str, str], other: Placement, names: Sequence[str]) -> None:
    """Raise an error if torch's variables, all or some, disagree with those of the launcher of this very process.

    A launcher that runs inside of another overrides the outer one, and then there are at least as many ranks.

    Args:
        env: the environment.
        other: the placement by the other launcher.
        names: that launcher's variables of rank, world size and local rank, for the error.

    Raises:
        PlacementError: quotes the two variables that disagree.
    """
    if AGENT in env:
        return
    size = read_int(env, "WORLD_SIZE", default=other.world_size)
    if all(name in env for name in REQUIRED) and size > other.world_size:
        return
    for mine, value, name in zip(CLAIMS, (other.rank, other.world_size, other.local_rank), names, strict=True):
        if mine in env and read_int(env, mine) != value:
            says = f"{name}={env[name]}" if name in env else f"{other.source} says {value}"
            raise PlacementError(
                f"two launchers contradict each other: {mine}={env[mine]}, but {says}. Unset {mine} where "
                f"{other.source} starts the ranks (in a job script, `export RANK=…` before the launch is the same on "
                f"every rank), or start them with torchrun alone."
            )
