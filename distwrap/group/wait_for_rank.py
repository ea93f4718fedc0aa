"""Waits of the other ranks for the work of one: as long as it takes, while that rank lives, and no longer."""

from distwrap.group.collectives import gather_object
from distwrap.group.world import current_world
from distwrap.supervision.hang_report import Activity


def share_result(name: str, worker: int, result: bytes | None) -> bytes:
    """Return the result of one rank's work, on every rank that waits for it.

    This is no collective, and no time limit applies: the other ranks look for the result on the side channel, and raise
    an error at once when the working rank ends. In a group that the user made there is no side channel, and a
    collective is used instead.

    Args:
        name: of the work; calls of the same name are matched in their order.
        worker: the rank that does it.
        result: on that rank, a few bytes; ``None`` on the others.

    Raises:
        WorkerDiedError: the rank that works died.
        CollectiveError: it left the function without doing it.
    """
    world = current_world()
    if world.placement.world_size == 1:
        assert result is not None
        return result
    world.part(Activity).record(name)
    if world.channel is None:
        shared = gather_object(result)[worker]
        assert shared is not None
        return shared
    # The n-th wait on one rank meets the n-th work on another.
    key = f"{name}/{worker}/{world.count(f'wait {name}')}"
    if result is None:
        return world.channel.work.wait_for(key, worker)
    world.channel.work.publish(key, result)
    return result
