"""``strategy="horovod"``: replicas whose gradients Horovod averages; extra ``horovod``.

DDP collects gradients and decides when they are sent, as for every algorithm in `distwrap.comm`, and Horovod sends
them. So accumulation, clipping, unused parameters and the comparison of ranks work as under DDP. horovodrun sets
Horovod's variables; otherwise rank 0 runs the rendezvous server for Horovod's gloo, on loopback with one node.
Source: https://horovod.readthedocs.io/en/stable/pytorch.html, and ``horovod/runner/gloo_run.py`` in its repository.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from distwrap.checks import Check, is_number, one_of
from distwrap.comm import Averager, Bucket, GradientAlgorithm, Link
from distwrap.comm.base import option
from distwrap.devices.selection import visible_devices
from distwrap.environments.variables import variables_set
from distwrap.errors import LaunchError, OptionError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import Layout, RunPart, World, current_world
from distwrap.network import interfaces
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.strategies.ddp import DDPStrategy
from distwrap.supervision.activity import Activity

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


_LOOK_SECONDS = 0.0002  # between two checks of an exchange
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, kw_only=True)
class HorovodAllReduce(GradientAlgorithm):
    """Mean or Adasum of gradients by Horovod, with the options of `HorovodStrategy`."""

    compression: str = option("none", one_of("compression", ("none", "fp16")))
    adasum: bool = False
    predivide: float = option(1.0, Check("a positive number", lambda value: is_number(value) and value > 0, float))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adasum and self.predivide != 1.0:
            raise OptionError("HorovodStrategy(adasum=True): Adasum has no predivide: leave predivide out.")

    def check(self, world_size: int) -> None:
        if self.adasum and world_size & (world_size - 1):
            raise OptionError(f"HorovodStrategy(adasum=True) is for 2, 4, 8, … ranks, and there are {world_size}.")

    def averager(self, link: Link, device: torch.device) -> Averager:
        return _HorovodMean(self, link.size)


class _HorovodMean(Averager):
    def __init__(self, algorithm: HorovodAllReduce, size: int) -> None:
        import horovod.torch as hvd

        self._hvd, self._algorithm, self._size = hvd, algorithm, size
        self._group = current_world().part(HorovodGroup)
        self._number = current_world().count("horovod")  # of this model, the same on all ranks

    def average(self, bucket: Bucket) -> None:
        hvd, algorithm = self._hvd, self._algorithm
        self._group.begin()
        values = bucket.values.float() if bucket.values.dtype == torch.bfloat16 else bucket.values  # it lacks bfloat16
        # Horovod's own mean divides after the sum, which may overflow.
        before, after, kind = 1 / algorithm.predivide, algorithm.predivide / self._size, hvd.Compression.none
        if algorithm.compression == "fp16":
            before, after, kind = 1 / self._size, 1.0, hvd.Compression.fp16
            if not (values.abs() <= _LARGEST).all():
                bucket.complain()
        how: dict[str, Any] = {"op": hvd.Sum, "prescale_factor": before, "postscale_factor": after}
        if algorithm.adasum:
            how = {"op": hvd.Adasum}
        values, context = kind.compress(values)
        # With the same name in each step, Horovod need not ask all ranks whether they are ready.
        first = bucket.name_of.get(id(bucket.parameters[0]), "") if bucket.parameters else ""
        name = f"distwrap.{self._number}.{first}.{values.numel()}"
        self._wait_for(hvd.allreduce_async_(values, name=name, **how))
        bucket.values.copy_(kind.decompress(values, context))

    def _wait_for(self, handle: int) -> None:
        """Wait for an exchange with the time limit of collectives; Horovod itself has none."""
        from horovod.common.exceptions import HorovodInternalError

        timeout, began = current_world().options.timeout, time.monotonic()
        with current_world().part(Activity).waiting(timed=False):
            while not self._hvd.poll(handle):
                if time.monotonic() > began + timeout:
                    words = f"Timed out waiting {timeout:g} s for a gradient that not all ranks sent"
                    raise HorovodInternalError(words)
                time.sleep(_LOOK_SECONDS)
            self._hvd.synchronize(handle)


class HorovodStrategy(DDPStrategy):
    """Strategy of replicas that average their gradients with Horovod.

    Args:
        compression: ``"fp16"`` rounds sent gradients to float16.
        adasum: whether to add gradients by Adasum, which needs Horovod built with MPI or NCCL, and a power of two
            ranks.
        predivide: Horovod's ``gradient_predivide_factor``: gradients are divided by it before the sum, and multiplied
            by it after the sum.
        backend: the backend of torch's process group, which carries everything except gradients.
        **ddp_options: the options of `DDPStrategy`.

    Raises:
        OptionError: an argument has a wrong value, or two contradict each other.

    Example:
        >>> HorovodStrategy(compression="fp16").algorithm.compression
        'fp16'
    """

    is_simulated = False
    exchanges = "Horovod exchanges the gradients"

    def __init__(
        self,
        *,
        compression: Literal["none", "fp16"] = "none",
        adasum: bool = False,
        predivide: float = 1.0,
        backend: str | None = None,
        **ddp_options: Any,
    ) -> None:
        if "comm" in ddp_options:
            raise OptionError("HorovodStrategy: Horovod exchanges the gradients: leave comm= out.")
        self.algorithm = HorovodAllReduce(compression=compression, adasum=adasum, predivide=predivide)
        # Horovod's own script has no buckets in addition to the gradients.
        super().__init__(backend=backend, comm=self.algorithm, **{"gradient_as_bucket_view": True, **ddp_options})

    def check(self, run: Options) -> None:
        require_package("horovod", "strategy='horovod'", "strategy='ddp'")
        super().check(run)

    def setup(self, world: World) -> Layout | None:
        group = world.part(HorovodGroup)
        if self.algorithm.adasum:
            group.require_adasum()
        return super().setup(world)
