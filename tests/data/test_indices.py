from __future__ import annotations

from itertools import count, islice, product

import pytest
from hypothesis import given, settings, strategies as st

from distwrap.data import indices
from distwrap.data.indices import Mode
from tests.data.ranks import interleaved

quick = settings(deadline=None, derandomize=True, database=None, max_examples=200)

lengths = st.integers(0, 60)
worlds = st.integers(1, 9)
sizes = st.integers(1, 7)


def shares(n: int, world_size: int, mode: Mode) -> list[list[int]]:
    return [list(indices.share(range(n), rank, world_size, mode)) for rank in range(world_size)]


@pytest.mark.parametrize("mode", ["pad", "exact", "drop"])
@given(n=lengths, world_size=worlds)
@quick
def test_share_size_is_the_length_of_the_share(mode: Mode, n: int, world_size: int) -> None:
    """The size that a rank announces is what it then takes."""
    announced = [indices.share_size(n, rank, world_size, mode) for rank in range(world_size)]
    assert announced == [len(share) for share in shares(n, world_size, mode)]


@given(n=lengths, world_size=worlds)
@quick
def test_exact_shares_deal_out_the_stream(n: int, world_size: int) -> None:
    """Exact shares, put back in turn, are the stream itself."""
    assert interleaved(shares(n, world_size, "exact")) == list(range(n))


@given(n=lengths, world_size=worlds)
@quick
def test_padded_shares_repeat_from_the_start(n: int, world_size: int) -> None:
    """Padded shares, put back in turn, are the stream and then its start over again, as far as the last round needs."""
    dealt = interleaved(shares(n, world_size, "pad"))
    assert len(dealt) == -(-n // world_size) * world_size
    assert dealt == [index % n for index in range(len(dealt))]


@given(n=lengths, world_size=worlds)
@quick
def test_dropped_shares_are_the_full_rounds(n: int, world_size: int) -> None:
    """Shares in drop mode, put back in turn, are the stream without its last round, where that is not full."""
    assert interleaved(shares(n, world_size, "drop")) == list(range(n - n % world_size))


@pytest.mark.parametrize("mode", ["pad", "exact", "drop"])
def test_a_share_of_an_endless_stream_is_endless(mode: Mode) -> None:
    """A stream is read as it is needed, so it may have no end."""
    assert list(islice(indices.share(count(), 1, 3, mode), 4)) == [1, 4, 7, 10]


@given(n=lengths, world_size=worlds, batch_size=sizes)
@quick
def test_exact_batches_hold_each_index_once(n: int, world_size: int, batch_size: int) -> None:
    """The exact batches of all ranks together hold each index once, in the order of the shares."""
    total = indices.batch_count(n, world_size, batch_size, drop_last=False)
    for share in shares(n, world_size, "exact"):
        cut = list(indices.exact_batches(share, total, batch_size, drop_last=False))
        assert [index for batch in cut for index in batch] == share


@given(n=lengths, world_size=worlds, batch_size=sizes, drop_last=st.booleans())
@quick
def test_ranks_take_equally_many_exact_batches(n: int, world_size: int, batch_size: int, drop_last: bool) -> None:
    """With at least one sample a rank, all ranks take as many exact batches as was counted."""
    total = indices.batch_count(n, world_size, batch_size, drop_last)
    taken = [len(list(indices.exact_batches(s, total, batch_size, drop_last))) for s in shares(n, world_size, "exact")]
    if n >= world_size:
        assert taken == [total] * world_size
    else:
        assert taken == [0] * world_size if drop_last else [1] * n + [0] * (world_size - n)


@given(n=lengths, world_size=worlds, batch_size=sizes)
@quick
def test_only_the_last_exact_batch_differs_in_size(n: int, world_size: int, batch_size: int) -> None:
    """All batches but the last have the asked size, and the last is at most one sample larger."""
    total = indices.batch_count(n, world_size, batch_size, drop_last=False)
    for share in shares(n, world_size, "exact"):
        *full, last = [len(b) for b in indices.exact_batches(share, total, batch_size, drop_last=False)] or [1]
        assert full == [batch_size] * len(full)
        assert 1 <= last <= batch_size + 1


@given(n=lengths, world_size=worlds, batch_size=sizes)
@quick
def test_exact_batches_with_drop_last_are_full(n: int, world_size: int, batch_size: int) -> None:
    """With drop_last every exact batch has the asked size."""
    total = indices.batch_count(n, world_size, batch_size, drop_last=True)
    for share in shares(n, world_size, "exact"):
        assert all(len(b) == batch_size for b in indices.exact_batches(share, total, batch_size, drop_last=True))


@pytest.mark.parametrize("drop_last", [True, False])
def test_every_size_world_and_batch_in_exact_mode(drop_last: bool) -> None:
    """Each index once over all ranks, or the full batches of it; where each rank has a sample, all in step."""
    for n, world_size, batch_size in product(range(51), range(1, 7), range(1, 5)):
        total = indices.batch_count(n, world_size, batch_size, drop_last)
        cut = [list(indices.exact_batches(s, total, batch_size, drop_last)) for s in shares(n, world_size, "exact")]
        taken = sorted(index for steps in cut for batch in steps for index in batch)
        where = (n, world_size, batch_size)
        assert taken == (list(range(total * batch_size * world_size)) if drop_last else list(range(n))), where
        if n >= world_size:
            assert [len(steps) for steps in cut] == [total] * world_size, where


@given(n=st.integers(1, 40), world_size=worlds)
@quick
def test_merged_batches_keep_step_and_lose_nothing(n: int, world_size: int) -> None:
    """Ready-made batches are dealt out whole, each once, in equally many steps where there is one for each rank."""
    ready = [[2 * number, 2 * number + 1] for number in range(n)]
    fewest = max(n // world_size, 1)
    taken = [
        list(indices.merged_batches(indices.share(ready, rank, world_size, "exact"), fewest))
        for rank in range(world_size)
    ]
    assert sorted(index for steps in taken for batch in steps for index in batch) == list(range(2 * n))
    if n >= world_size:
        assert [len(steps) for steps in taken] == [fewest] * world_size
