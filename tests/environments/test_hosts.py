"""Slurm's short forms."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from distwrap.environments.hosts import expand, tasks_per_node
from distwrap.errors import PlacementError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("gpu-[1,3].cluster,login", ["gpu-1.cluster", "gpu-3.cluster", "login"]),
        ("a-b-c[5]", ["a-b-c5"]),
    ],
)
def test_hosts_are_expanded(text: str, names: list[str]) -> None:
    """Ranges, widths, several brackets and what stands after them."""
    assert expand(text) == names


@pytest.mark.parametrize("text", ["", "n[", "n[a-b]", "n[1-]", "n]1[", "n[1-3"])
def test_what_is_no_list_is_refused(text: str) -> None:
    """A text that is not in Slurm's form is quoted."""
    with pytest.raises(PlacementError, match="is not a list of hosts"):
        expand(text)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20), st.integers(1, 4))
def test_no_host_is_lost(numbers: list[int], width: int) -> None:
    """As many names come out as numbers went in, each with at least the width of its form."""
    text = "n[" + ",".join(f"{n:0{width}d}" for n in numbers) + "]"
    assert expand(text) == [f"n{n:0{width}d}" for n in numbers]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=9))
def test_tasks_are_expanded(runs: list[tuple[int, int]]) -> None:
    """Runs of equal counts come out one by one."""
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "two", "2(x)", "2(3)", "-1"])
def test_what_counts_no_tasks_is_refused(text: str) -> None:
    """A text that does not count tasks is quoted."""
    with pytest.raises(PlacementError, match="how many tasks"):
        tasks_per_node(text)
