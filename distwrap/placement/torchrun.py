"""torchrun's variables.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping

from distwrap.errors import PlacementError
from distwrap.placement.base import Placement

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# MASTER_ADDR and MASTER_PORT alone claim nothing: people export them in a shell profile.
_CLAIMS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def detect(env: Mapping[str, str]) -> Placement | None:
    """Read torchrun's variables; refuse a half-set environment by listing what is there and what is not."""
    if not any(name in env for name in _CLAIMS):
        return None
    missing = [name for name in REQUIRED if name not in env]
    if missing:
        found = ", ".join(f"{name}={env[name]}" for name in REQUIRED if name in env)
        raise PlacementError(
            f"the environment is half set for a distributed run: it has {found}, but not {', '.join(missing)}. "
            f"Set all of {', '.join(REQUIRED)} (torchrun does), or unset "
            f"{', '.join(name for name in _CLAIMS if name in env)}."
        )
    rank, world_size, local_rank = (_integer(env, name) for name in _CLAIMS)
    if "LOCAL_WORLD_SIZE" not in env and rank != local_rank:
        raise PlacementError(
            f"RANK={rank} and LOCAL_RANK={local_rank} say that there are several machines, but not how many ranks are "
            f"on this one: set LOCAL_WORLD_SIZE."
        )
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", default=world_size)
    each = max(1, local_world_size)
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        # torchrun sets these; without them, machines are taken to be filled one after the other.
        node_rank=_integer(env, "GROUP_RANK", default=rank // each),
        nnodes=_integer(env, "GROUP_WORLD_SIZE", default=max(1, -(-world_size // each))),
        master_addr=env["MASTER_ADDR"],
        master_port=_integer(env, "MASTER_PORT"),
        source="torchrun",
    )


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise PlacementError(f"{name}={env[name]!r} is not a whole number.") from None
