"""The report under every strategy, in loops of every style: who is slow, in what, and that nothing else changes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap import FSDPStrategy
from distwrap.group.world import current_world
from distwrap.options import Options
from distwrap.testing import run_ranks
from distwrap.testing.ranks import Launch
from tests.measuring import measured_again
from tests.slow import MORE_RANKS, slow
from tests.timing import everywhere, styles
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
@pytest.mark.slow("measures loops of some seconds")
@measured_again
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


def measured(loop: Callable[[], None]) -> tuple[dict[str, Any], float]:
    styles.ENDS.clear()
    with dw.report() as report:
        loop()
    return report.figures, styles.ENDS[-1] - styles.ENDS[0] if styles.ENDS else 0.0


STYLES: dict[Callable[[], None], tuple[int, str]] = {
    styles.accumulated: (1, "forward"),
    styles.in_lockstep: (1, "forward"),
    styles.by_a_generator: (1, "data"),
    styles.joined: (1, "forward"),
    styles.by_helpers: (1, "forward"),
    styles.with_closures: (1, "own"),
    styles.of_two_models: (1, "forward"),
    styles.with_a_penalty: (1, "forward"),
    styles.compiled_around: (1, "own"),
    styles.compiled_within: (1, "own"),
    styles.recomputed: (1, "forward"),
    styles.recomputed_reentrantly: (1, "backward"),
    styles.evaluated: (1, "evaluation"),
    styles.twice: (1, "forward"),
    styles.on_a_plateau: (1, "forward"),
    styles.stopped_early: (1, "forward"),
    styles.one_first: (0, "own"),
    styles.by_workers: (1, "data"),
    styles.copied_ahead: (1, "data"),
    styles.dispatched: (0, "data"),
    styles.with_a_bar: (1, "data"),
}


@pytest.mark.parametrize("loop", STYLES, ids=lambda loop: loop.__name__)
@pytest.mark.slow("measures loops of some seconds")
@measured_again
def test_a_slow_rank_in_loops_of_every_style(loop: Callable[[], None]) -> None:
    """It is named, with what it does; the parts are the whole; samples are counted once."""
    ranks = run_ranks(measured, 2, loop, timeout=60)
    found = ranks[0][0]
    for number, (_, seconds) in enumerate(ranks):
        mine = found["ranks"][number]
        assert sum(mine["parts"].values()) * mine["steps"] == pytest.approx(seconds, rel=0.2), number
        # The step between the two loops has the first step of the second one in it.
        assert mine["samples"] == pytest.approx(4.5 if loop is styles.twice else 4), number
    lag = found["lags"][0]
    rank, part = STYLES[loop]
    assert (lag["ranks"], lag["part"], lag["takes_turns"]) == ([rank], part, False), found["ranks"]
    if loop in (styles.in_lockstep, styles.by_a_generator):
        assert not found["ranks"][0]["waiting_calls"]  # of the loop itself


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@measured_again
def test_a_slow_rank_in_other_precisions(precision: str) -> None:
    (found, _), _ = Launch(Options(timeout=60, returns="all"), 2, 60)(measured, styles.by_helpers, precision=precision)
    lag = found["lags"][0]
    assert (lag["ranks"], lag["part"]) == ([1], "forward")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_was_wrapped_before(ranks: int) -> None:
    """It is measured; it can be copied and saved meanwhile, and after the report it is as it was, as its copy is."""
    run_ranks(_wrapped_before, ranks)


def _wrapped_before() -> None:
    model, optimizer = styles.wrapped(styles.net())
    with dw.report() as report:
        for x in torch.randn(3, 4, 8, generator=dw.rank_generator(0)):
            model(x).mean().backward()
            optimizer.step()
        copied = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
    assert report.figures["parts"]["forward"] > 0
    for each in (model, copied):
        routing = each.__dict__.get("_distwrap")
        assert routing is None or routing._around is None
    assert not model._forward_hooks


def test_loops_without_steps() -> None:
    """There is nothing to tell of them."""
    for loop in (styles.no_step, styles.without_an_optimizer):
        assert run_ranks(measured, 2, loop) == [({}, 0.0)] * 2
