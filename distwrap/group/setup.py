"""Set the process group up, and take it down on every path."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distwrap.checks import SECONDS
from distwrap.devices import selection
from distwrap.devices.kinds import kind_of
from distwrap.environments import Node, Placement, detect, distwrap_environment
from distwrap.environments.ranks import forgotten_srun
from distwrap.environments.variables import variables_set
from distwrap.errors import LaunchError, OptionError, PlacementError
from distwrap.group import failures
from distwrap.group.resources import assign_resources
from distwrap.group.world import World, activate, active_world, current_world, deactivate, say
from distwrap.network import interfaces
from distwrap.network.rendezvous import await_last_group, loss_told, meet, say_goodbye
from distwrap.network.secret import agree_on_secret
from distwrap.network.stores import client_of
from distwrap.options import Options, check_words
from distwrap.simulated import simulation
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import Channel
from distwrap.supervision.notifier import Notifier
from distwrap.versions import ENDS_GROUPS_LOCKED

ARRIVAL_SECONDS = 120.0  # for all ranks to come; part of `timeout`, which is for a collective
_LAST_WORK_SECONDS = 0.1  # for a group's threads to be done with its last collective


class JoinedGroup(AbstractContextManager["JoinedGroup"]):
    """Context manager that takes the process group down at its end, if the call that returned it made the group."""

    def __init__(self, ours: bool) -> None:
        self._ours = ours

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._ours and error is not None and failures.is_failure(error):
            failures.tell(error)
            abandon_process_group()
        elif self._ours:
            teardown_process_group()


def setup_process_group(
    backend: str = "auto", *, timeout: float | None = None, device: torch.device | str | int | None = None
) -> JoinedGroup:
    """Join the other processes: find out who started them, meet them, and choose the device.

    Call it plainly, or in a ``with``. It does nothing in a single process, when it is called again with no other
    options, and where the user has made a process group.

    Args:
        backend: ``"auto"`` is NCCL on CUDA, gloo on the CPU, and on other accelerators the backend that torch names.
        timeout: seconds for a collective, by default 600. For all ranks to arrive it is at most 120 seconds.
        device: this rank's device; by default the device of its local rank.

    Returns:
        A context manager that takes the process group down at its end.

    Raises:
        OptionError: torch knows no such backend, or the run has begun with another option.
        PlacementError: the launcher's variables are incomplete or contradictory.
        ArrivalError: not all ranks arrived in time; the message names the missing ones.

    Example:
        >>> with setup_process_group():
        ...     print(world_size())
        1

    See https://docs.pytorch.org/docs/stable/distributed.html#initialization.
    """
    selection.check_backend(backend)
    check_words(os.environ)  # refuses a wrong value now, and not with the first line
    if (run := active_world()) is not None:
        _check_fits(run, backend, timeout)
    if run is not None or dist.is_initialized():
        return JoinedGroup(ours=False)
    found = detect(os.environ)
    placement = found if isinstance(found, Placement) else _only_rank_of(found)
    if placement.source == "single":
        if words := forgotten_srun(os.environ):
            say(words)
        return JoinedGroup(ours=False)
    if isinstance(device, int):
        device = torch.device(selection.visible_devices().kind, device)
    options = Options(backend=backend, timeout=600.0 if timeout is None else timeout)
    world = join(placement, options, device=None if device is None else torch.device(device))
    world.cleanup.callback(failures.tell_uncaught())
    return JoinedGroup(ours=True)


def _check_fits(run: World, backend: str, timeout: float | None) -> None:
    """Refuse an option that the run does not have, where it has others than this process."""
    for name, wanted, unset, has in (
        ("backend", backend, "auto", run.backend),
        ("timeout", timeout, None, run.options.timeout),
    ):
        if wanted not in (unset, has) and run.placement.world_size > 1:
            raise OptionError(
                f"rank {run.placement.rank}: setup_process_group() got {name}={wanted!r} inside a run that has "
                f"{name}={has!r}. A second call joins the run as it is: leave {name} out there, or give it to the call "
                "that begins the run."
            )


def _only_rank_of(node: Node) -> Placement:
    """Return the placement of the only rank of a node whose launcher leaves the ranks to us; refuse several.

    Raises:
        PlacementError: only the decorator starts ranks.
    """
    nprocs = node.nprocs or max(1, selection.visible_devices().count)
    if isinstance(node.nnodes, str) or node.node_rank is None or nprocs > 1:
        raise PlacementError(
            f"{node.source} has started this process for a whole node ({node.nnodes} nodes, {nprocs} "
            f"rank(s) on each), and setup_process_group() starts none. Decorate the function with @distributed, which "
            f"starts them, or run the script with torchrun."
        )
    host, _, port = (node.endpoint or "127.0.0.1:29500").rpartition(":")
    return Placement(node.node_rank, node.nnodes, 0, 1, node.node_rank, node.nnodes, host, int(port), node.source)


def import_before_group() -> None:
    """Import what must not be imported while there is a process group, and what DDP would import at its start.

    Default arguments in torch.distributed.nn take the group of the moment of its import. They would keep the group's
    threads alive to the end of the interpreter, where they now and then abort it.
    """
    import torch.distributed.nn.functional  # noqa: F401


def join(
    placement: Placement, options: Options, *, device: torch.device | None = None, inherited: bytes = b""
) -> World:
    """Meet the other ranks and make their world the current one.

    Args:
        placement: this rank's place.
        options: of the run.
        device: this rank's device; by default the one of its local rank.
        inherited: the secret that its launcher has given each rank, if any.
    """
    import_before_group()
    SECONDS("timeout", options.timeout)
    simulated = simulation()
    visible = selection.visible_devices()
    shared = selection.are_shared(options.share_devices, visible, placement.local_world_size)
    told = shared or device is not None  # that other ranks may have the same one
    device = device or selection.choose_device(placement, visible, shared=shared)
    kind_of(device).use(device)
    backend = selection.choose_backend(options.backend, device, shared=shared)
    if simulated is None:
        interfaces.check_users_choice(os.environ, backend)
    with ExitStack() as cleanup, loss_told(placement):
        if simulated is None:
            gpu = None if told else kind_of(device).unique_name(device)
            store = meet(placement, min(options.timeout, ARRIVAL_SECONDS), device, gpu)
            placement = assign_resources(placement, store, device, cleanup)
            cleanup.enter_context(variables_set(distwrap_environment.lacking(placement, os.environ)))
        else:
            store = simulated.meet(placement)
        # Now, since the store is certainly there. Where there is no clone, the channel's thread waits now and then for
        # the main thread's look-ups.
        side = client_of(store)
        notifier = Notifier(side, placement)  # while rank 0 is certainly there too
        cleanup.callback(notifier.close)
        _make_group(placement, options, backend, device, store)
        world = World(
            placement,
            device,
            backend=backend,
            options=options,
            group=dist.group.WORLD,
            store=store,
            secret=inherited or agree_on_secret(store, placement),
        )
        world.count_group()
        world.cleanup = cleanup.pop_all()
    activate(world)
    supervised = distwrap_environment.STORE in os.environ
    activity = world.part(Activity)
    make = Channel if simulated is None else simulated.channel
    world.channel = make(notifier, placement, activity, supervised, options.timeout, world.secret or b"")
    world.channel.thread.on_accelerator = world.device.type != "cpu"
    world.channel.start()
    world.arrange()
    return world


def _make_group(placement: Placement, options: Options, backend: str, device: torch.device, store: Store) -> None:
    """Let the strategy make torch's process group.

    Raises:
        LaunchError: it has made none.
    """
    # A name is that of DDP, which leaves this to torch: it need not be imported yet.
    strategy = options.strategy
    init = dist.init_process_group if isinstance(strategy, str) else strategy.init_process_group
    init(
        backend,
        store=PrefixStore("group", store),
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=options.timeout),
        device_id=None if backend == "gloo" else kind_of(device).bound(device),
    )
    if not dist.is_initialized():
        raise LaunchError(
            f"rank {placement.rank}: init_process_group() of the strategy {strategy!r} has made no process group. "
            f"It must call torch.distributed.init_process_group, as Strategy.init_process_group does."
        )


def teardown_process_group() -> None:
    """Leave the process group that `setup_process_group` or the decorator made; without one, do nothing.

    A process group that the user made stays as it is.
    """
    _teardown(destroy=True)


def finish_process_group() -> None:
    """Leave the group at the very end of a process, which closes the sockets faster than gloo does.

    gloo's own way takes some 20 ms. Other backends, as NCCL, want to be taken down.
    """
    world = active_world()
    _teardown(destroy=world is not None and world.backend != "gloo")


def _teardown(*, destroy: bool) -> None:
    world = active_world()
    if world is None:
        return
    try:
        world.settle()
    except BaseException:
        abandon_process_group()  # the others are told of it, and not waited for
        raise
    deactivate()
    if world.channel is not None:
        world.channel.stop()
    with world.cleanup:
        if world.store is not None:
            await_last_group(world.store, world.placement, world.groups)
        world.close()
        if world.store is not None:
            if destroy and dist.is_initialized():
                dist.destroy_process_group()
            say_goodbye(world.store, world.placement)
        if destroy:
            _let_go(world)


def _let_go(world: World) -> None:
    """Drop the group, whose end waits for its threads."""
    if ENDS_GROUPS_LOCKED:
        time.sleep(_LAST_WORK_SECONDS)
    world.group = None


def abandon_process_group(*, failed: bool = True, destroy: bool = False) -> None:
    """Forget the group without waiting for the others: after a failure that could block.

    Args:
        failed: what the others are told of this rank: that it has failed, or that it has left.
        destroy: give the group's connections back too, which is safe when the others have ended.
    """
    world = active_world()
    deactivate()
    if world is not None:
        if world.channel is not None:
            world.channel.stop(failed=failed)
        with world.cleanup:
            world.close()
            if destroy and dist.is_initialized():
                dist.destroy_process_group()
                _let_go(world)


@contextmanager
def temporary_world(world: World) -> Iterator[World]:
    """Make a world the current one for the time of a ``with``, and leave its process group, if any, alone."""
    activate(world)
    try:
        yield world
        world.settle()
    finally:
        deactivate()
        with world.cleanup:
            world.close()


def single_world(options: Options) -> World:
    """Return a world of this one process."""
    placement, strategy = Placement(), options.strategy
    own = None if isinstance(strategy, str) else strategy.device
    device = own or selection.choose_device(placement, selection.visible_devices())
    return World(placement, device, options=options)


def announce(world: World, launcher: str) -> None:
    """Print in one line on rank 0 what was decided."""
    place = world.placement
    nodes = f"{place.nnodes} node{'s' if place.nnodes > 1 else ''}"
    ranks = f"{place.world_size} rank{'s' if place.world_size > 1 else ''}"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    through = f" on {interface}" if interface and "gloo" in str(world.backend) else ""
    threads = torch.get_num_threads()
    say(
        f"{ranks} on {nodes} ({socket.gethostname()}), {world.device.type}, {world.backend}{through}, "
        f"precision {world.options.precision}, started by {launcher}, {threads} thread{'s' * (threads > 1)} per rank"
    )
    visible = selection.visible_devices()
    if selection.are_shared(world.options.share_devices, visible, place.local_world_size):
        say(
            f"share_devices: {place.local_world_size} ranks take turns on {visible.count} {visible.kind} device(s), "
            f"for trying out: this is no faster than one rank"
        )
    strategy = world.options.strategy
    if not isinstance(strategy, str) and strategy.formerly:
        say(f"strategy={strategy.formerly!r} is here {strategy!r}")


def require_group(what: str) -> None:
    """Refuse a collective in a world of several processes whose group is not there yet."""
    if not dist.is_initialized():
        place = current_world().placement
        raise PlacementError(
            f"{what} needs the process group, and rank {place.rank} of {place.world_size} "
            f"(started by {place.source}) has none yet: call setup_process_group() first."
        )
