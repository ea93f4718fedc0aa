"""Checked by mypy and pyright, never run: what a type checker sees of the public names.

A line with ``# type: ignore[…]`` is one that both must refuse: each complains where it has nothing to ignore.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import distwrap as dw
from distwrap.data import ShardedLoader
from distwrap.strategies.steps import Step


@dw.distributed
def bare(epochs: int, *, lr: float = 0.1) -> float:
    return epochs * lr


@dw.distributed(nprocs=2, strategy="ddp", precision="bf16-mixed")
def with_options(path: str) -> dict[str, int]:
    return {path: 1}


@dw.distributed(nprocs=2, returns="all")
def everybody(n: int) -> str:
    return str(n)


@dw.distributed(strategy=dw.DDPStrategy(static_graph=True), launcher="ray(cpus=4)", comm="local_sgd(sync_every=16)")
def with_objects(*paths: str) -> None: ...


class Net(nn.Module):
    classes = 10

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class Trainer:
    @dw.distributed(nprocs=2)
    def fit(self, epochs: int) -> bool:
        return epochs > 0


assert_type(bare(3, lr=0.5), float)
assert_type(bare.options(nprocs=4)(3), float)
assert_type(with_options("a"), dict[str, int])
assert_type(everybody(1), list[str])
assert_type(Trainer().fit(2), bool)
bare("three")  # type: ignore[arg-type]
bare(3, rate=1)  # type: ignore[call-arg]
Trainer().fit()  # type: ignore[call-arg]
assert_type(bare.options(returns="all")(3), list[float])
assert_type(everybody.options(nprocs=3)(3), list[str])
assert_type(everybody.options(returns="rank0")(3), str)
assert_type(everybody.__wrapped__(3), str)
assert_type(Trainer().fit.options(nprocs=4)(2), bool)
assert_type(dw.distributed(with_options.__wrapped__)("a"), dict[str, int])
with_objects("a", "b")
plain: Callable[..., float] = bare.__wrapped__

# misspelt options, and options of a wrong type
dw.distributed(nproc=3)  # type: ignore[call-overload]
dw.distributed(nprocs="all")  # type: ignore[call-overload]
dw.distributed(returns="rank1")  # type: ignore[call-overload]
dw.distributed(launcher=3)  # type: ignore[call-overload]
dw.distributed(strategy=dw.DDPStrategy)  # type: ignore[call-overload]
bare.options(nproc=3)  # type: ignore[call-overload]
bare.options(nprocs=4)("three")  # type: ignore[arg-type]
Trainer().fit.options(node=4)  # type: ignore[call-overload]

# models and optimizers keep their types
model = dw.wrap_model(Net(), find_unused_parameters=True)
assert_type(model, Net)
assert_type(model.loss(torch.zeros(1)), torch.Tensor)
assert_type(model.classes, int)
dw.wrap_model("net")  # type: ignore[type-var]
assert_type(dw.local_model(Net()), Net)
assert_type(dw.unwrap_model(model), Net)
assert_type(dw.unwrap_model(nn.DataParallel(Net())), Net)
assert_type(dw.unwrap_model(nn.parallel.DistributedDataParallel(model)), nn.Module)
assert_type(dw.wrap_optimizer(torch.optim.Adam(model.parameters())), torch.optim.Adam)

# loaders
pairs = TensorDataset(torch.arange(3))
loader = dw.shard_loader(DataLoader(pairs, batch_size=2), mode="exact")
assert_type(loader, ShardedLoader[tuple[torch.Tensor, ...]])
same_kind: DataLoader[tuple[torch.Tensor, ...]] = loader
loader.set_epoch(3)
loader.load_state_dict(loader.state_dict())
assert_type(loader.skip(2), ShardedLoader[tuple[torch.Tensor, ...]])
assert_type(len(loader), int)
loader.set_epochs(3)  # type: ignore[attr-defined]
loader.set_epoch("three")  # type: ignore[arg-type]
dw.shard_loader(pairs)  # type: ignore[arg-type]
dw.shard_loader(same_kind, mode="exactly")  # type: ignore[arg-type]
for (x,) in loader:
    model(x.float())


def go_on(sharded: ShardedLoader[tuple[torch.Tensor, ...]], epoch: int) -> None:
    sharded.set_epoch(epoch)


go_on(loader, epoch=3)
go_on(DataLoader(pairs), epoch=3)  # type: ignore[arg-type]


class OwnLoader(DataLoader[tuple[torch.Tensor, ...]]):
    own = 3


own = dw.shard_loader(OwnLoader(pairs))
assert isinstance(own, OwnLoader)
own.set_epoch(own.own)

# collectives
assert_type(dw.gather(torch.ones(2), pad=0), torch.Tensor)
assert_type(dw.gather(2.0), torch.Tensor | float)
assert_type(dw.gather({"a": torch.ones(2)}), dict[str, torch.Tensor])
assert_type(dw.gather((torch.ones(2), [torch.ones(2)])), tuple[torch.Tensor, list[torch.Tensor]])
assert_type(dw.gather(nn.Parameter(torch.ones(2))), torch.Tensor)
assert_type(dw.gather({"a": 2.0}), Any)
assert_type(dw.mean(0.5, count=3), float)
assert_type(dw.mean(3), float)
assert_type(dw.mean(torch.ones(2)), torch.Tensor)
assert_type(dw.mean({"loss": 0.5}), dict[str, float])
assert_type(dw.mean({"right": 3}), dict[str, float])
assert_type(dw.mean([True, False]), list[float])
assert_type(dw.mean((torch.ones(2), 0.5)), tuple[torch.Tensor, float])
dw.mean("loss", "many")  # type: ignore[call-overload]
assert_type(dw.reduce(3), float)
assert_type(dw.reduce(3, "sum"), int)
assert_type(dw.reduce(3.0, "sum"), float)
assert_type(dw.reduce(3, "max"), int)
assert_type(dw.reduce(torch.ones(2), "min"), torch.Tensor)
assert_type(dw.reduce([3]), list[float])
assert_type(dw.reduce([3], "sum"), list[int])
dw.reduce(3.0, "average")  # type: ignore[call-overload]
assert_type(dw.broadcast({"lr": 0.1}), dict[str, float])
assert_type(dw.broadcast(Net() if dw.is_rank_zero() else None), Net)
assert_type(dw.gather_object(3), list[int])
assert_type(dw.gather_object(["a"], joined=True), list[str])
dw.gather_object(3, joined=True)  # type: ignore[call-overload]
assert_type(dw.split(["a", "b"]), list[str])
assert_type(dw.split(tuple(range(3))), tuple[int, ...])
assert_type(dw.split("ab"), str)
assert_type(dw.split(range(3)), range)
assert_type(dw.split(torch.ones(3)), torch.Tensor)
dw.split({1, 2})  # type: ignore[arg-type]
dw.agree(True, "some")  # type: ignore[arg-type]
assert_type(dw.agree(True, "all"), bool)
assert_type(dw.optimizer_step(torch.optim.SGD(model.parameters()), max_norm=1.0), Step)
assert_type(dw.on_rank_zero(lambda: 3), int)
for number, window in dw.accumulate([1, 2], 2, model):
    assert_type(number, int)
    assert_type(window.last, bool)
assert_type(dw.scale_loss(torch.tensor(1.0), 2), torch.Tensor)


@dw.rank_zero_only
def report(text: str) -> int:
    return len(text)


assert_type(report("x"), int | None)


@dw.rank_zero_only(broadcast=True)
def decide(text: str) -> int:
    return len(text)


assert_type(decide("x"), int)

for batch in dw.progress([1, 2]):
    assert_type(batch, int)
with dw.setup_process_group(timeout=3), dw.rank_zero_first(), dw.autocast():
    pass

steps = dw.lockstep([1, 2], skip=lambda number: number > 1, on_preempt=lambda preemption: preemption.seconds_left())
for number in steps:
    assert_type(number, int)
assert_type(steps.preempted, dw.Preemption | None)
dw.lockstep([1], uneven="longest")  # type: ignore[arg-type]
