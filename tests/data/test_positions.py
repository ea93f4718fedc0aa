"""A loader goes on where a run was cut off: each remaining sample once, for any number of ranks and batch size."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler, WeightedRandomSampler

from distwrap import load, rank, save, shard_loader
from distwrap.data.indices import Mode
from distwrap.errors import LoaderError
from distwrap.testing import run_ranks
from tests.data.ranks import batches, standing_on


def sharded(n: int, rank: int, world_size: int, batch_size: int, shuffle: str, mode: Mode, drop_last: bool) -> Any:
    order: Any = shuffle or "auto"
    loader = DataLoader(range(n), batch_size, shuffle=bool(shuffle), drop_last=drop_last)  # type: ignore[arg-type]
    with standing_on(rank, world_size):
        return shard_loader(loader, mode=mode, order=order, seed=3)


def run_of(loader: Any, steps: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in islice(loader, steps)]


worlds = st.integers(1, 5)
sizes = st.integers(1, 4)


@given(
    st.integers(1, 60),
    st.tuples(worlds, sizes),
    st.tuples(worlds, sizes),
    st.integers(0, 30),
    st.integers(0, 3),
    st.sampled_from(["pad", "exact", "drop"]),
    st.sampled_from(["", "torch", "stream"]),
)
@pytest.mark.slow("others of its kind are in make test")
def test_each_remaining_sample_once(
    n: int, before: tuple[int, int], after: tuple[int, int], steps: int, epoch: int, mode: Mode, shuffle: str
) -> None:
    """Cut off after any number of steps, and gone on with by other ranks and batches, no sample is lost or repeated."""
    taken: Counter[int] = Counter()
    states = []
    for r in range(before[0]):
        loader = sharded(n, r, *before, shuffle, mode, False)
        loader.set_epoch(epoch)
        taken.update(index for batch in run_of(loader, steps) for index in batch)
        states.append(loader.state_dict())
    # With fewer samples than ranks, those without one are at the end of the epoch when the others are in it.
    assert n < before[0] or all(state == states[0] for state in states)
    rest: Counter[int] = Counter()
    lengths = set()
    for r in range(after[0]):
        loader = sharded(n, r, *after, shuffle, mode, False)
        loader.load_state_dict(states[0])
        share = run_of(loader)
        lengths.add(len(share))
        rest.update(index for batch in share for index in batch)
    ended = states[0]["epoch"] == epoch + 1
    assert states[0]["epoch"] - epoch in (0, 1)
    if ended:  # the whole next epoch is to come
        taken.clear()
    seen = taken + rest
    assert set(seen) <= set(range(n))
    if mode == "exact":
        assert seen == Counter(range(n))
    elif mode == "drop":
        assert all(times == 1 for times in seen.values())
        assert len(seen) > n - after[0] - before[0]
        assert len(lengths) == 1
    elif n:
        assert set(seen) == set(range(n))
        repeated = sum(seen.values()) - n
        assert repeated < before[0] + after[0]
        assert len(lengths) == 1


@given(
    st.integers(1, 60),
    worlds,
    sizes,
    st.integers(0, 20),
    st.sampled_from(["pad", "exact", "drop"]),
    st.sampled_from(["", "torch", "stream"]),
    st.booleans(),
)
def test_gone_on_is_uninterrupted(
    n: int, world_size: int, size: int, steps: int, mode: Mode, shuffle: str, drop_last: bool
) -> None:
    """With the same ranks and batches, what is left of the epoch and the next one are to the bit what they were."""
    share = {"pad": -(-n // world_size), "exact": n // world_size, "drop": size}[mode]
    assume(not drop_last or n < size or share >= size)  # else refused
    for r in range(world_size):
        options: Any = (n, r, world_size, size, shuffle, mode, drop_last)
        whole, cut, again = sharded(*options), sharded(*options), sharded(*options)
        expected = run_of(whole), run_of(whole), run_of(whole)
        run_of(cut)
        done = run_of(cut, steps)
        again.load_state_dict(cut.state_dict())
        assert done == expected[1][:steps]
        rest = run_of(again)
        if steps > len(expected[1]):  # the loop saw the end
            assert rest == expected[2]
        else:
            assert done + rest == expected[1]
            assert run_of(again) == expected[2]


class Seen(Dataset[int]):
    """Keeps in mind what was fetched."""

    def __init__(self, n: int) -> None:
        self.n, self.fetched = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.fetched += 1
        return index


@pytest.mark.parametrize("n", [1000, 10**9])
def test_nothing_is_fetched_again(n: int) -> None:
    """The middle of a big dataset is as near as its start."""
    state = {"epoch": 2, "consumed": n // 2, "order": "stream", "seed": 5, "unit": "samples", "items": n}
    dataset = Seen(n)
    with standing_on(1, 2):
        loader = shard_loader(DataLoader(dataset, batch_size=4, shuffle=True), order="stream")
    loader.load_state_dict(state)  # type: ignore[attr-defined]
    assert len(run_of(loader, 1)[0]) == dataset.fetched == 4
    assert loader.state_dict()["consumed"] == n // 2 + 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("persistent", [False, True])
def test_what_the_loop_had_counts_and_not_what_workers_fetched(persistent: bool) -> None:
    """With two workers that fetch ahead, the position is the loop's, and the rest comes with workers too."""

    def loader_of() -> Any:
        return DataLoader(
            range(48),  # type: ignore[arg-type]
            batch_size=3,
            shuffle=True,
            num_workers=2,
            prefetch_factor=3,
            persistent_workers=persistent,
        )

    with standing_on(0, 2):
        whole, cut, again = (shard_loader(loader_of(), seed=0) for _ in range(3))
    expected = run_of(whole), run_of(whole)
    loop = iter(cut)
    done = [next(loop).tolist() for _ in range(3)]
    state = cut.state_dict()
    assert state["consumed"] == 18
    del loop
    again.load_state_dict(state)
    assert done + run_of(again) == expected[0]
    assert run_of(again) == expected[1]


def test_positions_of_a_loop() -> None:
    """At the start, in the last batch, after the end, after an early end: where the loop is."""
    loader = sharded(12, 0, 2, 2, "torch", "pad", False)

    def where() -> tuple[int, int]:
        state = loader.state_dict()
        return state["epoch"], state["consumed"]

    assert where() == (0, 0)
    assert [where() for _ in loader] == [(0, 4), (0, 8), (0, 12)]
    assert where() == (1, 0)
    for _ in loader:
        break
    assert where() == (1, 4)
    loader.set_epoch(7)
    assert where() == (7, 0)


def test_a_loop_that_says_its_epoch_keeps_the_position() -> None:
    """set_epoch of the very epoch that was cut off, as every resumed loop calls it, does not begin it again."""
    state = {"epoch": 3, "consumed": 8, "order": "torch", "seed": 6, "unit": "samples", "items": 12}
    loader = sharded(12, 0, 2, 2, "torch", "pad", False)
    loader.load_state_dict(state)
    loader.set_epoch(3)
    assert len(run_of(loader)) == 1
    loader.load_state_dict(state)
    loader.set_epoch(4)
    assert len(run_of(loader)) == 3


class Triples(Sampler[list[int]]):
    """Ready-made batches in a random order."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[list[int]]:
        return ([3 * int(i), 3 * int(i) + 1, 3 * int(i) + 2] for i in torch.randperm(9))


CUSTOM: dict[str, dict[str, Any]] = {
    "sampler": {"sampler": WeightedRandomSampler([1.0] * 27, 27, replacement=False), "batch_size": 2},
    "batch sampler": {"batch_sampler": Triples()},
    "single items": {"batch_size": None, "shuffle": True},
}


@pytest.mark.parametrize("mode", ["pad", "drop", "exact"])
@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_samplers_go_on(kind: str, mode: Mode) -> None:
    """The order of a custom sampler is drawn again, and gone on with by another number of ranks."""
    n = 27 if kind != "single items" else 30

    def loader_of(r: int, world_size: int) -> Any:
        options = CUSTOM[kind]
        with standing_on(r, world_size):
            return shard_loader(DataLoader(range(n), **options), mode=mode, seed=1)  # type: ignore[arg-type]

    def flat(taken: Any) -> list[int]:
        return [int(index) for batch in taken for index in torch.as_tensor(batch).reshape(-1)]

    seen: list[int] = []
    for r in range(3):
        cut = loader_of(r, 3)
        batches(cut) if kind != "single items" else list(cut)
        seen += flat(islice(cut, 2))
    for r in range(2):
        again = loader_of(r, 2)
        again.load_state_dict(cut.state_dict())
        seen += flat(again)
    times = Counter(seen)
    if mode == "exact":
        assert times == Counter(range(n))
    elif mode == "pad":
        assert set(times) == set(range(n))
    else:
        assert max(times.values()) == 1
        assert len(times) > n - 6


def plain(n: int = 20, **options: Any) -> Any:
    return shard_loader(DataLoader(range(n), batch_size=3, shuffle=True, **options))  # type: ignore[arg-type]


def test_a_single_process_keeps_its_order() -> None:
    """Beside the position nothing changes: the batches are those of the loader that was never handed over."""
    for options in ({}, {"generator": 4}, {"num_workers": 2}):
        taken = []
        for ours in (False, True):
            torch.manual_seed(1)
            given: Any = dict(options)
            if "generator" in given:
                given["generator"] = torch.Generator().manual_seed(4)
            loader: Any = DataLoader(range(20), batch_size=3, shuffle=True, **given)  # type: ignore[arg-type]
            loader = shard_loader(loader) if ours else loader
            taken.append([batches(loader), batches(loader), torch.rand(1).item()])
        assert taken[0] == taken[1]


@pytest.mark.parametrize("options", [{}, {"generator": True}, {"num_workers": 2}], ids=str)
def test_a_single_process_goes_on(options: dict[str, Any]) -> None:
    """The rest of the epoch is the uninterrupted one's; so is the next, when the random numbers go on too."""

    def loader_of() -> Any:
        generator = {"generator": torch.Generator().manual_seed(4)} if "generator" in options else {}
        return plain(**{**options, **generator})

    torch.manual_seed(1)
    whole = loader_of()
    expected = batches(whole), batches(whole)
    torch.manual_seed(1)
    cut = loader_of()
    done = run_of(cut, 2)
    state, random_state = pickle.loads(pickle.dumps(cut.state_dict())), torch.get_rng_state()
    again = loader_of()
    again.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert done + batches(again) == expected[0]
    if not options:
        assert batches(again) == expected[1]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_from_one_process_to_three_and_back(before: int, after: int) -> None:
    """A run of one process is gone on with by three, and the other way round."""

    def loaders(world_size: int) -> list[Any]:
        result = []
        for r in range(world_size):
            with standing_on(r, world_size):
                result.append(plain(24))
        return result

    seen: list[int] = []
    for loader in loaders(before):
        torch.manual_seed(1)
        seen += [index for batch in run_of(loader, 1) for index in batch]
        state = loader.state_dict()
    for loader in loaders(after):
        loader.load_state_dict(state)
        seen += [index for batch in run_of(loader) for index in batch]
    assert sorted(seen) == list(range(24))


def test_a_custom_sampler_in_a_single_process_needs_a_seed() -> None:
    """Its order is drawn by the global generator, from which it cannot be drawn again; with a seed it can."""
    weighted: Any = {"sampler": WeightedRandomSampler([1.0] * 8, 8, replacement=False), "batch_size": 2}
    loader: Any = shard_loader(DataLoader(range(8), **weighted))  # type: ignore[arg-type]
    assert loader.state_dict()["consumed"] == 0
    run_of(loader, 1)
    with pytest.raises(
        LoaderError,
        match=r"drawn by this loader's WeightedRandomSampler.*shard_loader\(loader, "
        r"seed=0\)",
    ):
        loader.state_dict()
    seeded: Any = shard_loader(DataLoader(range(8), **weighted), seed=0)  # type: ignore[arg-type]
    done, state = run_of(seeded, 1), seeded.state_dict()
    again: Any = shard_loader(DataLoader(range(8), **weighted), seed=0)  # type: ignore[arg-type]
    again.load_state_dict(state)
    assert sorted(index for batch in done + run_of(again) for index in batch) == list(range(8))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "this is not the position of a sharded loader, but a dict"),
        ([1], "this is not the position of a sharded loader, but a list"),
        ({"epoch": 1, "lr": 0.1}, "dict with 'epoch', 'lr'"),
        ({"items": 13}, "is of a loader over 13 samples, but this one has 12 samples"),
        ({"unit": "batches"}, "is of a loader over 12 batches, but this one has 12 samples"),
        ({"order": "sampler"}, "in a custom sampler's order, but the order here is this loader's"),
    ],
)
def test_what_is_no_position_of_this_loader(state: Any, message: str) -> None:
    """Another loader's position, or anything else, is refused before anything is lost."""
    loader = sharded(12, 0, 2, 2, "torch", "pad", False)
    run_of(loader, 1)
    if isinstance(state, dict) and len(state) == 1:
        state = {**loader.state_dict(), **state}
    with pytest.raises(LoaderError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict()["consumed"] == 4


def train(path: str, steps: int) -> list[list[int]]:
    loader: Any = shard_loader(DataLoader(range(50), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    taken = []
    if steps:
        for _, batch in zip(range(steps), loader, strict=False):
            taken.append(batch.tolist())
        save({"loader": loader.state_dict()}, path)
        return taken
    loader.load_state_dict(load(path)["loader"])
    return run_of(loader)


def test_across_a_checkpoint_and_real_ranks(tmp_path: Any) -> None:
    """Saved by two ranks, loaded by the safe loader on three: every sample once."""
    path = str(tmp_path / "state.pt")
    first = run_ranks(train, 2, path, 5)
    rest = run_ranks(train, 3, path, 0)
    seen = Counter(index for share in first + rest for batch in share for index in batch)
    assert set(seen) == set(range(50))
    assert sum(seen.values()) == 50
    assert rank() == 0


def test_a_subclassed_batch_sampler_is_not_taken_for_torchs() -> None:
    """In a single process the order of a batch sampler of the user's own is not known either."""

    class Own(BatchSampler):
        pass

    loader: Any = shard_loader(DataLoader(range(8), batch_sampler=Own(SequentialSampler(range(8)), 2, False)))  # type: ignore[arg-type]
    run_of(loader, 1)
    with pytest.raises(LoaderError, match="single process"):
        loader.state_dict()
