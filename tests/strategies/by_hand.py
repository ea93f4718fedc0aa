"""A strategy from outside the package: pairs of ranks hold one copy, and gradients are averaged by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distwrap import Strategy, gather_object, unwrap_model
from distwrap.errors import OptionError
from distwrap.group.world import Layout
from distwrap.model.checks.in_sync import ComparedTensor, tensors_of
from tests.strategies.wrappers import Copy


class ByHand(Strategy):
    """Each pair of ranks takes one share of the data; what it is asked for, it notes in `asked`."""

    shards = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.syncs = True
        self.models: list[nn.Module] = []
        self.parts_differ = False

    def check(self, run: Any) -> None:
        if run.precision == "fp16":
            raise OptionError("ByHand has no precision='fp16'. Leave precision out.")

    def setup(self, world: Any) -> Layout:
        rank, size = world.placement.rank, world.placement.world_size
        groups = [dist.new_group(range(first, size, 2)) for first in (0, 1)]
        self.layout = Layout(rank // 2, size // 2, groups[rank % 2])
        return self.layout

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        self.models.append(model)
        return Copy(model)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if self.syncs:
            for gradient in [gradient for model in self.models for gradient in self.gradients(model)]:
                dist.all_reduce(gradient, group=self.layout.group)
                gradient /= self.layout.size

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        self.asked.append(f"sync {on}")
        self.syncs = on

    def clip(self, optimizer: Any, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        self.asked.append("clip")
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.asked.append("step")
        if self.asked.count("step") == 3:
            return False
        optimizer.step()
        return True

    def held(self, model: nn.Module) -> list[ComparedTensor]:
        part = f"{dist.get_rank() % 2}: half {dist.get_rank() % 2}" if self.parts_differ else ""
        return [held._replace(part=part) for held in tensors_of(model)]

    def state(self, thing: Any, *, everywhere: bool = False) -> dict[str, Any]:
        self.asked.append(f"state of {len(gather_object(None))}")  # a collective
        return super().state(thing, everywhere=everywhere)

    def load_state(self, thing: Any, state: dict[str, Any]) -> None:
        self.asked.append(f"load {type(unwrap_model(thing) if isinstance(thing, nn.Module) else thing).__name__}")
        super().load_state(thing, state)
