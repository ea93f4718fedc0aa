"""Behaviours of the data's shares: loaders, seeds, averages and lockstep go by the layout of the ranks."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distwrap.data import shard_loader
from distwrap.data.lockstep import lockstep
from distwrap.errors import ModelError
from distwrap.group.collectives import agree, broadcast, gather_object, mean, reduce
from distwrap.group.gathering import gather
from distwrap.group.world import rank
from distwrap.model import assert_in_sync
from distwrap.seeding import seed_everything
from distwrap.testing.behaviours import by_share
from distwrap.testing.nets import SmallNet, examples, small
from distwrap.testing.sides import OneProcess, Trial, adamw, compare, sgd
from tests.conformance.base import behaviour


@behaviour()
def averages_go_by_share(trial: Trial) -> None:
    """Average, reduce and gather over the shares: ranks of one copy count once."""
    shares = list(range(trial.size))
    own = trial.rank
    assert mean(float(own)) == sum(shares) / len(shares), f"mean() of the shares' numbers is {mean(float(own))}"
    weighted = sum(share * (1 + share) for share in shares) / sum(1 + share for share in shares)
    compare(mean(float(own), count=1 + own), weighted)
    assert reduce(own, "sum") == sum(shares), f"reduce() of the shares' numbers to a sum is {reduce(own, 'sum')}"
    found = gather(torch.full((own + 1,), own)).tolist()
    assert found == [share for share in shares for _ in range(share + 1)], f"gather() gives {found}"


@behaviour()
def objects_go_by_rank(trial: Trial) -> None:
    """Gather objects, broadcast and agree over all ranks, whatever their shares."""
    ranks = list(range(trial.world.placement.world_size))
    assert gather_object(rank()) == ranks
    assert broadcast(rank(), src=ranks[-1]) == ranks[-1]
    assert agree(rank() == ranks[-1])
    assert agree(rank() == 0, "all") is (len(ranks) == 1)


@behaviour()
def trains_from_a_sharded_loader(trial: Trial) -> None:
    """Train from a shuffled loader that `shard_loader` divides: the batches of one process, divided."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(adamw(model.parameters()))
        rows = TensorDataset(*examples(16 * side.shares))
        loader: DataLoader[Any]
        if isinstance(side, Trial):
            loader = shard_loader(DataLoader(rows, batch_size=8, shuffle=True), seed=11)
        else:
            sampler: Any = torch.utils.data.DistributedSampler(rows, num_replicas=1, rank=0, seed=11)
            loader = DataLoader(rows, batch_size=8 * side.shares, sampler=sampler)
        for number in range(2):
            if not isinstance(side, Trial):
                sampler.set_epoch(number)
            for x, y in loader:
                side.backward(model.loss(x, y))
                side.step(optimizer)
                optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop)


class NoisyRows(Dataset[torch.Tensor]):
    """Dataset whose rows are random numbers, as of an augmentation."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


@behaviour()
def noise_goes_by_share(trial: Trial) -> None:
    """Draw the same augmentation and the same noise on ranks of one share, and other ones on those of others."""
    seed_everything(7)
    batch = next(iter(shard_loader(DataLoader(NoisyRows(), batch_size=2))))
    seed_everything(7, apart=True)
    drawn = batch.tolist(), torch.rand(2).tolist()
    for kind, found in zip(("augmentation", "noise"), zip(*by_share(trial, drawn), strict=True), strict=True):
        assert len(set(map(tuple, found))) == trial.size, f"shares drew the same {kind}: {found}"


class DroppingNet(SmallNet):
    """Net with dropout before its first layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        return super().forward(torch.nn.functional.dropout(x, 0.5, self.training))


@behaviour()
def dropout_goes_by_share(trial: Trial) -> None:
    """Drop the same numbers on ranks of one share, and other ones on those of others."""
    model = trial.wrap(small(DroppingNet))
    x, y = next(trial.alone.batches())
    seed_everything(7, apart=True)
    loss = model.loss(x, y)
    trial.backward(loss)
    found = by_share(trial, loss.item())
    assert len(set(found)) == trial.size, f"shares dropped the same numbers, and their losses are {found}"


@behaviour()
def lockstep_ends_with_the_first(trial: Trial) -> None:
    """Train in `lockstep` on uneven loaders: all ranks end with the one that ends first, and none hangs."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        batches = list(side.batches(4))
        steps = 0
        for x, y in lockstep(batches[: 3 + side.rank]) if isinstance(side, Trial) else batches[:3]:
            side.backward(model.loss(x, y))
            side.step(optimizer)
            optimizer.zero_grad()
            steps += 1
        return side.weights(model), steps

    trial.same(loop)


@behaviour()
def a_rank_that_drifted_is_noticed(trial: Trial) -> None:
    """Notice that the last rank has changed its parameters, where another rank holds the same parts of them."""
    model = trial.wrap(small())
    parts = gather_object({(held.name, held.part) for held in trial.strategy.held(model)})
    last = len(parts) - 1
    if not any(parts[last] & other for other in parts[:last]):
        return  # every rank holds parts of its own, and there is nothing to compare
    changed = list(model.parameters()) if rank() == last else []
    with torch.no_grad():
        kept = [parameter.detach().clone() for parameter in changed]
        for parameter in changed:
            parameter.add_(1)
        try:
            assert_in_sync(model)
        except ModelError:
            pass
        else:
            raise AssertionError(f"rank {last} has other parameters, and assert_in_sync() has not seen it")
        finally:
            for parameter, before in zip(changed, kept, strict=True):
                parameter.copy_(before)
    assert_in_sync(model)
