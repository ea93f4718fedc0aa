"""Find out whether a method's loss is the mean or the sum over its batch, or neither, so that no batch is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from distwrap._internals.torch_autograd import divisors, without_chance
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.devices.kinds import widest
from distwrap.group.tensor_exchange import gather_numbers
from distwrap.group.world import say_once
from distwrap.model.watch import is_power_of_two
from distwrap.precision import InPrecision
from distwrap.seeding import preserved, seed_generators
from distwrap.strategies.pipeline.absent import is_here
from distwrap.strategies.pipeline.attributes import kept_attributes
from distwrap.strategies.pipeline.calls import Call, Latest
from distwrap.strategies.pipeline.microbatches import LossWeights
from distwrap.strategies.pipeline.relay import Method, Relay, Survey
from distwrap.strategies.pipeline.schedule import Line
from distwrap.strategies.pipeline.streams import Streams

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_KINDS = ("mean", "sum")


class LastStage(NamedTuple):
    """Results of the last stage: the loss, its weight and counts, and its gradients for the received tensors."""

    loss: float
    weight: float
    slopes: list[torch.Tensor | None]
    counts: list[float]


class LossKinds:
    """Kinds of the losses of a model's methods, which may depend on arguments such as a flag.

    At batch 1, 2, 4, 8, … the last stage runs on artificial inputs for a whole batch and its parts, and compares losses
    and gradients. In the first steps of a training all losses are similar, but gradients show the weight of each
    microbatch.

    Args:
        relay: runs the methods.
        line: this rank's place in the pipeline.
        in_precision: the precision in which the model computes.
        streams: the model's random numbers.
        reduction: the reduction that the user has given, or ``"auto"``.
    """

    def __init__(self, relay: Relay, line: Line, in_precision: InPrecision, streams: Streams, reduction: str) -> None:
        self._relay, self._line, self._in_precision, self._streams = relay, line, in_precision, streams
        self._reduction = reduction
        self._found: Latest[Call, str] = Latest()
        self._batches: Latest[Call, int] = Latest()

    def is_whole(self, call: Call) -> bool:
        """Return whether a method's batches cannot be cut."""
        return self._found.get(call) == "whole"

    def needs_look(self, call: Call) -> bool:
        """Count a batch, and return whether its loss must be examined."""
        self._batches[call] = 1 + (self._batches.get(call, 0) if call in self._found else 0)
        return self._reduction == "auto" and is_power_of_two(self._batches[call])

    def of(self, call: Call) -> str:
        """Return ``"mean"``, ``"sum"`` or ``"whole"``."""
        found = self._found.get(call, self._reduction)
        return "mean" if found == "auto" else found

    def look(self, call: Call, method: Method, given: list[Any], surveys: list[Survey], mixes: bool) -> bool:
        """Find the kind of a loss, and return whether this batch can be cut.

        Args:
            call: the call of the method.
            method: the method of the user's model.
            given: the arguments of the whole batch, and of each microbatch.
            surveys: the surveys of the method for the batch and for a microbatch.
            mixes: whether samples may depend on others in their microbatch.
        """
        found, unlike = [math.nan] * 5, 0.0
        for stage in self._line.own:
            if stage == self._line.stages - 1:
                found = self._compared(method, given, surveys)
            elif not mixes:
                unlike = max(unlike, self._unlike(stage, method, given, surveys))
        everyones = gather_numbers([*found, unlike], self._line.group)
        last = self._line.ranks.index(self._line.rank_of(self._line.stages - 1))
        *errors, whole, mean, shows, _ = everyones[last]
        worst = max(each[-1] for each in everyones)
        dtype = surveys[0].result.dtype
        tolerance = _TOLERANCE.get(dtype, 0.02) if self._in_precision.is_plain else 0.02
        if worst > tolerance:
            self.run_whole(call, "has blocks in which the samples of a batch depend on each other, so that its loss")
            return False
        if not all(map(math.isfinite, errors)):
            say_once(
                f"unclear {call.name}",
                f"{call.name}(): it is not known yet whether it returns the mean or the sum over its batch, so "
                "the batch runs as a whole. Say which by PipelineStrategy(reduction='mean') or 'sum'.",
            )
            return False
        best = _KINDS[errors.index(min(errors))]
        if min(errors) > tolerance or self._found.get(call, best) != best:
            self.run_whole(call, f"of a batch is {whole:.6g} where the mean of its microbatches is {mean:.6g}: it")
        elif best == "mean" and not shows:
            self.run_whole(call, "does not show what it is the mean of, which may be less in one microbatch: it")
        else:
            self._found[call] = best
        return not self.is_whole(call)

    def run_whole(self, call: Call, seen: str) -> None:
        """Run the batches of a method as a whole from now on."""
        self._found[call] = "whole"
        say_once(
            f"neither {call.name}",
            f"{call.name}() {seen} is neither the mean nor the sum over its batch. From now on its batches run as a "
            f"whole, one stage after the other. A loss that is a sum, with distwrap.scale_loss(loss, count), runs "
            f"microbatches side by side.",
        )

    def _compared(self, method: Method, given: list[Any], surveys: list[Survey]) -> list[float]:
        """Return how far a loss is from the mean and from the sum; the loss; the mean; whether its count shows."""
        begin, count = self._relay.chain.ends[-2], len(given) - 1
        whole, part = (tensors_in(survey.outputs[begin - 1]) for survey in surveys)
        dims = [_cut(one, other) for one, other in zip(whole, part, strict=True)]
        weights, runs = LossWeights("mean", count), []
        try:
            with self._apart(), torch.enable_grad():
                made, *pieces = _pieces([_made_up(tensor, self._line.device) for tensor in whole], part, count)
                expected = self._ran(method, given[0], surveys[0], made, LossWeights("mean", 1))
                for arguments, received in zip(given[1:], pieces, strict=True):
                    runs.append(self._ran(method, arguments, surveys[1], received, weights))
        except Exception:  # noqa: BLE001 - the next pass raises it too, and tells the other stages
            return [math.nan] * 5
        total = sum(run.weight for run in runs)
        shares = [run.weight / total for run in runs]
        mean = sum(share * run.loss for share, run in zip(shares, runs, strict=True))
        errors = [_error(expected, runs, dims, factors) for factors in (shares, [1.0] * count)]
        counts = zip(expected.counts, *(run.counts for run in runs), strict=False)
        shows = any(math.isclose(everything, sum(each), rel_tol=1e-5) for everything, *each in counts)
        return [*errors, expected.loss, mean, float(shows)]

    def _unlike(self, stage: int, method: Method, given: list[Any], surveys: list[Survey]) -> float:
        """Return how far a stage's output for a batch is from that for its parts."""
        begin = self._relay.chain.ends[stage - 1] if stage else 0
        count = len(given) - 1
        whole, part = (tensors_in(survey.outputs[begin - 1]) if stage else [] for survey in surveys)
        runs: list[list[torch.Tensor]] = []
        try:
            with self._apart(), torch.no_grad():
                pieces = _pieces([_made_up(tensor, self._line.device) for tensor in whole], part, count)
                for survey, arguments, received in zip([surveys[0], *surveys[1:] * count], given, pieces, strict=True):
                    runs.append(tensors_in(self._output(method, arguments, survey, stage, received)))
        except Exception:  # noqa: BLE001 - the next pass raises it too, and tells the other stages
            return 0.0
        return max((_distance(*each) for each in zip(*runs, strict=False)), default=0.0)

    def _ran(
        self, method: Method, given: Any, survey: Survey, received: list[torch.Tensor], weights: LossWeights
    ) -> LastStage:
        output = self._output(method, given, survey, self._line.stages - 1, received)
        loss = self._in_precision.precision.outputs(output)
        weight, counts = float(weights.of(loss)), [float(each) for each in divisors(loss)]
        trained = [tensor for tensor in received if tensor.requires_grad]
        found = iter(torch.autograd.grad(loss.sum(), trained, allow_unused=True))
        return LastStage(
            float(loss.detach()), weight, [next(found) if each.requires_grad else None for each in received], counts
        )

    def _output(self, method: Method, given: Any, survey: Survey, stage: int, received: list[torch.Tensor]) -> Any:
        seed_generators(0)  # the same for each run
        arguments = map_tensors(torch.clone, given)
        with self._in_precision.context(), without_chance():
            return self._relay.run(survey, stage, received, method, arguments)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Restore the model and the random numbers after a ``with``."""
        net = self._relay.net
        with kept_attributes(net), _kept_buffers(net), preserved(), self._streams.kept():
            yield


@contextmanager
def _kept_buffers(net: nn.Module) -> Iterator[None]:
    """Restore a model's buffers and their numbers after a ``with``."""
    places = [(module, name) for module in net.modules() for name, _ in module.named_buffers(recurse=False)]
    before = [(module, name, module._buffers[name]) for module, name in places]
    numbers = [buffer.clone() if buffer is not None and is_here(buffer) else None for _, _, buffer in before]
    try:
        yield
    finally:
        for (module, name, buffer), kept in zip(before, numbers, strict=True):
            module._buffers[name] = buffer
            if buffer is not None and kept is not None and not torch.equal(buffer, kept):
                buffer.copy_(kept)


def _cut(whole: torch.Tensor, part: torch.Tensor) -> int | None:
    """Return the dimension in which a tensor was cut, or ``None``."""
    return next(
        (dim for dim, (one, other) in enumerate(zip(whole.shape, part.shape, strict=True)) if one != other), None
    )


def _pieces(made: list[torch.Tensor], part: list[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Return whole tensors, and the parts for each microbatch."""
    dims = [_cut(one, other) for one, other in zip(made, part, strict=True)]
    cut = [[one] * count if dim is None else one.chunk(count, dim) for one, dim in zip(made, dims, strict=True)]
    return [made, *([each[number] for each in cut] for number in range(count))]


def _distance(whole: torch.Tensor, *parts: torch.Tensor) -> float:
    """Return how far a tensor is from the concatenation of its parts, or from their mean if it was not cut."""
    dim = _cut(whole, parts[0])
    wide = widest(whole.device)
    exact = [part.to(wide) for part in parts]
    whole, put = whole.to(wide), torch.cat(exact, dim) if dim is not None else torch.stack(exact).mean(0)
    return float(((put - whole).norm() / whole.norm().clamp(min=1e-30)).detach())


def _made_up(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a random tensor like one that a stage receives."""
    if not tensor.is_floating_point():
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=device).requires_grad_()


def _error(expected: LastStage, runs: list[LastStage], dims: list[int | None], factors: list[float]) -> float:
    """Return how far a weighted sum of losses, with its gradients, is from the expected one."""
    off = size = 0.0
    for number, (slope, dim) in enumerate(zip(expected.slopes, dims, strict=True)):
        if slope is not None and dim is not None:
            each = [run.slopes[number] for run in runs]
            scaled = [0 * slope if one is None else factor * one for factor, one in zip(factors, each, strict=True)]
            wide = widest(slope.device)
            off += float((torch.cat(scaled, dim) - slope).to(wide).square().sum())
            size += float(slope.to(wide).square().sum())
    losses = [factor * run.loss for factor, run in zip(factors, runs, strict=True)]
    value = abs(sum(losses) - expected.loss) / (sum(map(abs, losses)) or 1.0)
    return max(math.sqrt(off / size), value) if size else math.nan
