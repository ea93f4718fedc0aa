"""Ask all ranks where they are, and put their answers together."""

from __future__ import annotations

import json
import time

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.supervision import stacks
from distwrap.supervision.stacks import Location

ANSWER_SECONDS = 1.5  # for a rank to say where it is


def where_all_are(store: Store, world_size: int) -> str:
    """Ask the ranks' channels where they are, and return it in lines, equal ones together.

    Raises:
        DistError: the store is gone.
    """
    return answers(store, store.add("reports", 1), world_size)


def answers(store: Store, asked: int, world_size: int) -> str:
    """Wait for the answers to a question that was asked, and merge them."""
    deadline = time.monotonic() + ANSWER_SECONDS
    keys = [f"report/{asked}/{rank}" for rank in range(world_size)]
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.02)
    return stacks.merge({rank: _read(store, rank, key) for rank, key in enumerate(keys)})


def _read(store: Store, rank: int, key: str) -> Location | str:
    if store.check([key]):
        return Location(*json.loads(store.get(key)))
    if store.check([f"left/{rank}"]):
        return "has left the function"
    return f"does not answer: native code holds the interpreter, or it is gone{_last_seen(store, rank)}"


def _last_seen(store: Store, rank: int) -> str:
    """Where a rank was when it last said so, in words."""
    if not store.check([f"seen/{rank}"]):
        return ""
    moment, parts = json.loads(store.get(f"seen/{rank}"))
    position = Location(*parts)
    after = f", after {position.last}" if position.last else ""
    return f"; {max(0.0, time.time() - moment):.0f} s ago it was {position}{after}"


def last_seen(store: Store, rank: int) -> str:
    """Where a rank was when it last said so, in words; empty where it never did, or the store is gone."""
    try:
        return _last_seen(store, rank)
    except (dist.DistError, RuntimeError):
        return ""


def count(store: Store, key: str) -> int:
    """Read a counter; 0 where nobody has counted yet."""
    return int(store.add(key, 0)) if store.check([key]) else 0
