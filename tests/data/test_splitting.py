"""A list that the ranks share out, and put together again."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import distwrap as dw
from distwrap.errors import CollectiveError, LoaderError
from distwrap.testing import run_ranks
from tests.data.ranks import on_each_rank


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_parts_make_the_whole(count: int, ranks: int) -> None:
    """Each item is in one part, in the order of the ranks, and no two parts differ by more than one item."""
    items = [f"prompt {number}" for number in range(count)]
    parts = on_each_rank(ranks, lambda: dw.split(items))
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert list(map(len, parts)) == sorted(map(len, parts), reverse=True)


@pytest.mark.slow("starts workers, again and again")
def test_the_results_come_back_in_order() -> None:
    """Inference over an uneven list gives on every rank what one process gives, also where a rank has no item."""

    def answers(count: int) -> list[str]:
        return dw.gather_object([word * 2 for word in dw.split("abcdefg"[:count])], joined=True)

    for count in (0, 1, 5, 7):
        expected = answers(count)
        assert expected == [word * 2 for word in "abcdefg"[:count]]
        assert run_ranks(answers, 3, count) == [expected] * 3


def test_in_a_single_process_it_is_the_list_itself() -> None:
    """Alone the list is not copied."""
    items = [1, 2]
    assert dw.split(items) is items


def test_it_takes_what_a_slice_cuts() -> None:
    """Tuples, texts, ranges, tensors and arrays come back as such."""
    for items in ((1, 2, 3), "abc", range(3), torch.arange(3), numpy.arange(3)):
        parts: list[Any] = on_each_rank(2, lambda items=items: dw.split(items))  # type: ignore[misc]
        assert [type(part) for part in parts] == [type(items)] * 2
        assert [len(part) for part in parts] == [2, 1]


class Columns(list):  # type: ignore[type-arg]
    """A list whose slice is a dict, as that of a table of Hugging Face."""

    def __getitem__(self, index: Any) -> Any:
        return {"text": super().__getitem__(index)} if isinstance(index, slice) else super().__getitem__(index)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"a": 1}, r"not a dict. Give it list\(items.items\(\)\)"),
        ({1, 2}, r"not a set. Give it sorted\(items\)"),
        (iter([1]), r"not a list_iterator. Give it list\(items\)"),
        (Columns([1, 2]), r"not a Columns. Give it list\(items\)"),
        (torch.utils.data.TensorDataset(torch.arange(8)), r"not a TensorDataset. Give it list\(items\)"),
    ],
)
def test_what_has_no_parts_is_refused(items: Any, message: str) -> None:
    """On one process as on many, with the word that helps."""
    for ranks in (1, 2):
        with pytest.raises(LoaderError, match=message):
            on_each_rank(ranks, lambda: dw.split(items))


def test_what_cannot_be_joined_is_an_error_on_every_rank() -> None:
    """One rank's value that is no list leaves nobody waiting."""

    def on_rank() -> list[int]:
        for value in ([1], "ab")[dw.rank()], ({}, (1, 2))[dw.rank()]:
            with pytest.raises(CollectiveError, match="takes a list"):
                dw.gather_object(value, joined=True)  # type: ignore[call-overload]
        return dw.gather_object((dw.rank(),) * dw.rank(), joined=True)

    assert run_ranks(on_rank, 2, timeout=20) == [[1]] * 2
    with pytest.raises(CollectiveError, match="takes a list, not a str"):
        dw.gather_object("ab", joined=True)
