"""Work of one rank for which the others wait: as long as it takes, while that rank lives, and never longer."""

from __future__ import annotations

from distwrap.group.collectives import gather_object
from distwrap.group.world import current_world


def share_result(name: str, worker: int, result: bytes | None) -> bytes:
    """Return what one rank has made of its work, on every rank that waits for it.

    No collective and no timeout: the others look for it on the side channel, and learn at once of the end of the rank
    they wait for. In a group that the user made there is no side channel, and it is a collective.

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
    world.crumbs.record(name)
    if world.channel is None:
        everyone = gather_object(result)
        shared = everyone[worker]
        assert shared is not None
        return shared
    world.turns[name] += 1
    key = f"{name}/{worker}/{world.turns[name]}"
    if result is None:
        return world.channel.wait_for(key, worker)
    world.channel.publish(key, result)
    return result
