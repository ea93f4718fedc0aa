"""The current world: the one place where distwrap keeps state.

`activate` sets it, `deactivate` clears it. Where neither has happened the world is *ambient*: what a launcher's
variables, or a process group that the user made, say about this process.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.devices.selection import choose_device, visible_devices
from distwrap.environments import Placement, detect
from distwrap.supervision.activity import Activity

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler

    from distwrap.supervision.channel import Channel

Precision = Literal["32", "bf16", "bf16-true", "fp16"]


@dataclass
class World:
    """What was decided for this run, and what it holds open.

    Attributes:
        backend: of the process group, ``None`` where there is none.
        strategy: the run's `Strategy`; ``None`` for DDP.
        seed: the user's; ``None`` where none was given.
        timeout: seconds for a collective.
        scaler: of fp16; made when the first model is wrapped in that precision.
        grads_are_scaled: whether `backward` ran since the last `optimizer_step`, so that the gradients are scaled.
        stepped: the optimizers that have stepped since `backward`, by their ids; ``None`` before the first.
        unscaled: those whose gradients have had their scale taken off since `backward`.
        scaled: the models in fp16.
        marked: a gradient of each as `backward` left it, and its version.
        user_scales: whether the loop was seen to use a gradient scaler of its own.
        window: of the accumulation that is under way.
        loaders: how many loaders were sharded, so that each has a random stream of its own.
        comm: how wrapped models exchange, an `Algorithm`; ``None`` as DDP does.
        dropped: what a model exchanged through that nobody holds any more; ended when the next one is made.
        exchanges: of models whose ranks hold different weights; they act around optimizer steps.
        listens: whether steps are watched for these.
        models: those that hold on to the process group; released before it goes.
        wrapped: how many models were wrapped, so that each has a name alike on every rank.
        first_steps: what looks at the optimizers' first steps.
        group: the process group, held so that no model of the user's is the last to hold it: torch ends it then with
            the interpreter's lock taken, for which gloo's threads wait forever.
        store: where the ranks met.
        secret: of the run, by which objects from its ranks are known.
        channel: the side channel to the other ranks, where distwrap made the group.
        crumbs: what this rank did last.
        solo: the function in which only some ranks are at this moment, so that a collective would wait forever.
        turns: how often ranks have waited for each kind of work of another rank.
        preempted: how the machine was wanted back, once it was.
        status_group: in which `lockstep` exchanges its status.
        writer: of checkpoints in the background.
        noted: what was said already, and need not be said again.
        cleanup: what teardown undoes.
    """

    placement: Placement
    device: torch.device
    backend: str | None = None
    strategy: Any = None
    precision: Precision = "32"
    seed: int | None = None
    timeout: float = 600.0
    scaler: GradScaler | None = None
    grads_are_scaled: bool = False
    stepped: set[int] | None = None
    unscaled: set[int] = field(default_factory=set)
    scaled: WeakSet[Any] = field(default_factory=WeakSet)
    marked: list[Any] = field(default_factory=list)
    user_scales: bool = False
    window: Any = None
    loaders: int = 0
    comm: Any = None
    listens: bool = False
    dropped: list[Any] = field(default_factory=list)
    exchanges: list[Any] = field(default_factory=list)
    models: WeakSet[Any] = field(default_factory=WeakSet)
    wrapped: int = 0
    first_steps: Any = None
    group: object = None
    store: Store | None = None
    secret: bytes = b""
    channel: Channel | None = None
    crumbs: Activity = field(default_factory=Activity)
    solo: str = ""
    turns: Counter[str] = field(default_factory=Counter)
    preempted: Any = None
    status_group: Any = None
    writer: Any = None
    noted: set[str] = field(default_factory=set)
    cleanup: ExitStack = field(default_factory=ExitStack)


_current: World | None = None
_ambient: tuple[object, World] | None = None


def current_world() -> World:
    """Return the active world, or the ambient one."""
    return _current if _current is not None else _ambient_world()


def active_world() -> World | None:
    """Return the world that distwrap set up, if it did."""
    return _current


def activate(world: World) -> None:
    """Make a world the current one."""
    global _current
    _current = world


def deactivate() -> None:
    """Forget the current world, and what it left in the ambient one."""
    global _current, _ambient
    if _ambient is not None:
        _ambient[1].cleanup.close()
    _current = _ambient = None


def _ambient_world() -> World:
    global _ambient
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    env = os.environ
    key = (group, env.get("RANK"), env.get("WORLD_SIZE"), env.get("LOCAL_RANK"))
    if _ambient is None or _ambient[0] != key:
        found = detect(env) if group is None else _placement_of_group()
        placement = found if isinstance(found, Placement) else Placement()  # a machine whose ranks are yet to start
        world = World(placement, choose_device(placement, visible_devices()))
        world.backend = None if group is None else dist.get_backend()
        _ambient = (key, world)
    return _ambient[1]


def _placement_of_group() -> Placement:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    env = os.environ
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=int(env.get("LOCAL_RANK", rank % local_world_size)),
        local_world_size=local_world_size,
        node_rank=int(env.get("GROUP_RANK", rank // local_world_size)),
        nnodes=int(env.get("GROUP_WORLD_SIZE", max(1, world_size // local_world_size))),
        source="torch.distributed",
    )


def say(text: str, *, every_rank: bool = False) -> None:
    """Print a line on rank 0's standard error, or on every rank's; ``DISTWRAP_QUIET=1`` keeps it quiet."""
    if (every_rank or current_world().placement.rank == 0) and os.environ.get("DISTWRAP_QUIET", "0") in ("", "0"):
        print(f"distwrap: {text}", file=sys.stderr, flush=True)


def placement() -> Placement:
    """Say where this process stands: right before, during and after the group's life.

    Example:
        >>> placement().world_size
        1
    """
    return current_world().placement


def rank() -> int:
    """Return this process's rank, 0 in a single process."""
    return current_world().placement.rank


def world_size() -> int:
    """Return the number of processes, 1 in a single process."""
    return current_world().placement.world_size


def local_rank() -> int:
    """Return this process's rank among those on its machine."""
    return current_world().placement.local_rank


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return current_world().placement.local_world_size


def node_rank() -> int:
    """Return which machine this is, 0 on one machine."""
    return current_world().placement.node_rank


def is_rank_zero() -> bool:
    """Say whether this is rank 0, as it is in a single process."""
    return current_world().placement.rank == 0


def device() -> torch.device:
    """Return the device of this rank.

    Example:
        >>> device().type in ("cpu", "cuda")
        True
    """
    return current_world().device
