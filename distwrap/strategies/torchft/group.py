"""The process group that torchft makes again whenever ranks are lost or come back; it is torch's default group.

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

_CONNECT_SECONDS = 30.0  # time for the members of a new group to connect


class MemberGroup:
    """Default process group of the present ranks, for torchft's manager.

    Args:
        rank: this rank's number in the launch, which never changes.
        seconds: the time limit of a collective.
        on_change: called with the numbers of the members, in the order of their ranks, for each new group.

    Attributes:
        name: the name of the last group, which is the same on its members.
    """

    supports_reconfigure = True
    _device_types = ()  # the manager need not check backends: each exchange reports errors

    def __init__(self, rank: int, seconds: float, on_change: Callable[[list[int]], None]) -> None:
        self._number, self._seconds, self._on_change = rank, seconds, on_change
        self._job = uuid.uuid4().hex
        self._served, self._port = stores.serve("127.0.0.1", [0], self._job, _CONNECT_SECONDS)
        self._store: object = None  # the group's store, which must live as long
        self._sockets: dict[int, str] = {}
        self.name = ""
        os.register_at_fork(after_in_child=self._close_sockets)

    def get_reconfigure_handle(self) -> str:
        """Return the address of this rank's store for the others."""
        return json.dumps({"id": self._job, "port": self._port, "rank": self._number})

    def reconfigure(self, opts: Any) -> _Done:
        """Make a new group of the members with these handles, in their order."""
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
        """Whether there is a group."""
        return dist.is_initialized()

    def abort(self) -> None:
        """Leave the group, so that members which wait for this rank notice it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _close_sockets(self) -> None:
        """Close the group's connections in a process forked from this one, such as a loader's worker.

        If they stayed open there after this rank has left the group, members would keep waiting for it.
        """
        for fd, name in self._sockets.items():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == name:
                    os.close(fd)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Sum tensors over the members."""
        group: Any = dist.group.WORLD
        return group.allreduce(tensors, opts)


def _sockets() -> dict[int, str]:
    """Return the sockets of this process by descriptor; empty if the system does not list them."""
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
        """Return at once."""
