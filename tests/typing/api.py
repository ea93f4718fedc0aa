"""Checked by mypy, never run: what a type checker sees of the public names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import distwrap as dw
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
plain: Callable[..., float] = bare.__wrapped__

model: nn.Module = dw.wrap_model(nn.Linear(1, 1), find_unused_parameters=True)
loader = dw.shard_loader(DataLoader(TensorDataset(torch.arange(3)), batch_size=2), mode="exact")
assert_type(dw.agree(True, "all"), bool)
assert_type(dw.gather_object(3), list[int])
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
