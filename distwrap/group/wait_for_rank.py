"""Waits of the other ranks for the work of one: as long as it takes, while that rank lives, and no longer."""

from distwrap._internals.torch import default_store
from distwrap.errors import CollectiveError
from distwrap.group.collectives import gather_object
from distwrap.group.setup import require_group
from distwrap.group.world import current_world
from distwrap.network.waiting import pause_between_looks, wait_until
from distwrap.supervision.activity import Activity

USERS_GROUP_SECONDS = 1800.0  # as torch's own limit for a collective: there nobody tells whether a rank lives


def share_result(name: str, worker: int, result: bytes | None, *, turn: str | None = None) -> bytes:
    """Return the result of one rank's work, on every rank that waits for it.

    This is no collective, and no time limit applies: the other ranks look for the result on the side channel, and raise
    an error at once when the working rank ends. In a group that the user made there is no side channel: there they look
    into the store in which its ranks met, for `USERS_GROUP_SECONDS`.

    Args:
        name: of the work, for the hang report.
        worker: the rank that does it.
        result: on that rank, a few bytes; ``None`` on the others.
        turn: calls of the same turn are matched in their order; by default the name.

    Raises:
        WorkerDiedError: the rank that works died.
        CollectiveError: it left the function without doing it, or in the user's group was not done in time.
    """
    world = current_world()
    if world.placement.world_size == 1:
        assert result is not None
        return result
    activity = world.part(Activity)
    activity.record(name)
    # The n-th wait on one rank meets the n-th work on another.
    key = f"{turn or name}/{worker}"
    key = f"{key}/{world.count(f'wait {key}')}"
    with activity.waiting("work", (worker,)):
        if world.channel is None:
            return _share_in_users_group(key, worker, result)
        if result is None:
            return world.channel.work.wait_for(key, worker)
    world.channel.work.publish(key, result)
    return result


def _share_in_users_group(key: str, worker: int, result: bytes | None) -> bytes:
    require_group("to wait for a rank")
    store, key = default_store(), f"distwrap/{key}"
    if store is None:
        shared = gather_object(result)[worker]
        assert shared is not None
        return shared
    if result is not None:
        store.set(key, result.hex())  # torch's stores take text
        return result
    # Not torch's own wait: it would keep the store from other threads of torch, and a Ctrl-C from Python.
    pause = pause_between_looks(current_world().placement.world_size)
    if not wait_until(lambda: store.check([key]), USERS_GROUP_SECONDS, pause):
        raise CollectiveError(
            f"{key!r} of rank {worker} did not arrive within {USERS_GROUP_SECONDS:.0f} s. Look at what that "
            "rank printed last."
        )
    return bytes.fromhex(store.get(key).decode())
