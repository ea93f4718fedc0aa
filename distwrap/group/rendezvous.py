"""Meet the other ranks, and part from them: through a store, with a limit, and naming who is missing."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from distwrap.errors import ArrivalError
from distwrap.placement import Placement, own

_LEAVE_SECONDS = 10.0  # for the others to leave before the rank that holds the store does

_generation = 0  # a second group in the same processes must not read the first one's keys


def meet(placement: Placement, seconds: float) -> Store:
    """Open the store, say that we are here, and wait until everybody has."""
    global _generation
    _generation += 1
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


def leave(store: Store, placement: Placement) -> None:
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return ("rank " if len(ranks) == 1 else "ranks ") + shown + (", …" if len(ranks) > 16 else "")
