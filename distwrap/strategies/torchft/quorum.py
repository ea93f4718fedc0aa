"""Quorums of the present ranks by torchft's manager, and its work for a step.

Source: https://docs.pytorch.org/torchft/manager.html
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.errors import ArrivalError, CollectiveError, DistwrapError
from distwrap.group.setup import ARRIVAL_SECONDS
from distwrap.group.world import Layout, World, say
from distwrap.network import stores
from distwrap.network.waiting import wait_until
from distwrap.strategies.torchft.group import MemberGroup
from distwrap.strategies.torchft.transport import GroupTransport
from distwrap.wording import first_line, named_ranks

_FIRST_QUORUM_SECONDS = 20.0  # time for all ranks to join the first group
_RETURN_SECONDS = 86400.0  # time for the others to reach a place that admits ranks, after a long evaluation

_FIRST_STEP = 1  # torchft's number: one more than a returned rank's, from which nobody may take over


class Quorum:
    """Members of a run, and this rank's place among them.

    Args:
        world: the world of the run, whose placement follows the members.
        lighthouse: the address of torchft's lighthouse, which knows the present ranks.
        store: the store of the launch, in which ranks report their progress to the launcher.
        fewest: the number of members below which no step is taken.
        state: returns the state for a member that is behind.
        take_over: loads such a state.

    Attributes:
        number: this rank's number in the launch, which never changes.
        members: the numbers of the members, in the order of their ranks.
        arrangement: the number of times that the members have changed.
    """

    def __init__(
        self,
        world: World,
        lighthouse: str,
        store: Store,
        fewest: int,
        state: Callable[[], dict[str, Any]],
        take_over: Callable[[dict[str, Any]], None],
    ) -> None:
        place = world.placement
        self.number, self._count = place.rank, place.world_size
        self.members: list[int] = []
        self.arrangement = 0
        self.store = store
        self._world, self._lighthouse, self._fewest = world, lighthouse, fewest
        self._state, self._take_over = state, take_over
        self._seconds = world.options.timeout
        self._manager: Any = None
        self._has_arrived = False
        self._group: MemberGroup | None = None
        self._own_store: object = None  # torchft's, which must live as long as the manager
        for name in ("torchft.manager", "torchft_quorums", "torchft_commits", "torchft_errors"):
            logger: Any = logging.getLogger(name)
            logger.setLevel(logging.CRITICAL)  # nobody needs their messages of each step
            logger.warn = logger.warning  # torchft calls the deprecated name, an error under -W error

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return 0 if self._manager is None else int(self._manager.current_step()) - _FIRST_STEP

    @property
    def error(self) -> Exception | None:
        """The reason why the current step will not be committed, or ``None``."""
        found = self.manager.errored()
        return None if found is None else found.original_exception

    @property
    def manager(self) -> Any:
        """torchft's manager."""
        assert self._manager is not None
        return self._manager

    def has_begun(self) -> bool:
        """Return whether the run had begun before this rank was started."""
        return bool(self.store.check(["begun"]))

    def arrive(self) -> None:
        """Wait for all ranks at the start of the run.

        Raises:
            ArrivalError: not all ranks arrived.
        """
        self.store.set(f"arrived/{self.number}", "")
        keys = [f"arrived/{rank}" for rank in range(self._count)]
        limit = min(self._seconds, ARRIVAL_SECONDS)
        if not wait_until(lambda: self.store.check(keys), limit):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise ArrivalError(
                f"rank {self.number} on {socket.gethostname()} waited {limit:g} s, and {named_ranks(missing)} "
                f"of {self._count} did not arrive. Look at what the missing ranks printed."
            )
        self.begin()
        self.manager.load_state_dict({"step": _FIRST_STEP, "batches_committed": 0})
        deadline = time.monotonic() + _FIRST_QUORUM_SECONDS
        while self.find(admit=True) is not None or len(self.members) < self._count:
            if time.monotonic() > deadline and self.members:
                break
            time.sleep(0.01)
        self.tell("there")
        self.store.set("begun", "")

    def begin(self) -> None:
        """Start the manager, which registers this rank at the lighthouse."""
        self._group = MemberGroup(self.number, self._seconds, self._rearranged)
        seconds = timedelta(seconds=self._seconds)
        self._own_store, port = stores.serve("127.0.0.1", [0], "replica", self._seconds)
        self._manager = _manager(
            pg=self._group,
            load_state_dict=self._take_over,
            state_dict=self._state,
            min_replica_size=self._fewest,
            use_async_quorum=False,
            init_sync=False,
            timeout=seconds,
            quorum_timeout=timedelta(seconds=_RETURN_SECONDS),
            connect_timeout=timedelta(seconds=min(60.0, self._seconds)),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=port,
            lighthouse_addr=self._lighthouse,
            replica_id=f"{self.number:06d}",
            hostname="127.0.0.1",
            checkpoint_transport=GroupTransport(self._world.secret or b""),
        )

    def _rearranged(self, members: list[int]) -> None:
        """Update this rank's placement for new members; called in torchft's own thread."""
        rank, size = members.index(self.number), len(members)
        self._world.placement = replace(
            self._world.placement, rank=rank, world_size=size, local_rank=rank, local_world_size=size
        )
        self._world.layout = Layout(rank, size)
        before, self.members = self.members, members
        self.arrangement += 1
        lost, new = sorted(set(before) - set(members)), sorted(set(members) - set(before))
        stayed = set(before) & set(members)
        for number in lost:
            self.store.set(f"gone/{number}", "")
        if stayed and min(stayed) == self.number and (lost or new) and self._has_arrived:
            changes = [f"{named_ranks(lost)} missing"] if lost else []
            changes += [f"{named_ranks(new)} back"] if new else []
            text = f"the training goes on with {size} of {self._count} ranks at step {self.step} ({', '.join(changes)})"
            say(text, every_rank=True)

    @property
    def has_group(self) -> bool:
        """Whether there is a group of the members; a rank leaves a group that has failed."""
        return self._group is not None and self._group.is_there

    def find(self, *, admit: bool) -> Exception | None:
        """Form a group of the present ranks; return the error if that fails.

        Args:
            admit: whether ranks that are not members may join.
        """
        # A rank that comes back waits while the others evaluate or save.
        limit = _RETURN_SECONDS if not self.members and self.has_begun() else 2 * self._seconds + 10
        try:
            self.manager.start_quorum(shrink_only=not admit, timeout=timedelta(seconds=limit))
        except DistwrapError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise CollectiveError(
                f"rank {self.number} on {socket.gethostname()} asked torchft's lighthouse which ranks take "
                f"part, and got no answer within {limit:g} s: either another rank is alive but does not reach "
                f"the step, or the lighthouse is gone ({first_line(error)})."
            ) from error
        return self.error

    def doom(self, error: Exception) -> None:
        """Mark the current step, so that it is not committed."""
        self.manager.report_error(error)

    def fail(self, error: Exception) -> None:
        """Leave a group in which an exchange failed; the others notice it, and the next quorum makes a new one."""
        assert self._group is not None
        self.store.set(f"failed/{self._group.name}", "")
        self.doom(error)
        self.commit()

    def commit(self) -> bool:
        """End a step, and return whether to apply its change of the weights."""
        failed = self.error is not None
        verdict = bool(self.manager.should_commit())
        if failed:
            self._leave_group()
        return verdict

    def mean(self, flat: torch.Tensor) -> None:
        """Replace numbers by their mean over the members; if that fails, the step is not committed."""
        self.manager.allreduce(flat).wait()

    def of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the first member's tensor; if that fails, the step is not committed."""
        sent = tensor.clone() if self._world.placement.rank == 0 else torch.zeros_like(tensor)
        self.manager.allreduce(sent, reduce_op=dist.ReduceOp.SUM).wait()
        return tensor if self.error is not None else sent

    def tell(self, what: str) -> None:
        """Report this process's progress to the launcher."""
        self.store.set(f"{what}/{os.getpid()}", "")
        if what == "there":
            self._has_arrived = True
            self.store.delete_key(f"gone/{self.number}")

    def end(self) -> bool:
        """Wait until all members are done or lost, or one needs a new group, and return whether one does.

        There is no time limit, since a member may still export the model.
        """
        self.store.set(f"end/{self.number}", "")
        assert self._group is not None
        failed = [f"failed/{self._group.name}"]

        def is_over() -> bool:
            return self.store.check(failed) or all(
                self.store.check([f"end/{each}"]) or self.store.check([f"gone/{each}"]) for each in self.members
            )

        wait_until(is_over, math.inf, longest_pause=0.05)
        return bool(self.store.check(failed))

    def close(self) -> None:
        """Leave the group, and end the manager."""
        self._leave_group()
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._manager = None

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.abort()


def _manager(**arguments: Any) -> Any:
    """Make torchft's manager with its server on loopback only; by default it listens everywhere, and trusts anybody."""
    from torchft import manager

    server = manager.ManagerServer
    manager.ManagerServer = lambda **given: server(**{**given, "bind": "127.0.0.1:0"})
    try:
        return manager.Manager(**arguments)
    finally:
        manager.ManagerServer = server
