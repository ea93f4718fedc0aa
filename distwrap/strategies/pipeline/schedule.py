"""The passes through the stages: forward alone, or torch's schedule of forwards and backwards of microbatches.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.precision import InPrecision
from distwrap.strategies.pipeline.relay import Method, Relay, Survey


@dataclass(frozen=True)
class Line:
    """This rank's place in its pipeline.

    Attributes:
        group: the ranks of the pipeline, in the order of their stages.
        ranks: theirs in the world.
        own: the stages of this rank, in their order.
        stages: how many there are.
        device: on which this rank computes.
    """

    group: dist.ProcessGroup
    ranks: list[int]
    own: list[int]
    stages: int
    device: torch.device

    def rank_of(self, stage: int) -> int:
        """Return the rank in the world that has a stage."""
        return self.ranks[stage % len(self.ranks)]


def evaluate(
    relay: Relay, line: Line, survey: Survey, in_precision: InPrecision, method: Method, given: tuple[Any, Any]
) -> Any:
    """Run a method forward through all stages, and return its result on every rank."""
    result = survey.result
    for stage in line.own:
        received = []
        if stage:
            received = [_empty(tensor, line) for tensor in tensors_in(survey.outputs[relay.chain.ends[stage - 1] - 1])]
            for tensor in received:
                dist.recv(tensor, src=line.rank_of(stage - 1), group=line.group)
        with in_precision.context():
            output = relay.run(survey, stage, received, method, given)
        if stage < line.stages - 1:
            for tensor in tensors_in(output):
                dist.send(tensor.contiguous(), dst=line.rank_of(stage + 1), group=line.group)
        else:
            result = output
    return shared(result, line)


def shared(result: Any, line: Line) -> Any:
    """Return the last stage's result on every rank; on the others its tensors are looked at for their sizes alone."""
    last = line.rank_of(line.stages - 1)

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous() if dist.get_rank() == last else _empty(tensor, line)
        dist.broadcast(tensor, src=last, group=line.group)
        return tensor

    return map_tensors(broadcast, result)


class TrainingPass:
    """torch's schedule over microbatches of one size.

    Args:
        kind: of the schedule: ``"1f1b"``, ``"gpipe"`` or ``"interleaved"``.
        relay: runs the model's method.
        line: this rank's place.
        survey: of the method with a microbatch.
        in_precision: in which the method computes.
        count: of microbatches.
    """

    def __init__(
        self, kind: str, relay: Relay, line: Line, survey: Survey, in_precision: InPrecision, count: int
    ) -> None:
        self._relay, self._survey, self._in_precision, self._count = relay, survey, in_precision, count
        self._method: Method | None = None
        self._given: Sequence[Any] = ()
        self._factor = 1.0
        self._losses: list[torch.Tensor] = []
        stages: list[Any] = [self._stage(stage, line) for stage in line.own]
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": self._loss, "scale_grads": False}
        if len(stages) > 1:
            looped = ScheduleInterleaved1F1B if count % len(line.ranks) == 0 else ScheduleLoopedBFS
            self._schedule: Any = looped(stages, **options)
        else:
            one_by_one = kind != "gpipe" and count >= line.stages
            self._schedule = (Schedule1F1B if one_by_one else ScheduleGPipe)(stages[0], **options)

    def run(self, method: Method, given: Sequence[Any], weight: float, scale: float) -> torch.Tensor | None:
        """Leave the gradients of a weighted sum of the microbatches' losses in the parameters.

        Args:
            method: returns a microbatch's loss.
            given: the arguments of each microbatch.
            weight: of each loss in the sum.
            scale: by which the loss is multiplied for its backward.

        Returns:
            The weighted sum, on the rank with the last stage.
        """
        self._method, self._given, self._factor = method, given, weight * scale
        self._losses = []
        numbers = torch.arange(self._count)
        try:
            self._schedule.step(target=numbers, losses=[], number=numbers)
            return torch.stack(self._losses).sum() * weight if self._losses else None
        finally:
            self._method, self._given, self._losses = None, (), []

    def _stage(self, stage: int, line: Line) -> PipelineStage:
        ends, outputs = self._relay.chain.ends, self._survey.outputs
        is_last = stage == line.stages - 1
        given = tensors_in(outputs[ends[stage - 1] - 1]) if stage else []
        returned = [torch.empty(1)] if is_last else tensors_in(outputs[ends[stage] - 1])
        return PipelineStage(
            _Part(self, stage, is_last),
            stage,
            line.stages,
            line.device,
            input_args=tuple(_empty(tensor, line).requires_grad_(tensor.requires_grad) for tensor in given),
            output_args=tuple(_empty(tensor, line).requires_grad_(tensor.requires_grad) for tensor in returned),
            group=line.group,
        )

    def part(self, stage: int, received: tuple[torch.Tensor, ...], number: int, is_last: bool) -> Any:
        """Run a stage's part of a microbatch."""
        assert self._method is not None
        with self._in_precision.context():
            output = self._relay.run(self._survey, stage, list(received), self._method, self._given[number])
        if not is_last:
            return tuple(tensor.contiguous() for tensor in tensors_in(output))
        loss = self._in_precision.precision.outputs(output)
        self._losses.append(loss.detach().reshape(()))
        return loss.reshape(1)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() * self._factor


class _Part(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, training_pass: TrainingPass, stage: int, is_last: bool) -> None:
        super().__init__()
        self._pass, self._stage, self._is_last = training_pass, stage, is_last

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        return self._pass.part(self._stage, received, int(number), self._is_last)


def _empty(tensor: torch.Tensor, line: Line) -> torch.Tensor:
    return torch.empty(tensor.size(), dtype=tensor.dtype, device=line.device)
