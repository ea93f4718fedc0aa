"""Which random numbers are alike on all ranks, and which differ."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from distwrap import distributed, gather_object, seed_everything, shard_loader
from distwrap.seeding import BorrowedRandomness, preserved, seed_generators
from distwrap.testing import run_ranks
from tests.data.ranks import batches, on_each_rank, standing_on

DATA: Any = list(range(40))


def words(name: str) -> list[int]:
    """The next whole numbers of a generator, as the Mersenne Twister gives them."""
    if name == "torch":
        return [int(torch.empty((), dtype=torch.int64).random_(2**32)) for _ in range(9)]
    if name == "random":
        return [random.getrandbits(32) for _ in range(9)]
    return [int(numpy.random.randint(2**32, dtype=numpy.uint64)) for _ in range(9)]


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**40 + 3])
@pytest.mark.parametrize("how", [seed_everything, seed_generators])
def test_no_two_generators_share_a_stream(seed: int, how: Any) -> None:
    """torch, random and numpy, which are one algorithm, draw different numbers after one seed."""
    with preserved():
        how(seed)
        drawn = {name: words(name) for name in ("torch", "random", "numpy")}
    assert len({number for numbers in drawn.values() for number in numbers}) == 27


def test_a_samplers_generators_share_no_stream() -> None:
    """The global generator and those of a sampler's own are lent different streams."""
    own = [torch.Generator(), torch.Generator()]
    with BorrowedRandomness(3, *own).lent():
        drawn = [torch.rand(9), *(torch.rand(9, generator=each) for each in own)]
    assert len(torch.cat(drawn).unique()) == 27


@distributed(nprocs=2)
def draws() -> list[Any]:
    return gather_object((random.random(), numpy.random.rand(), torch.rand(1).item(), hash("a"), list({*"abcdefgh"})))


@pytest.mark.parametrize("launcher", ["fork", "forkserver", "spawn"])
@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_ranks_decide_alike_without_a_seed(launcher: Any) -> None:
    """All generators, and the order of a set of strings, are alike on the ranks that we start, and the caller's."""
    one = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state())
    first, second = draws.options(launcher=launcher)()
    assert first == second
    assert one[0] == random.getstate()
    assert first[:3] == (random.random(), numpy.random.rand(), torch.rand(1).item())


def shuffles() -> list[list[int]]:
    return batches(shard_loader(torch.utils.data.DataLoader(DATA, batch_size=20, shuffle=True)))


shuffles_of_launch = distributed(nprocs=2)(shuffles)


@pytest.mark.parametrize("launcher", ["fork", "forkserver"])
def test_a_seed_before_the_call_is_the_loaders(launcher: Any) -> None:
    """seed_everything in the caller seeds the shuffle in the ranks, and the ranks' other numbers as in the caller."""
    with preserved():
        seed_everything(11)
        expected = on_each_rank(2, shuffles, seed=11)[0]
        assert shuffles_of_launch.options(launcher=launcher)() == expected
    assert expected != on_each_rank(2, shuffles)[0]


def apart() -> tuple[float, ...]:
    seed_everything(5, apart=True)
    return torch.rand(1).item(), random.random(), numpy.random.rand()


def test_noise_in_the_loop_apart() -> None:
    """seed_everything(apart=True) gives each rank numbers of its own, and the first rank those of one process."""
    with preserved():
        alone = apart()
    first, second = run_ranks(apart, 2)
    assert first == alone
    assert not set(first) & set(second)


def test_loaders_shuffle_alike_though_the_loop_is_apart() -> None:
    """The shares are of one order, whose seed is that of seed_everything."""
    with preserved():
        for one in range(2):
            with standing_on(one, 2):
                seed_everything(5, apart=True)
                sampler: Any = shard_loader(torch.utils.data.DataLoader(DATA, shuffle=True)).sampler
                assert sampler.seed == 5
