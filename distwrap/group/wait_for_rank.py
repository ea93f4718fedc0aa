"""Waits of the other ranks for the work of one: as long as it takes, while that rank lives, and no longer."""

from collections import Counter

from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World, current_world
from distwrap.supervision.activity import Activity


class WaitCounts(RunPart):
    """Count of the waits of each name, so that the n-th wait on one rank meets the n-th work on another."""

    def __init__(self, world: World) -> None:
        self._counts: Counter[str] = Counter()

    def next(self, name: str) -> int:
        """Return the number of the wait that begins now, from 1."""
        self._counts[name] += 1
        return self._counts[name]


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
        everyone = gather_object(result)
        shared = everyone[worker]
        assert shared is not None
        return shared
    key = f"{name}/{worker}/{world.part(WaitCounts).next(name)}"
    if result is None:
        return world.channel.work.wait_for(key, worker)
    world.channel.work.publish(key, result)
    return result
