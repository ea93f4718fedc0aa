from __future__ import annotations

import os
import pickle
import random
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distwrap import seed_everything, shard_loader
from distwrap.errors import OptionError
from distwrap.seeding import BorrowedRandomness, RandomState, mix, preserved
from distwrap.testing import run_ranks
from tests.data.ranks import standing_on
from tests.snapshot import random_state


def draw() -> tuple[float, float, float]:
    """A number of each global generator."""
    return torch.rand(()).item(), random.random(), float(numpy.random.random())


def drawn_after_seeding() -> tuple[float, float, float]:
    assert seed_everything(7) == 7
    return draw()


def test_a_seed_seeds_all_generators() -> None:
    """The same seed gives the same numbers of torch, random and numpy, and another seed others."""
    with preserved():
        first = drawn_after_seeding()
        assert drawn_after_seeding() == first
        seed_everything(8)
        assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_ranks_are_seeded_alike() -> None:
    """Every rank draws what one process draws after the same seed."""
    with preserved():
        alone = drawn_after_seeding()
    assert run_ranks(drawn_after_seeding, 2) == [alone, alone]


def test_seeding_is_remembered_for_the_loaders() -> None:
    """A loader that is sharded after seed_everything shuffles by that seed."""
    data = torch.utils.data.TensorDataset(torch.arange(20))
    with preserved(), standing_on(0, 2):
        seed_everything(11)
        loader = shard_loader(torch.utils.data.DataLoader(data, shuffle=True))
    by_hand = torch.utils.data.DistributedSampler(data, 2, 0, seed=11)
    assert list(loader.sampler) == list(by_hand)


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_large_seeds_are_taken(seed: int) -> None:
    """Any whole number of 63 bits is a seed, also where numpy takes only 32 of them."""
    with preserved():
        assert seed_everything(seed) == seed


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "7", True, None])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    """A wrong seed is refused before any generator is touched."""
    before = random_state()
    with pytest.raises(OptionError, match=r"it must be a whole number from 0 to 2\*\*63 - 1"):
        seed_everything(seed)  # type: ignore[arg-type]
    assert random_state() == before


def test_a_captured_state_is_restored() -> None:
    """A state put back gives the same numbers once more."""
    with preserved():
        state = RandomState.capture()
        first = draw()
        draw()
        state.restore()
        assert draw() == first


def test_a_sent_state_opens_nothing() -> None:
    """A state that a spawned process is given holds no shared memory in its sender, and is the same there."""
    with preserved():
        state, before = RandomState.capture(), len(os.listdir("/proc/self/fd"))
        sent = ForkingPickler.dumps(state)
        assert len(os.listdir("/proc/self/fd")) == before
        first = draw()
        pickle.loads(sent).restore()
        assert draw() == first


def test_random_numbers_are_preserved() -> None:
    """Whatever is drawn and seeded inside, also where it fails, the caller's numbers go on as before."""
    before = random_state()
    with suppress(KeyError), preserved():
        drawn_after_seeding()
        raise KeyError
    assert random_state() == before


def test_a_borrowed_stream_goes_on_where_it_was() -> None:
    """Numbers drawn in two loans are those drawn in one, whatever the caller draws between them."""
    with preserved():
        once, twice = BorrowedRandomness(3), BorrowedRandomness(3)
        with once.lent():
            expected = [draw(), draw()]
        drawn = []
        for _ in range(2):
            draw()
            with twice.lent():
                drawn.append(draw())
    assert drawn == expected


def test_a_loan_gives_the_callers_stream_back() -> None:
    """After a loan, also one that fails, the caller's own stream goes on."""
    before = random_state()
    with suppress(KeyError), BorrowedRandomness(3).lent():
        draw()
        raise KeyError
    assert random_state() == before


parts = st.lists(st.integers(0, 2**63) | st.text("abc", min_size=1), min_size=1, max_size=4)


@given(parts, parts)
@settings(deadline=None, derandomize=True, database=None)
@pytest.mark.slow("others of its kind are in make test")
def test_mixed_seeds_differ(one: list[int | str], other: list[int | str]) -> None:
    """Different parts mix to different seeds of 63 bits, and the same parts to the same."""
    assert 0 <= mix(*one) < 2**63
    assert (mix(*one) == mix(*other)) == (one == other)
