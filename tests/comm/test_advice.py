"""What the doctor recommends, and why: the arithmetic without processes, the measuring with them."""

from __future__ import annotations

import json

import pytest

from distwrap.cli import main
from distwrap.comm.advice import Cost, choose, predict
from distwrap.registry import algorithms

# Seconds a weight of each, of four ranks on a link of 100 Mbit/s, and a codec that is not free.
SLOW = {
    "allreduce": Cost(1e-3, 4.8e-7),
    "bf16": Cost(1e-3, 2.4e-7),
    "bytegrad": Cost(1e-3, 1.25e-7),
    "qadam(bits=1)": Cost(1e-3, 0.2e-7),
}
FAST = {name: Cost(1e-4, cost.seconds_a_weight / 1000 + 1e-9) for name, cost in SLOW.items()}


def test_a_fast_link_needs_nothing() -> None:
    assert choose(predict(FAST, 1e7, 0.1), 0.1)[0] == "allreduce"


def test_a_slow_link_needs_steps_of_ones_own() -> None:
    comm, reason = choose(predict(SLOW, 1e7, 0.1), 0.1)
    assert comm == "local_sgd(sync_every=32)" or comm == "async"
    assert "times the steps of plain DDP" in reason


def test_a_link_half_as_slow_needs_few_bytes() -> None:
    """With enough compute to hide behind, what bends training least is enough."""
    rows = predict(SLOW, 1e6, 0.5)
    assert choose(rows, 0.5)[0] == "bf16"


def test_predictions_are_ordered_like_their_bytes() -> None:
    steps = {row.comm: row.step for row in predict(SLOW, 1e7, 0.1)}
    assert steps["allreduce"] > steps["bf16"] > steps["bytegrad"] > steps["qadam(bits=1)"] > steps["async"]
    assert steps["allreduce"] == pytest.approx(0.1 + 1e-3 + 4.8 - 0.05)


@pytest.mark.slow("measures all algorithms")
def test_the_doctor_measures_and_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--comm", "--nprocs", "2", "--weights", "1e6", "--step-ms", "20"]) == 0
    said = capsys.readouterr().out
    assert "A step of a model with 1 million weights, 2 ranks" in said
    assert "compute alone 20.0 ms" in said
    assert "Recommended: comm='" in said


@pytest.mark.slow("measures the link and every codec")
def test_what_it_recommends_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--comm", "--nprocs", "2", "--weights", "1e5", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["comm"]
    for row in advice["predictions"]:
        assert algorithms.make(row["comm"]) is not None
        assert 0 <= row["exchange"] < 10
        assert row["step"] >= advice["compute"] * 0.999
    assert advice["choice"] in {row["comm"] for row in advice["predictions"]}
