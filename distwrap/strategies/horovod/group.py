"""Horovod's own group of the ranks of a run: its start and end.

horovodrun sets Horovod's variables. Otherwise rank 0 runs the rendezvous server for Horovod's gloo, on loopback with
one node.
Source: https://github.com/horovod/horovod, ``horovod/runner/gloo_run.py``.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from distwrap.devices.selection import visible_devices
from distwrap.environments.variables import variables_set
from distwrap.errors import LaunchError, OptionError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import RunPart, World
from distwrap.network import interfaces

_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"


class HorovodGroup(RunPart):
    """Horovod's group, from the first model of a run to its end.

    Raises:
        LaunchError: Horovod numbers the ranks differently, or nodes have different numbers of ranks.
    """

    def __init__(self, world: World) -> None:
        import horovod.torch as hvd

        self._hvd, self._is_settled = hvd, False
        if hvd.is_initialized():
            raise LaunchError(
                f"{socket.gethostname()}: Horovod was started in this process already, by the program or by a "
                "run that has failed. Leave hvd.init() to distwrap, and start again in a new process."
            )
        place = world.placement
        with _variables({"GLOO_TIMEOUT_SECONDS": max(30, round(world.options.timeout))}):
            if _ADDRESS in os.environ:
                hvd.init()
            else:
                self._init(world)
        if (hvd.rank(), hvd.size()) != (place.rank, place.world_size):
            raise LaunchError(
                f"rank {place.rank} of {place.world_size} on {socket.gethostname()} is rank {hvd.rank()} of "
                f"{hvd.size()} for Horovod: start the ranks by horovodrun or by distwrap, not by both."
            )

    def require_adasum(self) -> None:
        """Refuse Adasum if this build of Horovod cannot do it.

        Raises:
            OptionError: it was built without MPI and NCCL.
        """
        if not (self._hvd.mpi_enabled() or (visible_devices().count and self._hvd.nccl_built())):
            raise OptionError(
                "HorovodStrategy(adasum=True): this Horovod was built without MPI and without NCCL, and only these add "
                "by Adasum. Build it with HOROVOD_WITH_MPI=1, or leave adasum out."
            )

    def begin(self) -> None:
        """Note that an exchange has begun, which some ranks may not reach."""
        self._is_settled = False

    def settle(self) -> None:
        self._is_settled = True

    def close(self) -> None:
        if self._is_settled:
            self._hvd.shutdown()
        else:  # the run has failed: Horovod would wait for lost ranks
            atexit.unregister(self._hvd.shutdown)

    def _init(self, world: World) -> None:
        place, server, meeting = world.placement, None, ("", 0)
        sizes = gather_object(place.local_world_size)
        if len(set(sizes)) > 1:
            raise LaunchError(
                f"rank {place.rank} on {socket.gethostname()}: Horovod needs the same number of ranks on each "
                f"node, and the nodes have {', '.join(map(str, sorted(set(sizes))))}."
            )
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if place.rank == 0:
            server = _serve(interfaces.interfaces().get(interface, ["127.0.0.1"])[0])
            meeting = server.server_address[:2]
        host, port = broadcast(meeting)
        mine = {
            "RANK": place.rank,
            "SIZE": place.world_size,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_SIZE": place.local_world_size,
            "CROSS_RANK": place.node_rank,
            "CROSS_SIZE": place.nnodes,
            "HOSTNAME": socket.gethostname(),
            "GLOO_RENDEZVOUS_ADDR": host,
            "GLOO_RENDEZVOUS_PORT": port,
            "GLOO_IFACE": interface,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
        }
        try:
            with _variables(mine):
                self._hvd.init()
            dist.barrier()  # no rank needs the server any more
        finally:
            if server is not None:
                server.shutdown()
                server.server_close()


def _variables(values: Mapping[str, object]) -> AbstractContextManager[None]:
    """Set Horovod's unset variables, only briefly, as a launch would take them for horovodrun's."""
    named = {f"HOROVOD_{name}": str(value) for name, value in values.items() if value != ""}
    return variables_set({name: value for name, value in named.items() if name not in os.environ})


def _serve(host: str) -> Any:
    """Start the rendezvous server in a thread, at any port of this address."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((host, 0), RendezvousHandler, False)
    server.init([])
    threading.Thread(target=server.serve_forever, name="distwrap-horovod", daemon=True).start()
    return server
