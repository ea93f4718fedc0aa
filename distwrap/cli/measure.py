"""The real test: whether the ranks meet and add up, how fast, and on devices of their own."""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distwrap.cli.facts import Facts, look
from distwrap.comm.advice import Advice, advise
from distwrap.devices.kinds import kind_of
from distwrap.group.collectives import gather_object
from distwrap.group.world import current_world

SIZES = tuple(4**n for n in range(5, 14))  # bytes: 1 KiB to 64 MiB
_SECONDS_A_SIZE = 0.25
_FEWEST_REPEATS, _MOST_REPEATS = 8, 50


@dataclass(frozen=True)
class AllReduceTime:
    """Time of an all-reduce of one size.

    Attributes:
        size: bytes of the tensor.
        seconds: the median of several, on the slowest rank.
    """

    size: int
    seconds: float

    def bus_bandwidth(self, ranks: int) -> float:
        """Return the bytes a second over each rank's link, if it is a ring: size/time · 2(n-1)/n.

        See https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
        """
        return self.size / self.seconds * 2 * (ranks - 1) / ranks


@dataclass
class Measured:
    """Findings of all ranks together.

    Attributes:
        facts: of each rank, in order.
        all_reduces: by size; empty with one rank.
        advice: which algorithm of exchange is worth it, where the command asked for it.
    """

    facts: list[Facts]
    all_reduces: list[AllReduceTime]
    advice: Advice | None = None


def measure(asked: tuple[int, float | None] | None = None) -> Measured:
    """Measure on every rank; all return the same.

    Args:
        asked: the weights of a model for which to advise on the exchange, and the seconds of its step, if known.
    """
    world = current_world()
    facts = look()
    facts.rank, facts.local_rank = world.placement.rank, world.placement.local_rank
    device, kind = world.device, kind_of(world.device)
    if device.type != "cpu":
        facts.device = (str(device), kind.processor(device), kind.memory(device), kind.unique_name(device))
    everybody = [Facts(**each) for each in gather_object(vars(facts))]
    if len(everybody) == 1:
        return Measured(everybody, [])
    return Measured(everybody, [_time_all_reduce(size) for size in SIZES], None if asked is None else advise(*asked))


def _time_all_reduce(size: int) -> AllReduceTime:
    """Check the sum of an all-reduce, and time it."""
    world = current_world()
    tensor = torch.full((size // 4,), float(world.placement.rank), device=world.device)
    dist.all_reduce(tensor)
    expected = sum(range(world.placement.world_size))
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"an all-reduce of {size} bytes gave {tensor[0].item()} where the sum is {expected}")
    times = [_time_once(tensor)]
    wanted = min(_MOST_REPEATS, max(_FEWEST_REPEATS, int(_SECONDS_A_SIZE / times[0])))
    times += [_time_once(tensor) for _ in range(min(gather_object(wanted)))]  # every rank as often
    return AllReduceTime(size, max(gather_object(statistics.median(times))))


def _time_once(tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    tensor.zero_()
    dist.all_reduce(tensor)
    kind_of(tensor.device).finish(tensor.device)
    return time.perf_counter() - start
