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


class WholePass:
    """One pass of a whole batch through all stages, and back where its outputs have gradients.

    Args:
        relay: runs the model's method.
        line: this rank's place.
        survey: of the method with the batch.
        in_precision: in which the method computes.
    """

    def __init__(self, relay: Relay, line: Line, survey: Survey, in_precision: InPrecision) -> None:
        self._relay, self._line, self._survey, self._in_precision = relay, line, survey, in_precision
        self._kept: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []

    def forward(self, method: Method, given: tuple[Any, Any]) -> Any:
        """Run a method forward through all stages, and return its result on every rank, without a graph."""
        line, ends, result = self._line, self._relay.chain.ends, self._survey.result
        for stage in line.own:
            received = []
            for tensor in tensors_in(self._survey.outputs[ends[stage - 1] - 1]) if stage else ():
                received.append(_empty(tensor, line))
                dist.recv(received[-1], line.rank_of(stage - 1), line.group)
                received[-1].requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
            with self._in_precision.context():
                output = self._relay.run(self._survey, stage, received, method, given)
            if stage < line.stages - 1:
                for tensor in tensors_in(output):
                    dist.send(tensor.detach().contiguous(), line.rank_of(stage + 1), line.group)
            else:
                result = output = self._in_precision.precision.outputs(output)
            if torch.is_grad_enabled():
                self._kept.append((stage, received, trained_of(output)))
        if dist.get_rank() != line.rank_of(line.stages - 1):
            result = self._in_precision.precision.outputs(result)
        return shared(result, line)

    def backward(self, grads: list[torch.Tensor]) -> None:
        """Compute the gradients from those of the result's tensors, in their order."""
        line = self._line
        while self._kept:
            stage, received, outputs = self._kept.pop()
            if stage < line.stages - 1:
                grads = [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]
                for grad in grads:
                    dist.recv(grad, line.rank_of(stage + 1), line.group)
            torch.autograd.backward(outputs, grads)
            for tensor in trained_of(received):
                grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                dist.send(grad.contiguous(), line.rank_of(stage - 1), line.group)


def trained_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nesting that have gradients."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def shared(result: Any, line: Line) -> Any:
    """Return the last stage's result on every rank; on the others its tensors are looked at for their sizes alone."""
    last = line.rank_of(line.stages - 1)

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().contiguous() if dist.get_rank() == last else _empty(tensor, line)
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
        self._device, self._autocast = line.device.type, (torch.float32, False)
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
        self._autocast = torch.get_autocast_dtype(self._device), torch.is_autocast_enabled(self._device)
        self._losses = []
        numbers = torch.arange(self._count)
        try:
            with torch.autocast(self._device, enabled=False):  # of the user's own, in which no backward belongs
                self._schedule.step(target=numbers, losses=[], number=numbers)
            return torch.stack(self._losses).sum() * weight if self._losses else None
        finally:
            self._method, self._given, self._losses = None, (), []

    def _stage(self, stage: int, line: Line) -> PipelineStage:
        ends, outputs = self._relay.chain.ends, self._survey.outputs
        is_last = stage == line.stages - 1
        given = tensors_in(outputs[ends[stage - 1] - 1]) if stage else []
        loss = self._in_precision.precision.outputs(self._survey.result.detach())
        returned = [torch.empty(1, dtype=loss.dtype)] if is_last else tensors_in(outputs[ends[stage] - 1])
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
        with torch.autocast(self._device, *self._autocast), self._in_precision.context():
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
