"""Set the process group up, and take it down on every path."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

# Imported before there is a group: default arguments in it take the group of that moment, and would keep its threads
# alive to the end of the interpreter, where they now and then abort it.
import torch.distributed.nn.functional
from torch.distributed import FileStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from distwrap.errors import ArrivalError, OptionError, PlacementError
from distwrap.group import devices
from distwrap.group.world import World, activate, active_world, current_world, deactivate
from distwrap.placement import Placement, detect, own

ARRIVAL_SECONDS = 120.0  # for all ranks to come; part of `timeout`, which is for a collective
_LEAVE_SECONDS = 10.0  # for the others to leave before the rank that holds the store does

_generation = 0  # a second group in the same processes must not read the first one's keys


class ProcessGroup(AbstractContextManager["ProcessGroup"]):
    """What `setup_process_group` returns: leave the ``with`` and the group is gone, if this call made it."""

    def __init__(self, ours: bool) -> None:
        self._ours = ours

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ours:
            teardown_process_group()


def setup_process_group(
    backend: str = "auto", *, timeout: float | None = None, device: torch.device | str | int | None = None
) -> ProcessGroup:
    """Join the other processes: find out who started us, meet, choose the device.

    A plain call or a ``with``. A no-op in a single process, the second time, and where the user has made a group.

    Args:
        backend: ``"auto"`` is NCCL on CUDA, gloo on the CPU, else what torch names for the accelerator.
        timeout: seconds for a collective, 600 by default; at most 120 of them for all ranks to arrive.
        device: this rank's device; by default the one of its local rank.

    Returns:
        A context manager that takes the group down again.

    Raises:
        PlacementError: the launcher's variables are incomplete or contradictory.
        ArrivalError: not all ranks came in time; names the missing ones.

    Example:
        >>> with setup_process_group():
        ...     print(world_size())
        1

    See https://docs.pytorch.org/docs/stable/distributed.html#initialization.
    """
    if active_world() is not None or dist.is_initialized():
        return ProcessGroup(ours=False)
    placement = detect(os.environ)
    if placement.source == "single":
        return ProcessGroup(ours=False)
    chosen = None if device is None else _as_device(device)
    join(placement, backend=backend, timeout=600.0 if timeout is None else timeout, device=chosen)
    return ProcessGroup(ours=True)


def join(
    placement: Placement,
    *,
    backend: str = "auto",
    timeout: float = 600.0,
    device: torch.device | None = None,
    **run: Any,
) -> World:
    """Meet the other ranks and make their world the current one."""
    global _generation
    if timeout <= 0:
        raise OptionError(f"timeout={timeout}: it must be a positive number of seconds.")
    if run.get("seed") is None:
        run["seed"] = current_world().seed  # of a seed_everything() before
    device = device or devices.choose_device(placement, devices.visible_devices())
    devices.use(device)
    backend = devices.choose_backend(backend, device)
    _generation += 1
    with ExitStack() as cleanup:
        if placement.nnodes == 1:
            cleanup.enter_context(_loopback_only())
        store = _meet(placement, min(timeout, ARRIVAL_SECONDS))
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type != "cpu" and backend != "gloo" else None,
        )
        store.set(f"joined/{placement.rank}", "")
        world = World(
            placement, device, backend=backend, timeout=timeout, store=store, cleanup=cleanup.pop_all(), **run
        )
    activate(world)
    return world


def teardown_process_group() -> None:
    """Leave the group that `setup_process_group` or the decorator made; a no-op where there is none.

    A group that the user made is left alone.
    """
    _teardown(destroy=True)


def finish_process_group() -> None:
    """Leave the group at the very end of a process, which closes its sockets faster than gloo does.

    gloo's own way takes some 20 ms. Other backends, as NCCL, want to be taken down.
    """
    world = active_world()
    _teardown(destroy=world is not None and world.backend != "gloo")


def _teardown(*, destroy: bool) -> None:
    world = active_world()
    if world is None:
        return
    deactivate()
    with world.cleanup:
        for model in world.models if destroy else ():
            model.release()
        if world.store is not None:
            _leave(world.store, world.placement)
            if destroy and dist.is_initialized():
                dist.destroy_process_group()


def abandon_process_group() -> None:
    """Forget the group without a word to the others: the way out after a failure, where a goodbye could block."""
    world = active_world()
    deactivate()
    if world is not None:
        world.cleanup.close()


@contextmanager
def temporary_world(world: World) -> Iterator[World]:
    """Make a world the current one for the time of a ``with``, and leave its process group, if any, alone."""
    activate(world)
    try:
        yield world
    finally:
        deactivate()
        world.cleanup.close()


def single_world(**run: Any) -> World:
    """Describe a world of this one process."""
    placement = Placement()
    return World(placement, devices.choose_device(placement, devices.visible_devices()), **run)


def announce(world: World, launcher: str) -> None:
    """Say in one line on rank 0 what was decided; ``DISTWRAP_QUIET=1`` keeps it quiet."""
    place = world.placement
    if place.rank != 0 or os.environ.get("DISTWRAP_QUIET", "0") not in ("", "0"):
        return
    nodes = f"{place.nnodes} node{'s' if place.nnodes > 1 else ''}"
    ranks = f"{place.world_size} rank{'s' if place.world_size > 1 else ''}"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    through = f" on {interface}" if interface and "gloo" in str(world.backend) else ""
    print(
        f"distwrap: {ranks} on {nodes} ({socket.gethostname()}), {world.device.type}, {world.backend}{through}, "
        f"precision {world.precision}, started by {launcher}, {torch.get_num_threads()} thread(s) a rank",
        file=sys.stderr,
        flush=True,
    )


def _as_device(device: torch.device | str | int) -> torch.device:
    if isinstance(device, int):
        return torch.device(devices.visible_devices().kind, device)
    return torch.device(device)


def _meet(placement: Placement, seconds: float) -> Store:
    """Open the store, say that we are here, and wait until everybody has."""
    limit = timedelta(seconds=seconds)
    if own.STORE in os.environ:
        where = "the launching process"
        store: Store = FileStore(_opened(os.environ[own.STORE]), placement.world_size)
    else:
        where = f"{placement.master_addr}:{placement.master_port}"
        try:
            handler = rendezvous("env://", placement.rank, placement.world_size, timeout=limit)
            store = next(iter(handler))[0]
        except (dist.DistError, ValueError, OSError) as error:
            raise ArrivalError(
                f"rank {placement.rank} on {socket.gethostname()} found no meeting place at {where} within "
                f"{seconds:.0f} s ({_first_line(error)}). Is rank 0 running, and MASTER_ADDR and MASTER_PORT right?"
            ) from error
    store = PrefixStore(f"distwrap/{_generation}", store)
    store.set(f"here/{placement.rank}", f"{socket.gethostname()}:{os.getpid()}")
    names = [f"here/{rank}" for rank in range(placement.world_size)]
    deadline = time.monotonic() + seconds
    while not _all_set(store, names):
        if time.monotonic() < deadline:
            continue
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        raise ArrivalError(
            f"rank {placement.rank} on {socket.gethostname()} waited {seconds:.0f} s at {where}: "
            f"{placement.world_size - len(missing)} of {placement.world_size} ranks are here, "
            f"missing {_ranks(missing)}. Look at what they printed; they did not reach setup_process_group()."
        )
    return store


def _all_set(store: Store, names: list[str]) -> bool:
    """Wait for keys, but only for a moment: no signal, as Ctrl-C, is heard while torch waits."""
    for _ in range(20):  # torch looks into a file every 10 ms, and the ranks of one machine are quicker
        if store.check(names):
            return True
        time.sleep(0.0005)
    try:
        store.wait(names, timedelta(seconds=1))
    except dist.DistError:
        return False
    return True


@cache
def _opened(path: str) -> str:
    """Hold the launching process's file open ourselves, and return the path to it.

    torch opens the path again at each access, the last one being when the store is deleted, whenever that is; the
    number in the launching process may lead to another file by then.
    """
    return f"/proc/self/fd/{os.open(path, os.O_RDWR)}" if path.startswith("/proc/") else path


def _leave(store: Store, placement: Placement) -> None:
    """Close the door behind us only when nobody stands in it.

    A rank may be done while another is still connecting to it; and rank 0, where it holds the store in its own
    process, is the last to go.
    """
    limit = timedelta(seconds=_LEAVE_SECONDS)
    ranks = range(placement.world_size)
    try:
        joined = [f"joined/{rank}" for rank in ranks]
        if not _all_set(store, joined):
            store.wait(joined, limit)
        if own.STORE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return  # another process holds the store
        store.set(f"gone/{placement.rank}", "")
        if placement.rank == 0:
            store.wait([f"gone/{rank}" for rank in ranks], limit)
    except dist.DistError:
        pass  # whoever is gone without a goodbye has its own story to tell


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Keep gloo's sockets on loopback, unless the user chose an interface."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def require_group(what: str) -> None:
    """Refuse a collective in a world of several processes whose group is not there yet."""
    if not dist.is_initialized():
        place = current_world().placement
        raise PlacementError(
            f"{what} needs the process group, and rank {place.rank} of {place.world_size} "
            f"(started by {place.source}) has none yet: call setup_process_group() first."
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return ("rank " if len(ranks) == 1 else "ranks ") + shown + (", …" if len(ranks) > 16 else "")
