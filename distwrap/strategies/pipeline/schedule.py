"""Passes through the stages: a whole batch, or torch's schedule of forwards and backwards of microbatches.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

from distwrap._internals.torch_sharding import skip_first_messages
from distwrap._internals.torch_tree import map_tensors, tensors_in, tree_flatten, tree_unflatten
from distwrap.errors import CollectiveError, ModelError
from distwrap.group.tensor_exchange import gather_numbers
from distwrap.precision import InPrecision
from distwrap.strategies.pipeline.microbatches import LossWeights
from distwrap.strategies.pipeline.relay import Method, Relay, Survey
from distwrap.strategies.pipeline.streams import Streams
from distwrap.wording import named_ranks

_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class Line:
    """This rank's place in its pipeline.

    Attributes:
        group: the ranks of the pipeline, in the order of their stages.
        ranks: their global ranks.
        own: the stages of this rank, in order.
        stages: the number of stages.
        device: the device of this rank.
    """

    group: dist.ProcessGroup
    ranks: list[int]
    own: list[int]
    stages: int
    device: torch.device

    def rank_of(self, stage: int) -> int:
        """Return the global rank of a stage."""
        return self.ranks[stage % len(self.ranks)]


class WholePass:
    """Pass of a whole batch through all stages, and back if its outputs have gradients.

    Args:
        relay: runs the model's method.
        line: this rank's place in the pipeline.
        survey: the survey of the method with the batch.
        in_precision: the precision in which the method computes.
        streams: the random numbers.
    """

    def __init__(self, relay: Relay, line: Line, survey: Survey, in_precision: InPrecision, streams: Streams) -> None:
        self._relay, self._line, self._survey, self._in_precision = relay, line, survey, in_precision
        self._streams = streams
        self._kept: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []

    def forward(self, method: Method, given: tuple[Any, Any]) -> Any:
        """Run a method through all stages, and return its result on every rank, without a graph."""
        with self._streams.of_pass(self._survey.generators if self._survey.chance else frozenset()):
            return self._ran(method, given)

    def _ran(self, method: Method, given: tuple[Any, Any]) -> Any:
        line, ends, result = self._line, self._relay.chain.ends, self._survey.result
        error: Exception | None = None
        for stage in line.own:
            received = []
            for tensor in tensors_in(self._survey.outputs[ends[stage - 1] - 1]) if stage else ():
                received.append(_empty(tensor, line))
                dist.recv(received[-1], line.rank_of(stage - 1), line.group)
                received[-1].requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
            expected = self._survey.outputs[ends[stage] - 1] if stage < line.stages - 1 else result
            output: Any = map_tensors(lambda tensor: _empty(tensor, line).zero_(), expected)
            if error is None:
                try:
                    self._streams.begin(0)
                    with self._in_precision.context():
                        output = self._relay.run(self._survey, stage, received, method, given)
                    check_like(output, expected, stage)
                except Exception as raised:  # noqa: BLE001 - raised when no stage waits any more
                    error = raised
            if stage < line.stages - 1:
                for tensor in tensors_in(output):
                    dist.send(tensor.detach().contiguous(), line.rank_of(stage + 1), line.group)
            else:
                result = output = self._in_precision.precision.outputs(output)
            if torch.is_grad_enabled():
                self._kept.append((stage, received, trained_of(output)))
        if dist.get_rank() != line.rank_of(line.stages - 1):
            result = self._in_precision.precision.outputs(result)
        end_pass(line, self._streams, self._survey, error)
        return shared(result, line)

    def backward(self, grads: list[torch.Tensor]) -> None:
        """Compute gradients from those of the result's tensors, in their order."""
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
    """Return the tensors in a nesting that require a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def shared(result: Any, line: Line) -> Any:
    """Return the last stage's result on every rank; other ranks use only the nesting and sizes of theirs."""
    last = line.rank_of(line.stages - 1)

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().contiguous() if dist.get_rank() == last else _empty(tensor, line)
        dist.broadcast(tensor, src=last, group=line.group)
        return tensor

    leaves, structure = tree_flatten(map_tensors(broadcast, result))
    plain = [leaf for leaf in leaves if type(leaf) in _PLAIN]
    if not plain:
        return tree_unflatten(leaves, structure)
    told: list[Any] = [plain]
    dist.broadcast_object_list(told, src=last, group=line.group)
    known = iter(told[0])
    return tree_unflatten([next(known) if type(leaf) in _PLAIN else leaf for leaf in leaves], structure)


class PassSums(NamedTuple):
    """Sums over the ranks of a pipeline after a pass over microbatches.

    Attributes:
        loss: the weighted sum of the microbatches' losses.
        weight: the sum of the weights, by which the loss and the gradients must be divided.
        unlike: whether the batch's loss cannot be computed from its microbatches.
    """

    loss: float
    weight: float
    unlike: bool


class TrainingPass:
    """torch's schedule over microbatches of one size.

    Args:
        kind: the schedule: ``"1f1b"``, ``"gpipe"`` or ``"interleaved"``.
        relay: runs the model's method.
        line: this rank's place in the pipeline.
        survey: the survey of the method with a microbatch.
        in_precision: the precision in which the method computes.
        streams: the random numbers.
        count: the number of microbatches.
    """

    def __init__(
        self,
        kind: str,
        relay: Relay,
        line: Line,
        survey: Survey,
        in_precision: InPrecision,
        streams: Streams,
        count: int,
    ) -> None:
        self._relay, self._survey, self._in_precision, self._count = relay, survey, in_precision, count
        self._line, self._streams = line, streams
        self._method: Method | None = None
        self._given: Sequence[Any] = ()
        self._weights, self._scale = LossWeights("mean", count), 1.0
        self._device, self._autocast = line.device.type, (torch.float32, False)
        loss = in_precision.precision.outputs(survey.result)
        self._loss_type = torch.promote_types(loss.dtype, torch.float32)
        self._losses: list[torch.Tensor] = []
        self._error: Exception | None = None
        stages: list[Any] = [self._stage(stage) for stage in line.own]
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": _loss, "scale_grads": False}
        if len(stages) > 1:
            looped = ScheduleInterleaved1F1B if count % len(line.ranks) == 0 else ScheduleLoopedBFS
            self._schedule: Any = looped(stages, **options)
        else:
            (stage,) = stages
            stage.num_stages = min(count, line.stages)  # torch 2.9 makes no schedule of fewer microbatches than stages
            one_by_one = kind != "gpipe" and count >= line.stages
            self._schedule = (Schedule1F1B if one_by_one else ScheduleGPipe)(stage, **options)
            stage.num_stages = line.stages

    def run(self, method: Method, given: Sequence[Any], reduction: str, scale: float) -> PassSums:
        """Compute the gradients of a weighted sum of the microbatches' losses.

        After an error in a stage the pass goes on with zeros, so that no other stage waits.

        Args:
            method: returns the loss of a microbatch.
            given: the arguments of each microbatch.
            reduction: whether the loss of the batch is the ``"mean"`` or the ``"sum"`` of these losses.
            scale: the factor of the loss in its backward.
        """
        self._method, self._given, self._scale = method, given, scale
        self._weights, self._losses, self._error = LossWeights(reduction, self._count), [], None
        self._autocast = torch.get_autocast_dtype(self._device), torch.is_autocast_enabled(self._device)
        numbers = torch.arange(self._count)
        try:
            with self._streams.of_pass(self._survey.generators if self._survey.chance else frozenset()):
                with torch.autocast(self._device, enabled=False):  # the user's must not include backwards
                    self._step(numbers)
                weights, outcome = self._weights, [0.0, 0.0, 0.0]
                if self._losses:
                    outcome = [float(torch.stack(self._losses).sum()), float(weights.total), float(weights.unlike)]
                loss, weight, unlike, *_ = end_pass(self._line, self._streams, self._survey, self._error, outcome)
                return PassSums(loss, weight, bool(unlike))
        finally:
            self._method, self._given, self._losses, self._error = None, (), [], None

    def _step(self, numbers: torch.Tensor) -> None:
        try:
            self._schedule.step(target=numbers, losses=[], number=numbers)
        except RuntimeError as error:
            own = error.__cause__  # torch's message hides its type, and a lost peer
            if own is not None and "Failed to run stage backward" in str(error):
                raise own from own.__cause__
            raise

    def _stage(self, stage: int) -> PipelineStage:
        line, ends, outputs = self._line, self._relay.chain.ends, self._survey.outputs
        is_last = stage == line.stages - 1
        given = tensors_in(outputs[ends[stage - 1] - 1]) if stage else []
        returned = [torch.empty(1, dtype=self._loss_type)] if is_last else tensors_in(outputs[ends[stage] - 1])
        made = PipelineStage(
            _Part(self, stage, is_last),
            stage,
            line.stages,
            line.device,
            input_args=tuple(_empty(tensor, line).requires_grad_(tensor.requires_grad) for tensor in given),
            output_args=tuple(_empty(tensor, line).requires_grad_(tensor.requires_grad) for tensor in returned),
            group=line.group,
        )
        skip_first_messages(made)
        return made

    def part(self, stage: int, received: tuple[torch.Tensor, ...], number: int, is_last: bool) -> Any:
        """Run a stage's part of a microbatch."""
        assert self._method is not None
        if self._error is None:
            try:
                return self._computed(self._method, stage, list(received), number, is_last)
            except Exception as error:  # noqa: BLE001 - raised when no stage waits any more
                self._error = error
        if is_last:
            return torch.zeros(1, dtype=self._loss_type, device=self._line.device, requires_grad=True)
        sizes = tensors_in(self._survey.outputs[self._relay.chain.ends[stage] - 1])
        return tuple(_empty(tensor, self._line).zero_().requires_grad_(tensor.requires_grad) for tensor in sizes)

    def _computed(self, method: Method, stage: int, received: list[torch.Tensor], number: int, is_last: bool) -> Any:
        self._streams.begin(number)
        with torch.autocast(self._device, *self._autocast), self._in_precision.context():
            output = self._relay.run(self._survey, stage, received, method, self._given[number])
        ends = self._relay.chain.ends
        check_like(output, self._survey.result if is_last else self._survey.outputs[ends[stage] - 1], stage)
        if not is_last:
            return tuple(tensor.contiguous() for tensor in tensors_in(output))
        loss = self._in_precision.precision.outputs(output)
        weighted = loss.reshape(()).to(self._loss_type) * self._weights.of(loss)
        self._losses.append(weighted.detach())
        return weighted.reshape(1) * self._scale


class StageError(BaseException):
    """End of a pass with an error, which all stages have reached.

    Attributes:
        error: the error for the caller of the method.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def end_pass(
    line: Line, streams: Streams, survey: Survey, error: Exception | None, numbers: Sequence[float] = ()
) -> list[float]:
    """Return the sums of some numbers over a pipeline at the end of a pass.

    Raises:
        StageError: a stage has raised, or has drawn other random numbers.
    """
    if error is None and streams.surprise():
        error = ModelError(
            f"rank {dist.get_rank()}: the model draws random numbers in this forward, but drew none in an "
            "earlier one with such arguments. Let it draw in all of them, and multiply by zero where they are "
            "not wanted yet."
        )
    failed = [float(error is not None and rank == dist.get_rank()) for rank in line.ranks]
    everyones = gather_numbers([*numbers, streams.number, *failed], line.group)
    sums = [sum(each) for each in zip(*everyones, strict=True)]
    failing = [rank for rank, each in zip(line.ranks, sums[len(numbers) + 1 :], strict=True) if each]
    if error is not None:
        raise StageError(error)
    if failing:
        raise StageError(
            CollectiveError(
                f"rank {dist.get_rank()}: {named_ranks(failing)} of this pipeline raised in a forward, which no stage "
                f"has finished, so there is no result here either. The error there says why."
            )
        )
    if survey.draws and sums[len(numbers)] != len(line.ranks) * streams.number:
        raise StageError(
            ModelError(
                f"rank {dist.get_rank()}: the model draws random numbers outside of its blocks, and torch's "
                "generators differ between the ranks of this pipeline, so its stages drew different numbers. "
                "Seed them alike, as by distwrap.seed_everything(), and draw on all ranks or on none."
            )
        )
    return sums


def check_like(output: Any, expected: Any, stage: int) -> None:
    """Refuse an output of a stage with other sizes, types or gradients than the next one expects.

    Raises:
        ModelError: they differ.
    """
    seen, known = (list(map(_described, tensors_in(each))) for each in (output, expected))
    if seen != known:
        raise ModelError(
            f"rank {dist.get_rank()}: stage {stage} has computed {', '.join(seen) or 'nothing'}, and the next "
            f"one waits for {', '.join(known) or 'nothing'}, as in an earlier run on such arguments. Sizes, "
            "types, and which tensors have a gradient must follow from the arguments and from whether the "
            "model trains: pass anything else on which they depend as an argument that is not a float."
        )


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}{' with a gradient' if tensor.requires_grad else ''}"


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


class _Part(nn.Module):
    """Stage as a module for torch's schedules."""

    def __init__(self, training_pass: TrainingPass, stage: int, is_last: bool) -> None:
        super().__init__()
        self._pass, self._stage, self._is_last = training_pass, stage, is_last

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        return self._pass.part(self._stage, received, int(number), self._is_last)


def _empty(tensor: torch.Tensor, line: Line) -> torch.Tensor:
    return torch.empty(tensor.size(), dtype=tensor.dtype, device=line.device)
