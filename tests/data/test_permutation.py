"""The computed shuffle is a permutation for every n, alike wherever it is asked, and as even as a drawn one."""

from __future__ import annotations

from itertools import permutations
from math import sqrt

import pytest
import torch
from hypothesis import given, strategies as st

from distwrap.data.permutation import Permutation
from tests.slow import nightly


@given(st.integers(0, 3000), st.integers(0, 2**63))
def test_no_number_is_lost_or_repeated(n: int, seed: int) -> None:
    """Every n, of whatever form: each number from 0 to n-1 once."""
    assert torch.equal(Permutation(n, seed)(torch.arange(n)).sort().values, torch.arange(n))


@pytest.mark.parametrize("n", [2**20 - 1, 2**20, 2**20 + 1, 1_000_003])
@pytest.mark.slow("others of its kind are in make test")
def test_many_numbers(n: int) -> None:
    """The same for numbers that fill the bits, just do not, and just overflow."""
    assert torch.equal(Permutation(n, 1)(torch.arange(n)).sort().values, torch.arange(n))


@given(st.integers(1, 2**62), st.integers(0, 2**63), st.integers(0, 2**62))
@pytest.mark.slow("counts thousands of orders")
def test_a_position_alone_gives_what_it_gives_among_others(n: int, seed: int, start: int) -> None:
    """Any stretch can be computed alone, at any n, and stays in range."""
    start %= n
    positions = torch.arange(start, min(n, start + 50))
    shuffle = Permutation(n, seed)
    found = shuffle(positions)
    assert int(found.min()) >= 0
    assert int(found.max()) < n
    assert len(set(found.tolist())) == len(positions)
    assert found.tolist() == [int(shuffle(position[None])[0]) for position in positions]


def test_it_does_not_change() -> None:
    """What a checkpoint's seed and position mean must mean the same in every later version."""
    assert Permutation(10, 0)(torch.arange(10)).tolist() == EXPECTED_TEN
    assert Permutation(10**9, 1)(torch.arange(3)).tolist() == EXPECTED_BILLION


EXPECTED_TEN = [3, 6, 5, 4, 9, 7, 2, 0, 1, 8]
EXPECTED_BILLION = [783476431, 160886018, 623262383]


def chi_square(counts: torch.Tensor) -> float:
    """How many standard deviations the counts are from even ones, as chi-square's normal approximation has it."""
    expected = float(counts.sum()) / counts.numel()
    freedom = counts.numel() - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / sqrt(2 * freedom)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.slow("counts thousands of orders")
def test_every_order_is_as_likely(n: int) -> None:
    """Over many seeds each of the n! orders comes equally often."""
    numbered = {order: i for i, order in enumerate(permutations(range(n)))}
    counts = torch.zeros(len(numbered))
    for seed in range(6000):
        counts[numbered[tuple(Permutation(n, seed)(torch.arange(n)).tolist())]] += 1
    assert abs(chi_square(counts)) < 5


@pytest.mark.slow("counts over many permutations")
@pytest.mark.parametrize("n", [10, 16, nightly(50, row="products", why="smaller sizes show it")])
def test_every_number_is_as_likely_everywhere(n: int) -> None:
    """Over many seeds each number stands at each position equally often."""
    counts = torch.zeros(n, n)
    for seed in range(3000):
        counts[torch.arange(n), Permutation(n, seed)(torch.arange(n))] += 1
    assert abs(chi_square(counts.flatten())) < 5


@pytest.mark.slow("counts over many permutations")
@pytest.mark.parametrize("n", [10, 16, nightly(50, row="products", why="smaller sizes show it")])
def test_neighbours_are_independent(n: int) -> None:
    """Over many seeds the difference of two neighbours, modulo n, is any but zero, equally often."""
    counts = torch.zeros(n)
    for seed in range(3000):
        found = Permutation(n, seed)(torch.arange(n))
        counts += torch.bincount((found[1:] - found[:-1]) % n, minlength=n)
    assert counts[0] == 0
    assert abs(chi_square(counts[1:])) < 5


@pytest.mark.parametrize("n", [1_000_000, 10**12])
def test_a_stretch_is_spread_over_the_whole(n: int) -> None:
    """The first 100,000 of a big shuffle fall evenly into 1,000 parts of the whole."""
    found = Permutation(n, 3)(torch.arange(100_000))
    counts = torch.bincount(found * 1000 // n, minlength=1000).float()
    spread = chi_square(counts)
    # Without replacement the counts are a little more even than independent ones.
    assert -8 < spread < 5


def test_other_seeds_give_other_orders() -> None:
    """Two seeds agree at about one position, as two random permutations do."""
    orders = [Permutation(1000, seed)(torch.arange(1000)) for seed in range(60)]
    agree = [int((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert 0.8 < sum(agree) / len(agree) < 1.2


@pytest.mark.parametrize("n", [-1, 2**62 + 1])
def test_sizes_out_of_range(n: int) -> None:
    """What cannot be computed is refused."""
    with pytest.raises(ValueError, match="it must be 0 to 2"):
        Permutation(n, 0)
