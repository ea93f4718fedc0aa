"""Passes through the stages: a whole batch, or torch's schedule of forwards and backwards of microbatches.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
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
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.devices.kinds import widest
from distwrap.errors import CollectiveError, ModelError
from distwrap.group.tensor_exchange import gather_numbers
from distwrap.precision import InPrecision
from distwrap.seeding import mix
from distwrap.strategies.pipeline.gradients import backward_of, linked
from distwrap.strategies.pipeline.placement import Placement, StageGroup
from distwrap.strategies.pipeline.remote import NESTED
from distwrap.strategies.pipeline.runner import Method, StageRunner, StopForward, Streams
from distwrap.wording import named_ranks

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class PeerFailedError(Exception):
    """An earlier stage has raised, and this one has nothing to compute with."""


class StageError(BaseException):
    """End of a pass with an error, which all stages have reached.

    Attributes:
        error: the error for the caller of the method.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


class PassContext(NamedTuple):
    """What the passes of one model share.

    Attributes:
        runner: runs the model's methods.
        group: this rank's place in the pipeline.
        placement: the ranks that hold each tensor.
        streams: the random numbers.
        in_precision: the precision in which the model computes.
    """

    runner: StageRunner
    group: StageGroup
    placement: Placement
    streams: Streams
    in_precision: InPrecision

    def end(self, error: Exception | None, numbers: Sequence[float] = ()) -> list[float]:
        """Return the sums of some numbers over the pipeline at the end of a pass.

        Raises:
            StageError: a stage has raised, or has drawn other random numbers than the others.
        """
        streams, ranks = self.streams, self.group.ranks
        failed = error is not None and not isinstance(error, PeerFailedError)
        gaps = len(self.runner.blocks.names) + 1
        own = [float(failed), float(streams.draws)]
        changed = self.placement.changed_buffers()
        everyones = gather_numbers([*own, *streams.outside(gaps), *changed, *numbers], self.group.group)
        fails, draws, *rest = (list(each) for each in zip(*everyones, strict=True))
        told: list[Any] = [None] * len(ranks)
        if any(fails):
            dist.all_gather_object(told, f"{type(error).__name__}: {error}" if failed else "", self.group.group)
        if error is not None and failed:
            raise StageError(error)
        if any(fails):
            failing = named_ranks([rank for rank, fails_there in zip(ranks, fails, strict=True) if fails_there])
            raise StageError(
                CollectiveError(
                    f"rank {dist.get_rank()}: {failing} of this pipeline raised in a forward, which no stage has "
                    f"finished, so there is no result here either. The error there: {''.join(filter(None, told))}",
                    secondary=True,
                )
            )
        outside, rest = rest[:gaps], rest[gaps:]
        if any(len({number for number in numbers_there if number}) > 1 for numbers_there in outside):
            raise StageError(
                ModelError(
                    f"rank {dist.get_rank()}: the model draws random numbers outside of its blocks, and the stages of "
                    "this pipeline drew different ones. Where torch's generators differ between the ranks, seed them "
                    "alike, as by distwrap.seed_everything(), and draw on all ranks or on none. Where a draw follows "
                    "from what another stage computes, as dropout in attention, let it be part of a block."
                )
            )
        if any(draws):
            streams.go_on()
        self.placement.share_buffers(rest[: len(changed)])
        return [sum(each) for each in rest[len(changed) :]]


class WholePass:
    """Pass of a whole batch through all stages, and back if its results have gradients.

    Args:
        context: what the passes of the model share.
    """

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._received: dict[int, list[torch.Tensor]] = {}
        self._outputs: dict[int, list[torch.Tensor]] = {}

    def forward(self, method: Method, given: Any) -> tuple[Any, list[torch.Tensor]]:
        """Run a method once, and return its result on every rank, without a graph, and what of it has gradients."""
        runner, group, _, streams, in_precision = self._context
        last, blocks = group.stages - 1, runner.blocks
        ends = {end - 1: stage for stage, end in enumerate(blocks.ends)}
        left = [(stage, do) for stage in group.own for do in ("receive", "send")]  # in this order
        left = [each for each in left if each not in ((0, "receive"), (last, "send"))]

        def receive(stage: int, _: Any) -> Any:
            left.remove((stage, "receive"))
            output = _received(group, stage)
            self._received[stage] = tensors_in(output)
            return map_tensors(torch.clone, output)  # blocks may change their inputs in place

        def after(number: int, output: Any) -> None:
            stage = ends.get(number)
            if number in own and stage is not None and stage != last:
                runner.refuse_remote(output, f"the output of the block {blocks.names[number]!r}")
                self._outputs[stage] = trained_of(output)
                _send(output, group, stage)
                left.remove((stage, "send"))
                if stage == group.own[-1]:
                    raise StopForward

        own = {number for stage in group.own for number in blocks.of_stage(stage)}
        starts = {blocks.ends[stage - 1] - 1: partial(receive, stage) for stage in group.own if stage}
        result, error = None, None
        with streams.of_pass():
            try:
                with streams.of_microbatch(0), in_precision.context():
                    result = runner.run(method, given, own, starts, after)
                result = in_precision.precision.outputs(result)
                if group.has_last:
                    _hollow(result)
            except Exception as raised:  # noqa: BLE001 - raised when no stage waits any more
                error = raised
            for stage, do in left:  # after an error
                if do == "send":
                    _send(None, group, stage)
                else:
                    with suppress(PeerFailedError):
                        _received(group, stage)
        self._context.end(error)
        if torch.is_grad_enabled() and group.has_last:
            self._outputs[last] = trained_of(result)
        return _shared(result, group)

    def backward(self, grads: list[Any]) -> None:
        """Compute gradients from those of the result's tensors, in their order; ``None`` where there is none."""
        group = self._context.group
        for stage in reversed(group.own):
            outputs, received = self._outputs.pop(stage, []), self._received.pop(stage, [])
            if stage < group.stages - 1:
                source, used = group.rank_of(stage + 1), torch.empty(len(outputs), device=group.device)
                if outputs:
                    dist.recv(used, source, group.group)
                grads = [
                    torch.empty_like(output, memory_format=torch.contiguous_format) if is_used else None
                    for output, is_used in zip(outputs, used.tolist(), strict=True)
                ]
                for grad in grads:
                    if grad is not None:
                        dist.recv(grad, source, group.group)
            backward_of(outputs, grads, retain_graph=stage != group.own[0])
            if trained := trained_of(received):
                to, found = group.rank_of(stage - 1), [tensor.grad for tensor in trained]
                dist.send(
                    torch.tensor([float(grad is not None) for grad in found], device=group.device), to, group.group
                )
                for grad in found:
                    if grad is not None:
                        dist.send(grad.contiguous(), to, group.group)


class SchedulePass:
    """torch's schedule over microbatches of one size.

    Args:
        kind: the schedule: ``"1f1b"``, ``"gpipe"`` or ``"interleaved"``.
        context: what the passes of the model share.
        outputs: the remote output of each block for a microbatch.
        count: the number of microbatches.
    """

    def __init__(self, kind: str, context: PassContext, outputs: list[Any], count: int) -> None:
        self._context, self._count, self._device = context, count, context.group.device
        ends = context.runner.blocks.ends
        self._outputs = [outputs[end - 1] for end in ends]  # of each stage
        self._loss_type = widest(self._device)
        self._method: Method = _loss
        self._parts: Sequence[Any] = ()
        self._factors: Sequence[float] = ()
        self._scale, self._checks = 1.0, False
        self._losses: list[torch.Tensor] = []
        self._passed: list[float] = []
        self._kept: list[Any] = []
        self._error: Exception | None = None
        self._autocast = torch.float32, False
        group = context.group
        stages: list[Any] = [self._stage(stage) for stage in group.own]
        self._stages = stages
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": _loss, "scale_grads": False}
        if len(stages) > 1:
            looped = ScheduleInterleaved1F1B if count % len(group.ranks) == 0 else ScheduleLoopedBFS
            self._schedule: Any = looped(stages, **options)
        else:
            (stage,) = stages
            stage.num_stages = min(count, group.stages)  # torch 2.9 makes no schedule of fewer microbatches than stages
            one_by_one = kind != "gpipe" and count >= group.stages
            self._schedule = (Schedule1F1B if one_by_one else ScheduleGPipe)(stage, **options)
            stage.num_stages = group.stages

    def run(
        self, method: Method, parts: Sequence[Any], factors: Sequence[float], scale: float, whole: Any = None
    ) -> torch.Tensor:
        """Compute the gradients of a weighted sum of the microbatches' losses, and return this sum on every rank.

        After an error in a stage the pass goes on with zeros, so that no other stage waits.

        Args:
            method: returns the loss of a microbatch.
            parts: the arguments of each microbatch.
            factors: the weight of each microbatch's loss.
            scale: the factor of the loss in its backward.
            whole: the arguments of the batch, to compare its loss with the sum; ``None``: no comparison.
        """
        kind, context = self._device.type, self._context
        self._method, self._parts, self._factors, self._scale = method, parts, factors, scale
        self._losses, self._kept, self._error, self._checks = [], [], None, whole is not None
        self._passed = [0.0] * context.group.stages  # what each stage has passed on, less what the next one took it for
        self._autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        numbers, outcome = torch.arange(self._count), [0.0, 0.0]
        try:
            with context.streams.of_pass():
                with torch.autocast(kind, enabled=False):  # the user's must not include backwards
                    self._step(numbers)
                if self._losses and self._error is None:
                    total = float(torch.stack(self._losses).sum())
                    outcome = [total, float(_DTYPES.index(self._dtype))]
                    if whole is not None:
                        self._error = self._unequal(whole, total)
            total, dtype, *differ = context.end(self._error, [*outcome, *self._passed])
            if any(differ):
                stage = next(stage for stage, number in enumerate(differ) if number)
                block = context.runner.blocks.names[context.runner.blocks.ends[stage] - 1]
                raise StageError(
                    ModelError(
                        f"the block {block!r} has passed on other Python values than it does without "
                        "its numbers, as where a number is computed with item() or float(). With loss= only tensors "
                        "and what follows from the arguments go from stage to stage: pass such a number on as a "
                        "tensor; or leave loss= out, and compute the loss from model(x)."
                    )
                )
            return torch.tensor(total, dtype=_DTYPES[int(dtype)], device=self._device)
        finally:
            self._method, self._parts, self._losses, self._kept, self._error = _loss, (), [], [], None
            for stage in self._stages:
                stage.clear_runtime_states()  # with the graphs

    def _step(self, numbers: torch.Tensor) -> None:
        try:
            self._schedule.step(target=numbers, losses=[], number=numbers)
        except RuntimeError as error:
            own = error.__cause__  # torch's message hides its type, and a lost peer
            if own is not None and "Failed to run stage backward" in str(error):
                raise own from own.__cause__
            raise

    def _stage(self, stage: int) -> PipelineStage:
        group = self._context.group
        is_last = stage == group.stages - 1
        given = _with_marks(tensors_in(self._outputs[stage - 1])) if stage else []
        returned = [torch.empty(1, dtype=self._loss_type)] if is_last else _with_marks(tensors_in(self._outputs[stage]))
        made = PipelineStage(
            _Part(self, stage),
            stage,
            group.stages,
            group.device,
            input_args=tuple(map(self._zeros, given)),
            output_args=tuple(map(self._zeros, returned)),
            group=group.group,
        )
        skip_first_messages(made)
        return made

    def part(self, stage: int, received: tuple[torch.Tensor, ...], number: int) -> Any:
        """Run a stage's part of a microbatch.

        torch's schedule sends zeros for a gradient that there is not. So beside the tensors go marks, whose gradients
        say which tensors have one.
        """
        is_last = stage == self._context.group.stages - 1
        outputs = [self._nothing()] if is_last else [*map(self._zeros, tensors_in(self._outputs[stage]))]
        if self._error is None:
            try:
                outputs = self._computed(stage, received, number, is_last)
            except Exception as error:  # noqa: BLE001 - raised when no stage waits any more
                self._error = error
        trained = trained_of(outputs)

        def hand_on(grads: list[Any]) -> None:
            grads, marks = (grads, [1.0]) if is_last else (grads[:-1], grads[-1].tolist())
            backward_of(trained, [grad if mark else None for grad, mark in zip(grads, marks, strict=True)])
            if given := trained_of(received):
                *tensors, mark = given
                mark.grad = mark.new_tensor([float(tensor.grad is not None) for tensor in tensors])
                for tensor in tensors:
                    tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

        sent = [tensor.detach() for tensor in outputs]
        passed = [plain for plain, tensor in zip(sent, outputs, strict=True) if tensor.requires_grad]
        if passed and not is_last:
            marks = _marks(passed).to(self._device)
            sent, passed = [*sent, marks], [*passed, marks]
        sent = linked(sent, passed, hand_on) if passed else sent
        return sent[0] if is_last else tuple(sent)

    def _computed(
        self, stage: int, received: tuple[torch.Tensor, ...], number: int, is_last: bool
    ) -> list[torch.Tensor]:
        runner, _, _, streams, in_precision = self._context
        blocks, found, buffers = runner.blocks, [], []

        def after(index: int, output: Any) -> None:
            if index + 1 == blocks.ends[stage]:
                found.append(output)
                if not is_last:
                    raise StopForward

        def start(hollow: Callable[[], Any]) -> Any:
            expected, tensors = hollow(), iter(received)  # with the plain values of this very run
            buffers.append(runner.versions())
            self._passed[stage - 1] -= _told(expected, number)
            if len(tensors_in(expected)) != len(tensors_in(self._outputs[stage - 1])):
                raise PeerFailedError  # the stage before says why, or what was told differs
            return map_tensors(lambda _: next(tensors).clone(), expected)

        starts = {blocks.ends[stage - 1] - 1: start} if stage else {}
        given = map_tensors(torch.clone, self._parts[number])  # which a method may change, once for each stage
        run = partial(runner.run, self._method, given, blocks.of_stage(stage), starts, after)
        with streams.of_microbatch(number), torch.autocast(self._device.type, *self._autocast), in_precision.context():
            result = run() if stage == self._context.group.own[0] else self._again(run, stage, buffers)
        (output,) = found
        if not is_last:
            runner.refuse_remote(output, f"the output of stage {stage}")
            sent = list(map(_widened, tensors_in(output), tensors_in(self._outputs[stage])))
            _check_like(sent, self._outputs[stage], stage)
            self._passed[stage] += _told(output, number)
            return [tensor.contiguous() for tensor in sent]
        if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
            raise ModelError(
                f"the method that loss= names returns a {type(result).__name__}, and under strategy='pipeline' it "
                "returns one number with a gradient: the loss of the samples that it is given. Leave loss= out where "
                "the loop computes the loss from model(x)."
            )
        if self._checks:
            self._kept.append(map_tensors(torch.detach, output))
        loss, factor = in_precision.precision.outputs(result), self._factors[number]
        self._dtype = loss.dtype
        if not factor:  # nothing counts, and the loss may be NaN
            return [self._nothing()]
        weighted = loss.reshape(1).to(self._loss_type) * factor
        self._losses.append(weighted.detach())
        return [weighted * self._scale]

    def _again(self, run: Callable[[], Any], stage: int, buffers: list[Any]) -> Any:
        """Run a later stage of this rank, before which the code around the blocks has run here for the first one.

        What that code counts in buffers is counted already.
        """
        runner, keep = self._context.runner, self._context.placement.only_in(stage)

        def watched() -> Any:
            begun, result = runner.versions(), run()
            started, ended = buffers[0], runner.versions()
            for name in ended:
                since, until = (begun, started) if name in keep else (started, ended)
                if since[name][0] is not until[name][0] or since[name][1] != until[name][1]:
                    raise ModelError(
                        f"the buffer {name!r} is changed {'before' if name in keep else 'after'} the blocks, and "
                        "schedule='interleaved' runs the code around them for each stage of a rank, so that it would "
                        "be changed twice or not at all. Register what is changed before the blocks before them, and "
                        "what is changed after them after them; or use schedule='1f1b'."
                    )
            return result

        return runner.apart(watched, keep)

    def _unequal(self, whole: Any, total: float) -> Exception | None:
        """Return an error if the loss of the whole batch, from the outputs of the last block, is not the sum."""
        runner, _, _, streams, in_precision = self._context
        outputs, last = self._kept, len(runner.blocks.names) - 1
        columns = zip(*map(tensors_in, outputs), strict=True)
        tensors = iter([torch.cat(column) if column[0].dim() else column[0] for column in columns])
        together = map_tensors(lambda _: next(tensors), outputs[0])
        try:
            with torch.no_grad(), streams.beside(), streams.of_microbatch(0), in_precision.context():
                starts = {last: lambda _: together}
                run = lambda: runner.run(self._method, whole, (), starts, lambda *_: None)  # noqa: E731
                expected = float(in_precision.precision.outputs(runner.apart(run)))
        except Exception as error:  # noqa: BLE001 - raised when no stage waits any more
            return error
        rough = {torch.float64: 1e-9, torch.float32: 1e-4}.get(self._dtype, 2e-2)
        if expected in (total, math.inf, -math.inf) or math.isnan(expected):
            return None
        if abs(expected - total) <= rough * max(abs(expected), abs(total)):
            return None
        return ModelError(
            f"check=True: the loss of this batch is {expected:.9g}, and {self._count} microbatches give {total:.9g}. "
            "If it is a sum over the batch, say reduction='sum'; if it is a mean over what counts, as words that are "
            "no padding, say weight=, a function of the target that returns how many count in it. A loss that "
            "compares samples with each other, or draws random numbers, takes microbatches=1."
        )

    def _nothing(self) -> torch.Tensor:
        return torch.zeros(1, dtype=self._loss_type, device=self._device, requires_grad=True)

    def _zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(tensor.size(), dtype=tensor.dtype, device=self._device)
        return made.requires_grad_(tensor.requires_grad)


class _Part(nn.Module):
    """Stage as a module for torch's schedules."""

    def __init__(self, schedule_pass: SchedulePass, stage: int) -> None:
        super().__init__()
        self._pass, self._stage = schedule_pass, stage

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        return self._pass.part(self._stage, received, int(number))


def trained_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nesting that require a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


def _marks(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.zeros(len(tensors), dtype=torch.float32)


def _with_marks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    trained = trained_of(tensors)
    return [*tensors, _marks(trained).requires_grad_()] if trained else tensors


def _widened(tensor: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type that is expected, if that is wider, since autocast does not know remote ones."""
    known = expected.dtype
    return tensor.to(known) if known.is_floating_point and torch.promote_types(tensor.dtype, known) == known else tensor


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}{' with a gradient' if tensor.requires_grad else ''}"


def _told(value: Any, number: int) -> float:
    """Return a number for the structure and the plain values of what a block returns for a microbatch."""
    return float(mix(number, str(_plain(value, 4))) % 2**40)


def _plain(value: Any, depth: int) -> Any:
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (bool, int, float, complex, str, bytes, Enum)):
        return kind, repr(value)
    if isinstance(value, (list, tuple)):
        return kind, [_plain(each, depth) for each in value]
    if isinstance(value, Mapping):
        return kind, [(str(key), _plain(each, depth)) for key, each in value.items()]
    inside = None if isinstance(value, nn.Module) or not depth else getattr(value, "__dict__", None)
    return kind, inside and _plain(dict(inside), depth - 1)


def _check_like(output: Any, expected: Any, stage: int) -> None:
    """Refuse an output of a stage with other sizes, types or gradients than the next one expects."""
    seen, known = (list(map(_described, tensors_in(each))) for each in (output, expected))
    if seen != known:
        raise ModelError(
            f"rank {dist.get_rank()}: stage {stage} has computed {', '.join(seen) or 'nothing'}, and the next "
            f"one waits for {', '.join(known) or 'nothing'}, as in an earlier run on such arguments. Sizes, "
            "types, and which tensors have a gradient must follow from the arguments and from whether the "
            "model trains: pass anything else on which they depend as an argument that is not a float."
        )


def _hollow(value: Any) -> Any:
    """Return a value without numbers, which can be pickled.

    Raises:
        ModelError: it cannot be sent.
    """
    for tensor in tensors_in(value):
        if tensor.is_nested or tensor.layout != torch.strided:
            raise ModelError(
                "a stage's output or result cannot be sent to the other stages: it has a sparse or nested tensor. Let "
                f"the model return dense ones. {NESTED}"
            )
    hollow = map_tensors(lambda each: each.detach().to("meta").requires_grad_(each.requires_grad), value)
    try:
        pickle.dumps(hollow)
    except Exception as error:
        raise ModelError(
            f"a stage's output or result cannot be sent to the other stages: {error}. Let the model return tensors, "
            "numbers, and instances of classes that are defined at the top of a module."
        ) from error
    return hollow


def _filled(hollow: Any, group: StageGroup) -> Any:
    return map_tensors(lambda each: torch.empty(each.size(), dtype=each.dtype, device=group.device), hollow)


def _send(output: Any, group: StageGroup, stage: int) -> None:
    """Send a stage's output to the next one; ``None``: it has failed."""
    to = group.rank_of(stage + 1)
    dist.send_object_list([_hollow(output)], to, group.group, group.device)
    for tensor in tensors_in(output):
        dist.send(tensor.detach().contiguous(), to, group.group)


def _received(group: StageGroup, stage: int) -> Any:
    """Return the output of the stage before, with leaves of a new graph."""
    source, told = group.rank_of(stage - 1), [None]
    dist.recv_object_list(told, source, group.group, group.device)
    if told[0] is None:
        raise PeerFailedError
    filled = _filled(told[0], group)
    for tensor, like in zip(tensors_in(filled), tensors_in(told[0]), strict=True):
        dist.recv(tensor, source, group.group)
        tensor.requires_grad_(like.requires_grad and torch.is_grad_enabled())
    return filled


def _shared(result: Any, group: StageGroup) -> tuple[Any, list[torch.Tensor]]:
    """Return the last stage's result on every rank, and those of its tensors that have a gradient."""
    told = [_hollow(result)]
    dist.broadcast_object_list(told, group.last, group.group, group.device)
    here = map_tensors(lambda each: each.detach().contiguous(), result) if group.has_last else _filled(told[0], group)
    for tensor in tensors_in(here):
        dist.broadcast(tensor, group.last, group.group)
    hollow = tensors_in(told[0])
    return here, [each for each, like in zip(tensors_in(here), hollow, strict=True) if like.requires_grad]
