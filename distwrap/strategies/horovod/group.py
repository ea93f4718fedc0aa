"""Horovod's own group of the ranks of a run: how they find each other, and part again.

Under horovodrun Horovod's variables are there already. Otherwise rank 0 serves what Horovod's gloo wants to know of the
others, on loopback where there is one node.
Source: https://github.com/horovod/horovod, ``horovod/runner/gloo_run.py``.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from typing import Any

import torch
import torch.distributed as dist

from distwrap.errors import LaunchError, OptionError
from distwrap.group.world import RunPart, World

_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"


class HorovodGroup(RunPart):
    """Horovod's group, from the first model of a run to its end.

    Raises:
        LaunchError: Horovod counts the ranks otherwise.
    """

    def __init__(self, world: World) -> None:
        import horovod.torch as hvd

        self._hvd, self._is_settled = hvd, False
        if hvd.is_initialized():
            raise LaunchError(
                f"{socket.gethostname()}: Horovod was started in this process already: by the program, which is to "
                f"leave hvd.init() to distwrap, or by a run that has failed. Begin anew in a new process."
            )
        place = world.placement
        if _ADDRESS in os.environ:
            hvd.init()
        else:
            self._init(world)
        if (hvd.rank(), hvd.size()) != (place.rank, place.world_size):
            raise LaunchError(
                f"rank {place.rank} of {place.world_size} on {socket.gethostname()} is rank {hvd.rank()} of "
                f"{hvd.size()} for Horovod: start the ranks by horovodrun, or by distwrap, and not by both."
            )

    def require_adasum(self) -> None:
        """Refuse Adasum where Horovod cannot do it.

        Raises:
            OptionError: it was built without MPI and NCCL.
        """
        if not (self._hvd.mpi_enabled() or (torch.cuda.is_available() and self._hvd.nccl_built())):
            raise OptionError(
                "HorovodStrategy(adasum=True): this Horovod was built without MPI and without NCCL, and only these add "
                "by Adasum. Build it with HOROVOD_WITH_MPI=1, or leave adasum out."
            )

    def begin(self) -> None:
        """Take note that an exchange is under way, which not every rank may come to."""
        self._is_settled = False

    def settle(self) -> None:
        self._is_settled = True

    def close(self) -> None:
        if self._is_settled:
            self._hvd.shutdown()
        else:  # the run has failed: Horovod would wait for ranks that come no more
            atexit.unregister(self._hvd.shutdown)

    def _init(self, world: World) -> None:
        place, server = world.placement, None
        alone = place.nnodes == 1
        host = "127.0.0.1" if alone else str(place.master_addr)
        port = torch.zeros(1, dtype=torch.int64)
        if place.rank == 0:
            server = _serve(host)
            port[0] = server.server_address[1]
        port = port.to(world.device)
        dist.broadcast(port, 0)
        mine = {
            "RANK": place.rank,
            "SIZE": place.world_size,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_SIZE": place.local_world_size,
            "CROSS_RANK": place.node_rank,
            "CROSS_SIZE": place.nnodes,
            "HOSTNAME": socket.gethostname(),
            "GLOO_RENDEZVOUS_ADDR": host,
            "GLOO_RENDEZVOUS_PORT": int(port),
            "GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0],
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
        }
        added = {f"HOROVOD_{name}": str(value) for name, value in mine.items() if value != ""}
        added = {name: value for name, value in added.items() if name not in os.environ}
        os.environ.update(added)
        try:
            self._hvd.init()
            dist.barrier()  # nobody asks the server any more
        finally:
            for name in added:  # by which another launch would take this process for one of horovodrun's
                del os.environ[name]
            if server is not None:
                server.shutdown()
                server.server_close()


def _serve(host: str) -> Any:
    """Serve what ranks put and get, from a thread, at any port of this address."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((host, 0), RendezvousHandler, False)
    server.init([])
    threading.Thread(target=server.serve_forever, name="distwrap-horovod", daemon=True).start()
    return server
