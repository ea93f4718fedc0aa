"""The process group that torchft arranges anew whenever ranks are lost or come back: torch's own default group.

Source: https://docs.pytorch.org/torchft/
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from distwrap._internals.torch_groups import set_group_timeout
from distwrap.network import stores

_CONNECT_SECONDS = 30.0  # for the members of a new group to find each other


class MemberGroup:
    """Group of the ranks that are there, which is torch's default group; for torchft's manager.

    Args:
        rank: this one's number in the launch, which it keeps.
        seconds: time limit of a collective.
        on_change: called with the numbers of the members, in the order of their ranks, when there is a new group.

    Attributes:
        name: of the last group, the same on its members.
    """

    supports_reconfigure = True
    _device_types = ()  # in whose backends the manager would look for errors, which it hears of from each exchange

    def __init__(self, rank: int, seconds: float, on_change: Callable[[list[int]], None]) -> None:
        self._number, self._seconds, self._on_change = rank, seconds, on_change
        self._job = uuid.uuid4().hex
        self._served, self._port = stores.serve("127.0.0.1", [0], self._job, _CONNECT_SECONDS)
        self._store: object = None  # of the group; it must live as long
        self._sockets: dict[int, str] = {}
        self.name = ""
        os.register_at_fork(after_in_child=self._close_sockets)

    def get_reconfigure_handle(self) -> str:
        """Return where the others find this rank's store."""
        return json.dumps({"id": self._job, "port": self._port, "rank": self._number})

    def reconfigure(self, opts: Any) -> _Done:
        """Make a new group of the members whose handles are given, in their order."""
        self.abort()
        members = [json.loads(handle) for handle in opts.handles]
        rank = [member["id"] for member in members].index(self._job)
        first = members[0]
        store, _ = stores.connect("127.0.0.1", [first["port"]], first["id"], _CONNECT_SECONDS, f"rank {self._number}")
        self._store = store
        before = _sockets()
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(opts.uuid), store),
            rank=rank,
            world_size=len(members),
            timeout=timedelta(seconds=min(_CONNECT_SECONDS, self._seconds)),
        )
        self.name = str(opts.uuid)
        self._sockets = dict(_sockets().items() - before.items())
        set_group_timeout(self._seconds)
        self._on_change([int(member["rank"]) for member in members])
        return _Done()

    @property
    def is_there(self) -> bool:
        """Whether the group stands."""
        return dist.is_initialized()

    def abort(self) -> None:
        """Leave the group, so that members that wait for this rank in vain learn of it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _close_sockets(self) -> None:
        """Close the group's connections in a process that was forked of this one, as a loader's worker.

        There they would stay open when this one leaves the group, and a member that waits for it would wait on.
        """
        for fd, name in self._sockets.items():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == name:
                    os.close(fd)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Add tensors over the members."""
        group: Any = dist.group.WORLD
        return group.allreduce(tensors, opts)


def _sockets() -> dict[int, str]:
    """Return the sockets of this process by their descriptors; none where the system does not tell."""
    found = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{fd}")
                if name.startswith("socket:"):
                    found[int(fd)] = name
    return found


class _Done:
    def wait(self) -> None:
        """Nothing: it is done."""
