"""The report under every strategy, in loops of every style: who is slow, in what, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

import distwrap as dw
from distwrap import FSDPStrategy
from distwrap.group.world import current_world
from distwrap.options import Options
from distwrap.testing.ranks import Launch
from tests.limits import MORE_RANKS, slow
from tests.timing import everywhere
from tests.timing.everywhere import Attending, Plain, WithoutStatistics

SAME_WAIT = "the same wait as in other cells"


PLACES = (("forward", 1), ("backward", 1), ("own", 0))  # a part, and the rank that is slow in it


def reported(make: Any) -> list[tuple[bool, float, int, dict[str, Any]]]:
    """Train without a report, and with one in loops that are slow in each of these places."""
    plain, _ = everywhere.train(make)
    found = []
    for place in PLACES:
        with dw.report() as report:
            weights, seconds = everywhere.train(make, *place)
        found.append((weights == plain, seconds, current_world().layout.size, report.figures))
    return found


@pytest.mark.parametrize(
    ("options", "make", "nprocs"),
    [
        ({"strategy": "ddp(broadcast_buffers=True)"}, Plain, 2),
        *(({"comm": comm}, Plain, 2) for comm in ("bf16", "powersgd", "qadam(warmup_steps=2)")),
        *(({"comm": comm}, WithoutStatistics, 2) for comm in ("decentralized", "diloco(sync_every=2)")),
        *(
            slow({"comm": comm}, WithoutStatistics, 2, why=SAME_WAIT)
            for comm in ("allreduce", "bytegrad", "topk", "low_precision_decentralized", "local_sgd(sync_every=2)")
        ),
        ({"strategy": "zero1"}, Plain, 2),
        ({"strategy": "zero2"}, WithoutStatistics, 2),
        ({"strategy": "fsdp"}, WithoutStatistics, 2),
        ({"strategy": "tp"}, WithoutStatistics, 2),
        ({"strategy": "cp"}, Attending, 2),
        ({"strategy": "pipeline"}, WithoutStatistics, 2),
        slow({"strategy": "pipeline(schedule='1f1b')"}, WithoutStatistics, 2, why=SAME_WAIT),
        slow({"strategy": FSDPStrategy(shard=2)}, WithoutStatistics, 4, why=MORE_RANKS),
        slow({"strategy": FSDPStrategy(tensor_parallel=2)}, WithoutStatistics, 4, why=MORE_RANKS),
        slow({"strategy": "pipeline(stages=2)"}, WithoutStatistics, 4, why=MORE_RANKS),
    ],
    ids=lambda value: "".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_slow_rank_under_every_strategy(options: dict[str, Any], make: Any, nprocs: int) -> None:
    """It is named, with what it does, also where the others wait for it within a forward or a backward."""
    launch = Launch(Options(timeout=60, returns="all"), nprocs, 60)
    for (place, rank), *ranks in zip(PLACES, *launch(reported, make, **options), strict=True):
        for number, (is_same, seconds, shares, found) in enumerate(ranks):
            assert is_same, (place, number)
            assert found["steps"] == everywhere.STEPS - 1
            mine = found["ranks"][number]["parts"]
            assert sum(mine.values()) * found["steps"] == pytest.approx(seconds, rel=0.2), (place, number)
            assert found["samples_per_second"] * found["step"] == pytest.approx(4 * shares)
        lag = found["lags"][0]
        assert (lag["ranks"], lag["part"], lag["takes_turns"]) == ([rank], place, False), (place, found["ranks"])
