"""The current world: the one place where distwrap keeps the state of a run.

`activate` sets it, `deactivate` clears it. Where neither has happened the world is *ambient*: what a launcher's
variables, or a process group that the user made, say about this process.

What a room of the package keeps for a run is a `RunPart` of that room, which `World.part` makes at its first use. (No
context variables: DDP's hooks run in autograd's threads, which have contexts of their own.)
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from distwrap import simulated
from distwrap.devices.selection import choose_device, visible_devices
from distwrap.environments import Placement, detect
from distwrap.errors import OptionError
from distwrap.network.waiting import count_in
from distwrap.options import QUIET, Options, switched_on
from distwrap.protocols import Layout as Layout, Strategy
from distwrap.registry import strategies
from distwrap.supervision.channel import Channel
from distwrap.supervision.stacks import END_OF_RUN
from distwrap.wording import print_notice

END_OF_RUN |= {(__file__, "wait"), (__file__, "conclude")}


class RunPart(Protocol):
    """State that one room keeps for one run; made by `World.part` at its first use."""

    def __init__(self, world: World) -> None: ...

    def wait(self) -> None:
        """Wait for this rank's own work in the background, at the end of a decorated call, which one rank may make."""
        return

    def conclude(self) -> None:
        """Check the run when its function has ended, before its result is reported; every rank calls it."""
        return

    def settle(self) -> None:
        """Bring to an end what is under way, at the orderly end of a run, after `wait`; every rank calls it."""
        return

    def close(self) -> None:
        """Give back what this part holds; always called, for the part that was made last first."""
        return


Part = TypeVar("Part", bound=RunPart)


@dataclass
class World:
    """Decisions of a run, and the connections that it holds open.

    Attributes:
        placement: this process's place among the others.
        device: of this rank.
        backend: of the process group, ``None`` where there is none.
        layout: which share of the data this rank takes.
        options: of the run; replaced as a whole where `seed_everything` changes the seed.
        group: the process group. It is held here so that no model of the user's is the last to hold it: torch would
            end it then with the interpreter's lock taken, for which gloo's threads wait forever.
        store: where the ranks met.
        secret: of the run, with which its ranks sign objects; empty where there is none, ``None`` until ranks in a
            group that the user made need one.
        channel: the side channel to the other ranks, where distwrap made the group.
        groups: the number of process groups that this rank has made with the others.
        cleanup: undoes what joining has changed in this process.
    """

    placement: Placement
    device: torch.device
    backend: str | None = None
    options: Options = field(default_factory=Options)
    layout: Layout = field(init=False)
    group: object = None
    store: Store | None = None
    secret: bytes | None = field(default=None, repr=False)
    channel: Channel | None = None
    groups: int = 0
    cleanup: ExitStack = field(default_factory=ExitStack)
    _parts: dict[type[RunPart], RunPart] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _making: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.layout = Layout(self.placement.rank, self.placement.world_size)
        if self.options.seed is None:
            self.options = replace(self.options, seed=given_seed)

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy of the run, which is made here if it does not exist yet."""
        return strategies.make(self.options.strategy)

    def arrange(self) -> None:
        """Let the strategy that was chosen, if any, arrange the ranks for the data, once they have met.

        Raises:
            OptionError: the layout is not that of its group's ranks.
        """
        strategy = self.strategy
        layout = None if self.placement.world_size == 1 else strategy.setup(self)
        if layout is None:
            return
        group = layout.group if isinstance(layout, Layout) else None
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if not isinstance(layout, Layout) or (layout.rank, layout.size) != (rank, size):
            raise OptionError(
                f"{type(strategy).__name__}.setup() returned {layout!r} on rank {self.placement.rank}, which has share "
                f"{rank} of {size} in its group. Return Layout(rank in the group, size of the group, group), or None."
            )
        self.barrier()  # a rank that left now would cut the connections of groups which others still make
        self.layout = layout

    def barrier(self) -> None:
        """Wait until every rank is here; on this rank's device, where torch would warn that it was told none."""
        on_device = self.device.index is not None and "gloo" not in dist.get_backend()
        dist.barrier(device_ids=[self.device.index] if on_device else None)

    def new_group(self, ranks: Sequence[int] | None = None, backend: str | None = None) -> ProcessGroup:
        """Return another process group; every rank calls it.

        Args:
            ranks: its ranks; by default all.
            backend: by default that of the run.
        """
        timeout = timedelta(seconds=self.options.timeout)
        group: ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timeout)
        self.count_group()
        return group

    def count_group(self) -> None:
        """Tell the others that this rank has made a group, as they do: none leaves before all have made its last."""
        self.groups += 1
        if self.store is not None:
            count_in(self.store, f"group {self.groups}", self.placement.world_size)

    @property
    def tells_others(self) -> bool:
        """Whether there are other ranks, and a side channel to them."""
        return self.channel is not None and self.placement.world_size > 1

    def part(self, kind: type[Part]) -> Part:
        """Return a room's state of this run; it is made at the first call.

        Example:
            >>> from distwrap.supervision.activity import Activity
            >>> current_world().part(Activity) is current_world().part(Activity)
            True
        """
        found = self._parts.get(kind)
        if found is None:
            with self._making:
                found = self._parts.get(kind)
                if found is None:
                    found = self._parts[kind] = kind(self)
        return cast("Part", found)

    def count(self, name: str) -> int:
        """Return how many times this run has counted a name, from 1: alike on ranks that make the same calls."""
        self._counts[name] += 1
        return self._counts[name]

    @property
    def counts(self) -> Counter[str]:
        """The counts of this run, by name."""
        return self._counts

    def wait(self) -> None:
        """Let all parts wait for this rank's own work in the background."""
        for part in list(self._parts.values()):
            part.wait()

    def conclude(self) -> None:
        """Let all parts look at what the run has done; every rank calls it, and an error is the function's."""
        for part in list(self._parts.values()):
            part.conclude()

    def settle(self) -> None:
        """Let all parts bring to an end what is under way; every rank calls it, and it may be called again."""
        self.wait()
        for part in list(self._parts.values()):
            part.settle()

    def close(self) -> None:
        """Close all parts, the one that was made last first."""
        with ExitStack() as stack:
            for part in self._parts.values():
                stack.callback(part.close)
        self._parts.clear()


given_seed: int | None = None  # of a `seed_everything` outside of a run, which the next runs take over

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
        _ambient[1].close()
        _ambient[1].cleanup.close()
    _current = _ambient = None


def _ambient_world() -> World:
    global _ambient
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    env = os.environ
    key = (group, env.get("RANK"), env.get("WORLD_SIZE"), env.get("LOCAL_RANK"))
    if _ambient is None or _ambient[0] != key:
        if _ambient is not None and simulated.running is None:  # else it is that of this process
            _ambient[1].close()
            _ambient[1].cleanup.close()
        found = detect(env) if group is None else _placement_of_group()
        placement = found if isinstance(found, Placement) else Placement()  # a node whose ranks are yet to start
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
    if (every_rank or current_world().placement.rank == 0) and not switched_on(os.environ, QUIET):
        print_notice(text)


def is_first_time(key: str) -> bool:
    """Return whether this is the first time in this run that this is asked for a key."""
    return current_world().count(f"said {key}") == 1


def say_once(key: str, text: str) -> None:
    """Print a line on rank 0's standard error, as `say` does, the first time that a run comes to it."""
    if is_first_time(key):
        say(text)


def placement() -> Placement:
    """Return where this process stands: right before, during and after the group's life.

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
    """Return this process's rank among those on its node."""
    return current_world().placement.local_rank


def local_world_size() -> int:
    """Return the number of processes on this node."""
    return current_world().placement.local_world_size


def node_rank() -> int:
    """Return which node this is, 0 where there is only one."""
    return current_world().placement.node_rank


def is_rank_zero() -> bool:
    """Return whether this is rank 0, as it is in a single process."""
    return current_world().placement.rank == 0


def device() -> torch.device:
    """Return the device of this rank.

    Example:
        >>> device().type in ("cpu", "cuda")
        True
    """
    return current_world().device
