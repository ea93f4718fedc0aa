"""Wait for all ranks at a save that needs all of them, so that a save of one rank is an error and not a hang.

Ranks meet on the side channel, before a collective of the save could pair with one of the training step.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from distwrap.errors import CheckpointError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.world import RunPart, World
from distwrap.supervision import stacks
from distwrap.wording import named_ranks

ASK_SECONDS = 0.5  # between two questions to a missing rank about where it is
STUCK_SECONDS = 4.0  # for which a stuck rank has waited for others in one place
# Files whose functions only wait for other ranks.
_WAITS = ("torch/distributed/distributed_c10d.py", "/strategies/rendezvous.py")
_MAY_WAIT = ("torch/distributed/", "autograd/graph.py", "nn/parallel/distributed.py")  # or compute


class SaveMeetings(RunPart):
    """Saves of this rank that need all ranks. Made when a model is wrapped, so that each rank can be asked."""

    def __init__(self, world: World) -> None:
        self._world, self._count = world, 0
        self._name = f"saves {world.count('save meetings')}"
        if world.channel is not None:
            world.channel.work.serve(f"{self._name}/{world.placement.rank}", self._where)

    def meet(self, path: Path) -> None:
        """Wait until the other ranks are in a save too: rank 0 waits for all, and the others for rank 0.

        Raises:
            CheckpointError: a rank will not come: it has left, or all missing ranks wait for this one.
            WorkerDiedError: another rank died.
        """
        check_collectives_allowed("save() of what all ranks hold together")
        channel, place = self._world.channel, self._world.placement
        if channel is None or place.world_size == 1:
            return
        self._count += 1
        channel.note(self._name, str(self._count))
        asked_at, seen = time.monotonic(), dict[int, tuple[float, float, str]]()
        try:
            while self._missing(range(1, place.world_size) if place.rank == 0 else [0]):
                time.sleep(0.001 if place.nnodes == 1 else 0.05)
                if time.monotonic() - asked_at > ASK_SECONDS:
                    self._check(path, self._missing(range(place.world_size)), seen)
                    asked_at = time.monotonic()
        except BaseException:  # no rank makes this save
            self._count -= 1
            channel.note(self._name, str(self._count))
            raise

    def _missing(self, ranks: range | list[int]) -> list[int]:
        channel = self._world.channel
        assert channel is not None
        return [rank for rank in ranks if int(channel.noted(self._name, rank) or 0) < self._count]

    def _check(self, path: Path, missing: list[int], seen: dict[int, tuple[float, float, str]]) -> None:
        """Raise if no missing rank can come; `seen` has since when each is where, and its CPU time then."""
        channel, now, stuck, own = self._world.channel, time.monotonic(), 0, self._world.placement.rank
        assert channel is not None
        for rank in missing:
            where, waits, used, has_left = json.loads(channel.work.ask(f"{self._name}/{rank}", rank))
            since, used_then, before = seen.get(rank, (now, used, ""))
            if where != before:
                since, used_then = now, used
            seen[rank] = since, used_then, where
            idle = waits == "always" or used - used_then < 0.1 * (now - since)
            stuck += bool(waits) and idle and now - since > STUCK_SECONDS
            if has_left or stuck == len(missing):
                raise CheckpointError(
                    f"rank {own} is in save() to {path}, and {named_ranks(missing)} did not call it: rank "
                    f"{rank} {where}. All ranks together save what a strategy divides, a folder of parts, and "
                    "run_state(): let every rank call save(), without a condition such as 'if rank() == 0'."
                )

    def _where(self, request: object, waited: float) -> bytes:
        """Answer where this rank is, or, when it leaves, that it has left; runs in the channel's thread."""
        if request is None:
            return json.dumps(["has left the function", "", 0.0, True]).encode()
        assert self._world.channel is not None
        files = [file for file, *_ in stacks.of_thread()]
        waits = "perhaps" if any(name in file for file in files for name in _MAY_WAIT) else ""
        waits = "always" if any(file.endswith(_WAITS) for file in files) else waits
        where = f"is {self._world.channel.reporter.location()}"
        return json.dumps([where, waits, time.process_time(), False]).encode()
