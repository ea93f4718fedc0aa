"""The parts of a step on a clock that the test sets: without gaps, overlaps or leftovers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distwrap.stopwatch import HostClock, Part, Row, Stopwatch


class Clock(HostClock):
    """A clock that stands still until it is set, and whose moments may be reached later."""

    def __init__(self) -> None:
        self.time = 0.0
        self.reached = float("inf")

    def now(self) -> float:
        return self.time

    def is_reached(self, moment: float) -> bool:
        return moment <= self.reached


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rows() -> list[Row]:
    return []


@pytest.fixture
def watch(clock: Clock, rows: list[Row]) -> Stopwatch:
    made = Stopwatch(clock)
    made.on_row.append(rows.append)
    return made


def seconds(row: Row) -> dict[str, float]:
    return {part.name: row[part] for part in Part if row[part]}


def test_a_moment_belongs_to_the_innermost_part(clock: Clock, rows: list[Row], watch: Stopwatch) -> None:
    clock.time = 1
    watch.begin(Part.BACKWARD)
    clock.time = 3
    watch.begin(Part.EXCHANGE)
    clock.time = 7
    watch.end(Part.BACKWARD)  # and of what was begun in it
    clock.time = 8
    watch.step()
    clock.time = 10
    watch.step()
    assert [seconds(row) for row in rows] == [{"OWN": 2, "BACKWARD": 2, "EXCHANGE": 4}, {"OWN": 2}]


def test_what_never_began_cannot_end(clock: Clock, rows: list[Row], watch: Stopwatch) -> None:
    watch.begin(Part.DATA)
    clock.time = 2
    watch.end(Part.OPTIMIZER)
    watch.end(Part.DATA)
    watch.end(Part.DATA)
    watch.step()
    assert [seconds(row) for row in rows] == [{"DATA": 2}]


def test_a_step_that_the_device_has_not_come_to(clock: Clock, rows: list[Row], watch: Stopwatch) -> None:
    clock.reached = 1
    for time in (1, 2, 3):
        clock.time = time
        watch.step()
    assert len(rows) == 1
    clock.reached = 3
    watch.settle()
    assert len(rows) == 3


def test_what_came_before_the_first_step_is_no_step(clock: Clock, rows: list[Row], watch: Stopwatch) -> None:
    clock.time = 5
    watch.begin_first()
    clock.time = 6
    watch.step()
    assert [seconds(row) for row in rows] == [{"OWN": 1}]


def test_a_loop_over_data(clock: Clock, rows: list[Row], watch: Stopwatch) -> None:
    """What is between two waits of an evaluation is evaluation too; an exception of the loader's comes through."""

    def batches() -> Iterator[int]:
        for number in range(2):
            clock.time += 1
            yield number
        raise ValueError("broken")

    def loop() -> None:
        for _ in watch.timed(batches()):
            clock.time += 10

    with pytest.raises(ValueError, match="broken"):
        loop()
    watch.step()
    with torch.no_grad(), pytest.raises(ValueError, match="broken"):
        loop()
    clock.time += 5
    watch.step()
    assert [seconds(row) for row in rows] == [{"DATA": 2, "OWN": 20}, {"EVALUATION": 22, "OWN": 5}]
