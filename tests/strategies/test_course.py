"""The way of a rank that comes back through the program, without any process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distwrap.errors import LoaderError, ModelError
from distwrap.strategies.torchft.course import Course, Place


def of_loaders(count: int = 2) -> Course:
    course = Course()
    for _ in range(count):
        course.add_loader()
    return course


def sent(course: Course) -> tuple[Place, list[object], list[object]]:
    """Return what a rank that comes back gets."""
    return replace(course.place, passes=list(course.place.passes)), list(course.between), list(course.log)


def test_at_the_start_of_an_element() -> None:
    """Who comes in there begins with that element, and has nothing to make again."""
    there, back = of_loaders(), of_loaders()
    assert there.begin_loop() == 0
    there.begin_element(0)
    there.note("of the first element")
    there.begin_element(1)
    back.take_over(*sent(there))
    assert back.begin_loop() == 1
    back.begin_element(1)
    assert not back.is_replaying
    assert not back.begin_pass(0)


def test_within_a_pass() -> None:
    """Who comes in there gets what the others got in the element before, and skips the passes that are over."""
    there, back = of_loaders(), of_loaders()
    there.begin_loop()
    there.begin_element(2)
    there.note("first")
    assert not there.begin_pass(1)
    there.note("within a pass, which is not made again")
    there.end_pass(1)
    there.note("second")
    assert not there.begin_pass(0)
    there.place.at = 0
    back.take_over(*sent(there))
    assert back.begin_loop() == 2
    back.begin_element(2)
    assert back.is_replaying
    assert back.replayed("mean") == "first"
    assert back.begin_pass(1)  # skipped
    assert back.replayed("mean") == "second"
    assert not back.begin_pass(0)
    assert not back.is_replaying
    assert sent(back)[2] == ["first", "second"]  # it has it for the next that comes back


def test_loops_that_are_over_are_skipped() -> None:
    """One before the loop where the others are."""
    there, back = of_loaders(), of_loaders()
    there.begin_loop()
    there.end_loop()
    there.begin_loop()
    there.begin_element(3)
    back.take_over(*sent(there))
    assert back.begin_loop() is None
    assert back.begin_loop() == 3


def test_other_collectives_are_an_error() -> None:
    """A program that does something else on its way back is told so, and gets no wrong number."""
    there, back = of_loaders(), of_loaders()
    there.begin_loop()
    there.begin_element(0)
    there.note("first")
    there.begin_pass(0)
    there.place.at = 0
    back.take_over(*sent(there))
    back.begin_loop()
    back.begin_element(0)
    with pytest.raises(ModelError, match="called 1 more collectives"):
        back.begin_pass(0)
    back.take_over(*sent(there))
    assert back.replayed("mean") == "first"
    with pytest.raises(ModelError, match=r"called mean\(\) where the others did not"):
        back.replayed("mean")


def test_what_cannot_be_followed_is_refused() -> None:
    """Loaders in the loop, other numbers of them, loops in loops."""
    there = of_loaders()
    there.begin_loop()
    with pytest.raises(LoaderError, match=r"shard_loader\(\) inside of a resumable\(\) loop"):
        there.add_loader()
    with pytest.raises(ModelError, match=r"resumable\(\) inside of a resumable\(\) loop"):
        there.begin_loop()
    with pytest.raises(LoaderError, match="with 1 sharded loaders, and the others have 2"):
        of_loaders(1).take_over(*sent(there))


def test_where_ranks_come_in() -> None:
    """Before a batch of the outermost pass of the element; elsewhere they would not be where the others are."""
    course = of_loaders()
    course.begin_loop()
    course.begin_element(0)
    course.begin_pass(1)
    course.begin_pass(0)
    assert course.admits(1)
    assert not course.admits(0)  # who comes in would miss the outer pass's batch
    course.end_pass(1)
    assert course.admits(0)
    course.begin_element(1)
    assert not course.admits(0)  # of an earlier element: the element may have had batches of it already
    course.end_pass(0)
    course.begin_pass(0)
    assert course.admits(0)


def test_passes_that_count_their_batches() -> None:
    """Where a pass makes collectives, or is left in the middle, who comes in within it would count otherwise."""
    for change in ("collective", "break"):
        course = of_loaders()
        course.begin_loop()
        course.begin_element(0)
        course.begin_pass(0)
        if change == "collective":
            course.note("a mean, each ten batches")
        course.end_pass(0, was_left=change == "break")
        course.begin_element(1)
        course.begin_pass(0)
        assert not course.admits(0)


def test_between_loops() -> None:
    """Collectives between two loops are given again to who comes back in the second."""
    there, back = of_loaders(), of_loaders()
    there.begin_loop()
    there.begin_element(0)
    there.note("in the first loop, which is skipped")
    there.end_loop()
    there.note("between")
    there.begin_loop()
    there.begin_element(1)
    back.take_over(*sent(there))
    assert back.begin_loop() is None
    assert back.replayed("mean") == "between"
    assert back.begin_loop() == 1
    back.begin_element(1)
    assert not back.is_replaying


def test_landing_is_told_once() -> None:
    """When the rank is where the others are, it takes their state over."""
    landings: list[str] = []
    there, back = of_loaders(), Course(lambda: landings.append("landed"))
    back.add_loader()
    back.add_loader()
    there.begin_loop()
    there.begin_element(0)
    there.begin_pass(0)
    there.place.at = 0
    back.take_over(*sent(there))
    back.begin_loop()
    back.begin_element(0)
    assert landings == []
    back.begin_pass(0)
    assert landings == ["landed"]
