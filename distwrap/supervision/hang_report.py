"""Hang report: all ranks are asked in the store where they are, and the answers are listed, equal ones in one line."""

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from functools import partial

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.network.keys import count, read, read_all
from distwrap.network.waiting import Clock, are_all_counted, wait_until
from distwrap.supervision.locations import LEFT, NO_ANSWER, Location, merge, seen_at
from distwrap.supervision.notes import read_note
from distwrap.supervision.notifier import notify_from_outside
from distwrap.supervision.waits import read_wait

ANSWER_SECONDS = 1.5  # for a rank to say where it is


def ask_all(
    store: Store,
    world_size: int,
    notify: Callable[[], None] | None = None,
    on_asking: Callable[[int], None] = lambda number: None,
    clock: Clock = time,
) -> str:
    """Ask all ranks where they are, and return it in lines, equal ones together.

    Args:
        store: the ranks'.
        world_size: number of ranks.
        notify: lets all ranks look; by default from a process that is none of them.
        on_asking: called with the number of the question, to answer for this rank.
        clock: the clock by which it waits for answers.

    Raises:
        DistError: the store is gone.
    """
    asked, said = ask(store, world_size, notify or partial(notify_from_outside, store, world_size), on_asking, clock)
    if said is None:
        said = merge(read_answers(store, world_size, asked))
        store.set(f"said/{asked}", said)
    return said


def ask(
    store: Store, world_size: int, notify: Callable[[], None], on_asking: Callable[[int], None], clock: Clock = time
) -> tuple[int, str | None]:
    """Ask all ranks where they are; return the question's number, and the answer if another rank was asking already.

    If several ranks ask at the same time, one of them does, and the others read its answer: if each of a thousand ranks
    asked all others, none would get its answers in time.
    """
    asked, mine = count(store, "reports"), secrets.token_hex(8)
    is_under_way = asked > 0 and not store.check([f"said/{asked}"])
    asked += not is_under_way
    if not is_under_way and store.compare_set(f"asking/{asked}", "", mine).decode() == mine:
        store.add("reports", 1)
        notify()
        on_asking(asked)
        are_all_counted(store, f"answers/{asked}", 1, ANSWER_SECONDS, clock=clock)
        return asked, None
    on_asking(asked)
    said = wait_until(lambda: read(store, f"said/{asked}"), 2 * ANSWER_SECONDS, longest_pause=0.25, clock=clock)
    return asked, said.decode() if said else None


def read_answers(store: Store, world_size: int, asked: int) -> dict[int, Location | str]:
    """Return where each rank is, from its answer to a question, or words where it does not say."""
    keys = [f"report/{asked}/{rank}" for rank in range(world_size)]
    if store.check([f"answers/{asked}/all"]):
        texts = read_all(store, keys)
        return {rank: _read_location(text) for rank, text in enumerate(texts)}
    return {rank: _answer_of(store, rank, key) for rank, key in enumerate(keys)}


def last_seen(store: Store, rank: int) -> str:
    """Return in words where a rank was when it last noted that; empty if it never did, or the store is gone."""
    with contextlib.suppress(OverflowError, RuntimeError, TypeError, ValueError):  # or it is none of a rank's
        moment, parts = read_note(store, "seen", rank) or (0.0, ())
        if parts:
            return seen_at(moment, Location(*parts))
    return ""


def _read_location(text: bytes) -> Location | str:
    """Return the location that a rank has written, or words if another program has written something else there."""
    with contextlib.suppress(RecursionError, TypeError, ValueError):
        location = Location(*json.loads(text))
        return location._replace(wait=read_wait(location.wait), begun=int(location.begun))
    return "has an answer in the store that no rank has written"


def _answer_of(store: Store, rank: int, key: str) -> Location | str:
    answer = read(store, key)
    if answer:
        return _read_location(answer)
    if store.check([f"left/{rank}"]):
        return LEFT
    return f"{NO_ANSWER}{last_seen(store, rank)}"
