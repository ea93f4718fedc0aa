"""Resources of a rank, once all ranks are registered: its device, its CPUs, its network interface."""

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.devices import cpus, selection
from distwrap.environments import Placement, distwrap_environment
from distwrap.errors import PlacementError
from distwrap.network import interfaces
from distwrap.network.connectivity import check_nodes_connect
from distwrap.network.rendezvous import registrations


def assign_resources(placement: Placement, store: Store, device: torch.device, cleanup: ExitStack) -> Placement:
    """Check that no device is shared, divide the CPUs, and choose the network interface.

    Args:
        placement: this rank's place among the others.
        store: in which all ranks are registered.
        device: this rank's.
        cleanup: undoes it when the group goes.

    Returns:
        The placement, with the nodes numbered where the launcher does not number them.
    """
    if placement.nnodes == 1:
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            cleanup.enter_context(interfaces.through(interfaces.LOOPBACK, "GLOO_SOCKET_IFNAME"))
        if distwrap_environment.STORE in os.environ and device.type == "cpu":
            return placement  # whoever has started them has looked already
    registered = dict(enumerate(registrations(store, range(placement.world_size))))
    homes = [(said["host"], said["node"]) for said in registered.values()]
    here = {rank: registered[rank] for rank, home in enumerate(homes) if home == homes[placement.rank]}
    selection.check_not_shared(placement.rank, device, here)
    if distwrap_environment.STORE not in os.environ:
        threads = cpus.share_threads(placement.rank, here)
        if threads is not None and threads != torch.get_num_threads():
            cleanup.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)
    if placement.nnodes == 1:
        return placement
    placement, interface = _numbered(placement, homes), _interface(placement, registered)
    check_nodes_connect(store, placement, interface)
    cleanup.enter_context(interfaces.through(interface))
    return placement


def _interface(placement: Placement, registered: dict[int, dict[str, Any]]) -> str:
    """Return the interface that leads to the other nodes.

    Raises:
        PlacementError: the meeting place's name leads each node to itself.
    """
    mine = registered[placement.rank]
    # The node of rank 0 has to ask for the way to one of the others: its own name may lead to loopback.
    away = [said["address"] for said in registered.values() if said["network"] != mine["network"] and said["address"]]
    towards = away[0] if away and mine["network"] == registered[0]["network"] else str(placement.master_addr)
    address = interfaces.source_address(towards) or ""
    if away and (interfaces.is_loopback(address) or interfaces.is_loopback(towards)):
        raise PlacementError(
            f"rank {placement.rank} on {mine['host']} cannot find out which network leads to the other nodes: "
            f"on this node {placement.master_addr} is {towards}, which is loopback. {interfaces.ADVICE}"
        )
    return interfaces.interface_of(address) or interfaces.LOOPBACK


def _numbered(placement: Placement, homes: list[tuple[str, str]]) -> Placement:
    """Give the nodes numbers by their lowest ranks, where no variable says which one this is.

    Example:
        >>> place = Placement(1, 4, 0, 2, 0, 2, source="open_mpi")
        >>> _numbered(place, [("a", ""), ("b", ""), ("a", ""), ("b", "")]).node_rank
        1
    """
    nodes = list(dict.fromkeys(homes))
    if placement.source not in ("open_mpi", "mvapich2", "mpich") or len(nodes) != placement.nnodes:
        return placement
    return replace(placement, node_rank=nodes.index(homes[placement.rank]))
