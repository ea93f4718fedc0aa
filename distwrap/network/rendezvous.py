"""Rendezvous: the ranks meet in a store within a time limit, learn who is missing, and leave it in order."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distwrap._version import __version__
from distwrap.devices.cpus import allowed_cpus
from distwrap.environments import Placement, distwrap_environment
from distwrap.environments.identity import identity
from distwrap.errors import ArrivalError
from distwrap.network import interfaces, keys, stores
from distwrap.network.stores import NOTICE_SECONDS
from distwrap.network.waiting import are_all_counted, count_in
from distwrap.options import notice_seconds
from distwrap.versions import TORCH
from distwrap.wording import first_line, first_names, named_ranks, print_notice

_LEAVE_SECONDS = 10.0  # for the others to leave before the rank that holds the store does

_PREFIX = "distwrap"

_generation = 0  # a second group in the same processes must not read the first one's keys


def meet(placement: Placement, seconds: float, device: torch.device | None = None, gpu: str | None = None) -> Store:
    """Open the store, register, and wait until all ranks have.

    Args:
        placement: this rank's place.
        seconds: time limit for all to come.
        device: this rank's device, for the others to see.
        gpu: its unique name, where no other rank may have it too.

    Raises:
        ArrivalError: not all ranks came, two of them are the same, or this one runs another version than rank 0.
    """
    meeting = begin_meeting()
    store: Store = PrefixStore(f"{_PREFIX}/{meeting}", _open_store(placement, seconds))
    address = interfaces.source_address(str(placement.master_addr)) if placement.nnodes > 1 else None
    mine = {**registration(device), "gpu": gpu, "address": address}
    text = json.dumps(mine)
    first = store.compare_set(f"here/{placement.rank}", "", text).decode()
    if first != text:
        other = json.loads(first)
        raise ArrivalError(
            f"there are two ranks {placement.rank}: this one (pid {mine['pid']} on {mine['host']}) and pid "
            f"{other['pid']} on {other['host']}, and {placement.source} says so of both. Give each its own "
            "RANK or node rank. Or was this process started by a rank, whose variables it has inherited?"
        )
    me, where = f"rank {placement.rank} on {mine['host']}", stores.where(placement)
    describe = partial(_who_is_here, placement)
    late = wait_for_all(store, placement.rank, placement.world_size, seconds, where, describe)
    if late:
        raise ArrivalError(
            f"{me} {late}. Look at what the missing ranks printed: they did not reach setup_process_group()."
        )
    zero = json.loads(store.get("here/0"))
    if distwrap_environment.STORE in os.environ:
        mine["script"] = zero["script"]  # the callers on the nodes have compared theirs
    check_versions(mine, me, zero, f"rank 0 on {zero['host']}")
    return store


@contextmanager
def loss_told(placement: Placement) -> Iterator[None]:
    """Raise an error that names the lost process if the store is lost within a ``with`` in which this rank joins.

    Raises:
        ArrivalError: the store is lost.
    """
    try:
        yield
    except dist.DistNetworkError as error:
        raise ArrivalError(
            f"rank {placement.rank} on {socket.gethostname()} cannot join: rank 0 on {placement.master_addr}, "
            f"or its launcher, is gone: its store does not answer ({first_line(error)}). Look at what it printed last."
        ) from error


def _open_store(placement: Placement, seconds: float) -> Store:
    """Open the store: not that of the group before, which this rank has left and rank 0 is about to close."""
    left, deadline = f"{_PREFIX}/{_generation - 1}/gone/count", time.monotonic() + seconds
    while True:
        store = stores.open_store(placement, seconds)
        with suppress(dist.DistNetworkError):
            if placement.rank == 0 or _generation == 1 or time.monotonic() > deadline or not store.check([left]):
                return store
        time.sleep(0.02)


def registrations(store: Store, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the registrations of ranks."""
    return [json.loads(text) for text in keys.read_all(store, [f"here/{rank}" for rank in ranks])]


def wait_for_all(
    store: Store,
    me: int,
    size: int,
    seconds: float,
    where: str,
    describe: Callable[[dict[int, str]], str],
    *,
    all_print: bool = False,
) -> str:
    """Wait until all ranks, or the callers on all nodes, have registered.

    Args:
        store: store in which they register.
        me: number of this rank or node.
        size: number of ranks or nodes.
        seconds: time limit.
        where: address of the store in words.
        describe: a function of the hosts by number that returns in words which are here and which are missing.
        all_print: whether all of them print who is missing while they wait, and not only the first that is here.

    Returns:
        Words about the missing ones after the time limit; empty if all are here.
    """
    names = [f"here/{number}" for number in range(size)]
    start, noticed, patience = time.monotonic(), False, notice_seconds(os.environ, NOTICE_SECONDS)
    count_in(store, "here", size)
    while not are_all_counted(store, "here", size):
        waited = time.monotonic() - start
        if patience and waited > min(patience, seconds) and not noticed:
            noticed = True
            hosts = _hosts_of(store, names)
            if all_print or me == min(hosts):
                print_notice(f"after {waited:.0f} s {describe(hosts)}")
        others_gave_up = store.check(["gave up"])
        if waited > seconds or others_gave_up:
            late = f"waited {waited:.0f} s at {where}: {describe(_hosts_of(store, names))}"
            if not others_gave_up:
                store.set("gave up", "")
            if me == 0:
                time.sleep(1.5)  # it may hold the store, in which the others are to read this
            return late
    return ""


def side_store(path: str, meeting: int) -> Store:
    """Return the ranks' store, for the process that has launched them.

    It may live only as long as the launch: torch looks at a file once more when a store is deleted.

    Args:
        path: of the store.
        meeting: how often the ranks have met with this one.
    """
    return PrefixStore(f"{_PREFIX}/{meeting}", stores.from_outside(path))


def next_meeting() -> int:
    """Return the number of this process's next meeting."""
    return _generation + 1


def begin_meeting() -> int:
    """Return the number of this process's meeting that begins."""
    global _generation
    _generation += 1
    return _generation


def count_meetings_anew() -> None:
    """Count from the first meeting again, in a process that a launch has started."""
    global _generation
    _generation = 0


def registration(device: torch.device | None) -> dict[str, Any]:
    """Return the registration of this process, which the others read."""
    versions = {"distwrap": __version__, "torch": TORCH}
    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    return {**identity(), "device": str(device), "cpus": allowed_cpus(), "script": script, "versions": versions}


def check_versions(mine: dict[str, Any], here: str, theirs: dict[str, Any], there: str) -> None:
    """Raise an error if another process runs other versions; print a remark if it runs another script.

    Args:
        mine: this process's registration.
        here: this process in words.
        theirs: the other's registration.
        there: the other process in words.
    """
    if theirs["versions"] != mine["versions"]:
        ours, others = (
            " and ".join(f"{name} {version}" for name, version in said["versions"].items()) for said in (mine, theirs)
        )
        raise ArrivalError(f"{here} runs {ours}, but {there} runs {others}. Install the same versions on all nodes.")
    if theirs["script"] != mine["script"]:
        print_notice(
            f"{here} runs {mine['script']}, but {there} runs {theirs['script']}. If that is a mistake, start "
            "the same script on all nodes."
        )


def _hosts_of(store: Store, names: list[str]) -> dict[int, str]:
    """Return the hosts of those that have registered, by their numbers."""
    return {number: json.loads(text)["host"] for number, name in enumerate(names) if (text := keys.read(store, name))}


def _who_is_here(placement: Placement, hosts: dict[int, str]) -> str:
    """Return in words how many ranks are here, and which are missing on which node.

    Example:
        >>> place = Placement(0, 8, local_rank=0, local_world_size=4, nnodes=2)
        >>> _who_is_here(place, {0: "n1", 1: "n1", 2: "n1", 3: "n1", 6: "n2", 7: "n2"})
        '6 of 8 ranks are here; missing: ranks 4, 5 (n2)'
        >>> _who_is_here(place, {0: "n1", 1: "n1", 2: "n1"})
        '3 of 8 ranks are here; missing: rank 3 (n1), ranks 4-7 (node 1, from which no rank has come)'
    """
    size = placement.local_world_size
    missing: dict[int, list[int]] = {}
    for rank in range(placement.world_size):
        if rank not in hosts:
            missing.setdefault(rank // size, []).append(rank)
    parts = []
    for node, members in missing.items():
        host = next((hosts[rank] for rank in range(node * size, node * size + size) if rank in hosts), None)
        place = host or f"node {node}, from which no rank has come"
        parts.append(named_ranks(members) + (f" ({place})" if placement.nnodes > 1 else ""))
    return f"{len(hosts)} of {placement.world_size} ranks are here; missing: {first_names(parts, 16)}"


def await_last_group(store: Store, placement: Placement, groups: int) -> None:
    """Wait before leaving until all ranks have made their last group: one may still be connecting to this one."""
    with suppress(dist.DistError):  # a rank that is gone without a goodbye has failed, which others tell
        are_all_counted(store, f"group {groups}", placement.world_size, _LEAVE_SECONDS)


def say_goodbye(store: Store, placement: Placement) -> None:
    """Tell the others that this rank leaves; rank 0 waits for them where its process holds the store."""
    if stores.held_elsewhere(placement):
        return
    with suppress(dist.DistError):
        count_in(store, "gone", placement.world_size)
        if placement.rank == 0:
            are_all_counted(store, "gone", 1, _LEAVE_SECONDS)
