"""The real test: do the ranks meet, do they add up, how fast, on devices of their own."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

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
class Exchange:
    """How long one size took.

    Attributes:
        size: bytes of the tensor.
        seconds: of one all-reduce; the median, on the slowest rank.
    """

    size: int
    seconds: float

    def bus_bandwidth(self, ranks: int) -> float:
        """Bytes a second over each rank's link, if it is a ring: size/time · 2(n-1)/n.

        See https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
        """
        return self.size / self.seconds * 2 * (ranks - 1) / ranks


@dataclass
class Measured:
    """What the ranks found together.

    Attributes:
        facts: of each rank, in order.
        exchanges: by size; empty with one rank.
        advice: which algorithm of exchange is worth it, where it was asked for.
    """

    facts: list[Facts]
    exchanges: list[Exchange]
    advice: Advice | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        ranks = len(self.facts)
        advice = {} if self.advice is None else {"comm": self.advice.plain()}
        return {
            **advice,
            "ranks": [facts.plain() for facts in self.facts],
            "all_reduce": [
                {**asdict(each), "bus_bytes_per_second": each.bus_bandwidth(ranks)} for each in self.exchanges
            ],
        }


def measure(asked: tuple[int, float | None] | None = None) -> Measured:
    """Measure on every rank; all return the same.

    Args:
        asked: for advice on the exchange: the weights of a model, and the seconds of its step, if they are known.
    """
    world = current_world()
    facts = look()
    facts.rank, facts.local_rank = world.placement.rank, world.placement.local_rank
    facts.device = kind_of(world.device).unique_name(world.device)
    everybody = gather_object(facts)
    exchanges = [_exchange(size) for size in SIZES] if len(everybody) > 1 else []
    advice = advise(*asked) if asked is not None and len(everybody) > 1 else None
    return Measured(everybody, exchanges, advice)


def _exchange(size: int) -> Exchange:
    world = current_world()
    tensor = torch.full((size // 4,), float(world.placement.rank), device=world.device)
    dist.all_reduce(tensor)
    expected = sum(range(world.placement.world_size))
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"an all-reduce of {size} bytes gave {tensor[0].item()} where the sum is {expected}")
    times = [_timed(tensor)]
    wanted = min(_MOST_REPEATS, max(_FEWEST_REPEATS, int(_SECONDS_A_SIZE / times[0])))
    repeats = torch.tensor([wanted], device=world.device)
    dist.all_reduce(repeats, op=dist.ReduceOp.MIN)  # every rank as often
    times += [_timed(tensor) for _ in range(int(repeats.item()))]
    median = torch.tensor([statistics.median(times)], device=world.device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return Exchange(size, float(median.item()))


def _timed(tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    tensor.zero_()
    dist.all_reduce(tensor)
    kind_of(tensor.device).finish(tensor.device)
    return time.perf_counter() - start
