"""Samplers and loaders of other packages' kinds: divided once, in one order, without end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler, Subset

from distwrap import gather, rank, shard_loader, wrap_model
from distwrap.errors import LoaderError
from distwrap.testing import run_ranks
from tests.data.ranks import batches, interleaved, on_each_rank, standing_on
from tests.slow import few

DATA: Any = list(range(40))
NAMES = [("rank", "world_size"), ("_rank", "_world_size"), ("shard_id", "num_shards"), ("rank", "num_replicas")]
NAMES += [("process_index", "num_processes"), ("replica_id", "num_replicas")]


class TakesItsPart(Sampler[int]):
    """As the samplers of detectron2, mmengine, fairseq and others do."""

    def __init__(self, names: tuple[str, str], place: tuple[int, int]) -> None:
        self.__dict__.update(zip(names, place, strict=True))
        self.place = place

    def __len__(self) -> int:
        return len(DATA) // self.place[1]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.place[0], len(DATA), self.place[1]))


@pytest.mark.parametrize("names", NAMES)
def test_a_sampler_that_takes_its_part_is_not_divided_again(names: tuple[str, str]) -> None:
    """Whatever the attributes are called by which it knows its rank."""
    taken = []
    for one in (0, 1):
        with standing_on(one, 2):
            taken.append(batches(shard_loader(DataLoader(DATA, sampler=TakesItsPart(names, (one, 2)), batch_size=20))))
    assert sorted(interleaved([each[0] for each in taken])) == DATA


def test_a_sampler_of_another_rank_is_refused() -> None:
    """One that was made for another rank is named, with both places."""
    loader = DataLoader(DATA, sampler=TakesItsPart(("rank", "world_size"), (1, 4)))
    with standing_on(0, 2), pytest.raises(LoaderError, match=r"rank 1 of 4.* rank 0 of 2"):
        shard_loader(loader)


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.random(), numpy.random.rand(), torch.rand(1).item()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_sampler_that_takes_its_part_augments_apart(workers: int, persistent: bool) -> None:
    """With a DistributedSampler of one's own too, augmentation differs on each rank and in each epoch."""
    rows = []
    for one in (0, 1):
        torch.manual_seed(0)  # as a script does on every rank
        sampler = DistributedSampler(DATA, 2, one)
        with standing_on(one, 2, seed=0):
            options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
            loader = shard_loader(DataLoader(Noise(), batch_size=4, sampler=sampler, **options))
        rows += [row for _ in range(2) for row in loader]
    assert len(torch.cat(rows).unique()) == 2 * 2 * 20 * 3


# Orders that differ


class Apart(Sampler[int]):
    """Its order depends on the rank, by nothing that could be seen from outside."""

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(DATA), generator=torch.Generator().manual_seed(rank())).tolist())


def loader_of(kind: str) -> DataLoader[Any]:
    if kind == "sampler":
        return shard_loader(DataLoader(DATA, batch_size=2, sampler=Apart()))
    if kind == "batch sampler":
        return shard_loader(DataLoader(DATA, batch_sampler=BatchSampler(Apart(), 2, False)))
    if kind == "generator":
        return shard_loader(DataLoader(DATA, 2, shuffle=True, generator=torch.Generator().manual_seed(rank())))
    if kind == "seed":
        return shard_loader(DataLoader(DATA, 2, shuffle=True), seed=rank())
    indices = torch.randperm(40, generator=torch.Generator().manual_seed(rank() if "split" in kind else 0))
    part = Subset(DATA, indices[:20].tolist())
    return shard_loader(DataLoader(part, 2, shuffle=kind == "split"))


def steps(kind: str) -> int:
    """Go through two epochs in step with the other ranks, as training does."""
    loader, count = loader_of(kind), 0
    for _ in range(2):
        for _ in loader:
            dist.all_reduce(torch.ones(1))
            count += 1
    return count


@pytest.mark.parametrize(
    "kind", few(["sampler", "batch sampler", "generator", "seed", "split", "split for validation"], 2)
)
def test_ranks_whose_orders_differ_are_told(kind: str) -> None:
    """Shares of different orders, or of different splits, overlap: an error names loader, ranks and the remedy."""
    with pytest.raises(LoaderError, match=r"sharded at test_samplers.* different orders"):
        run_ranks(steps, 2, kind)


def test_ranks_in_one_order_are_not_disturbed() -> None:
    """The same split, and a sampler's one order, on three ranks."""
    assert run_ranks(steps, 3, "same") == [6] * 3


# Loaders that never end, as timm and ultralytics have them


class Repeat:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Timm(DataLoader[Any]):
    """timm's MultiEpochsDataLoader."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        if self.batch_sampler is None:
            self.sampler = Repeat(self.sampler)  # type: ignore[assignment]
        else:
            self.batch_sampler = Repeat(self.batch_sampler)  # type: ignore[assignment]
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.sampler) if self.batch_sampler is None else len(self.batch_sampler.sampler)  # type: ignore

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


class Ultralytics(DataLoader[Any]):
    """ultralytics' InfiniteDataLoader."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Timm, Ultralytics])
def test_a_loader_without_end_has_a_plain_ones_shares(kind: Any, workers: int) -> None:
    """Its class stays, and each epoch's batches and length are those of a plain loader."""

    def epochs(kind: Any, workers: int) -> Any:
        loader = shard_loader(kind(DATA, batch_size=5, shuffle=True, num_workers=workers))
        assert isinstance(loader, kind)
        return [batches(loader) for _ in range(3)], len(loader), loader.state_dict()["epoch"]

    ranks = on_each_rank(2, lambda: epochs(kind, workers))
    assert ranks == on_each_rank(2, lambda: epochs(DataLoader, 0))
    assert sorted(interleaved([[i for batch in told[0][0] for i in batch] for told in ranks])) == DATA


class Holds(DataLoader[Any]):
    """Holds an iterator, over nothing that could be replaced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begun = super().__iter__()


def test_a_loader_that_has_begun_is_refused() -> None:
    """Its batches would be of undivided data."""
    with standing_on(0, 2), pytest.raises(LoaderError, match="attribute 'begun'"):
        shard_loader(Holds(DATA, batch_size=2))


# In the order of the dataset


def evaluated(n: int, batch_size: int) -> Any:
    loader = shard_loader(DataLoader(range(n), batch_size=batch_size))  # type: ignore[arg-type]
    mine = [batch.float() for batch in loader]
    whole = gather({"x": torch.cat(mine) if mine else torch.zeros(0)}, interleave=True)["x"]
    x = torch.cat(mine or [torch.zeros(0)]).requires_grad_()
    rows = gather(x, interleave=True, differentiable=True)
    (rows * torch.arange(len(rows))).sum().backward()
    assert x.grad is not None
    return whole.tolist(), (x.grad / x).nan_to_num(2).unique().tolist()


@pytest.mark.parametrize(("n", "batch_size"), [(11, 2), (12, 5), (2, 1)])
def test_evaluation_comes_back_in_the_datasets_order(n: int, batch_size: int) -> None:
    """gather(interleave=True) of exact shares is the dataset's order, and so are the gradients' rows."""
    for whole, gradients in run_ranks(evaluated, 3, n, batch_size):
        assert whole == list(range(n))
        assert set(gradients) <= {2.0, 3.0}  # of an item 0, and the three ranks' sum


def trained(n: int, drop_last: bool) -> list[float]:
    x = torch.linspace(-1, 2, n, dtype=torch.float64)[:, None]
    torch.manual_seed(0)
    model = wrap_model(nn.Linear(1, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = shard_loader(DataLoader(x, batch_size=6, drop_last=drop_last), batch_size="global")  # type: ignore[arg-type]
    for _ in range(3):
        for rows in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(rows), rows.sin()).backward()
            optimizer.step()
    return [float(each.detach()) for each in model.parameters()]


def test_training_in_order_is_one_processs() -> None:
    """With a global batch, whatever the ranks divide; drop_last leaves out what they do not."""
    for n, drop_last in ((18, False), (15, False), (16, True)):
        expected = trained(n, drop_last)
        for weights in run_ranks(trained, 3, n, drop_last):
            assert weights == pytest.approx(expected, rel=1e-9)


def test_samples_that_do_not_go_round_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last step cannot be one process's, the loader's line says so, and what to do."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")
    for n, options in ((18, {}), (16, {"drop_last": True}), (16, {})):
        with standing_on(0, 3):
            shard_loader(DataLoader(range(n), batch_size=6, **options), batch_size="global")  # type: ignore[arg-type]
        assert ("do not divide evenly" in capsys.readouterr().err) is (n == 16 and not options)


@pytest.mark.parametrize("indices", [[4, 0, 3, 1, 2], (4, 0, 3, 1, 2), range(5)])
def test_a_list_of_indices_is_an_order_and_no_shuffle(indices: Any) -> None:
    """An evaluation over a sampler that is a list, tuple or range takes each sample once."""
    for loader in (
        DataLoader(DATA, batch_size=2, sampler=indices),
        DataLoader(DATA, batch_sampler=BatchSampler(indices, 2, drop_last=False)),
    ):
        taken = []
        for one in (0, 1):
            with standing_on(one, 2):
                taken += torch.cat(list(shard_loader(loader))).tolist()
        assert sorted(taken) == [0, 1, 2, 3, 4]
