"""`PipelineStrategy`: the blocks of a model are divided among ranks, which work on several microbatches at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer

from distwrap.checks import is_whole
from distwrap.devices.kinds import widest
from distwrap.errors import ModelError, OptionError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import Layout, RunPart, World, current_world
from distwrap.model.in_sync import Held, left_to_ranks
from distwrap.model.wrapped_models import WrappedModels, parameters_of, routing_of
from distwrap.options import Options
from distwrap.strategies.base import Strategy, Wrapping
from distwrap.strategies.meshes import mesh_over
from distwrap.strategies.optimizer_scope import refuse_scope
from distwrap.strategies.pipeline.absent import Absent, is_here, is_in_step
from distwrap.strategies.pipeline.blocks import find_chain
from distwrap.strategies.pipeline.model import PassSettings, PipelineModel, PipelineRouting
from distwrap.strategies.pipeline.schedule import Line
from distwrap.strategies.pipeline.state import States
from distwrap.strategies.single import local
from distwrap.versions import PIPELINE_SINCE, require_torch
from distwrap.wording import named_ranks, unknown_name

_SCHEDULES = ("1f1b", "gpipe", "interleaved")


class PipelineStrategy(Strategy):
    """Strategy in which a model's blocks run in stages, one after the other on the ranks, over microbatches.

    A step is ``loss = model.loss(x, y); loss.backward()``: a method that returns a loss runs torch's schedule, which
    also computes the gradients, and the loss's backward adds them to the parameters. With gradients switched off, any
    method of the model runs through all stages, and returns its result on every rank. All ranks of a pipeline must call
    the method with the same batch, which `shard_loader` gives them.

    Args:
        stages: the number of ranks of one pipeline; several pipelines train as under DDP. By default all ranks are one
            pipeline.
        schedule: ``"1f1b"``, ``"gpipe"``, or ``"interleaved"``, in which a rank has two stages.
        microbatches: the largest number of parts into which a batch is cut; the largest number up to it that divides
            the batch is taken. By default it is two for each rank, and one if a forward changes buffers, as a batch
            norm does. If a number is given here, each microbatch changes the buffers, and a batch norm takes its
            statistics from one microbatch, as in other pipelines.
        split: the names of the blocks at which stages begin, without the first; by default the model's longest chain of
            blocks is cut into stages with about equally many parameters.
        reduction: whether a loss is the ``"mean"`` or the ``"sum"`` over its batch; ``"auto"`` finds out from the first
            batch.

    Raises:
        OptionError: an option is wrong.

    Example:
        >>> PipelineStrategy(schedule="gpipe", microbatches=4).microbatches
        4

    Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
    """

    shards = True
    steps_parameters = True

    def __init__(
        self,
        stages: int | None = None,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        split: Sequence[str] | None = None,
        reduction: Literal["auto", "mean", "sum"] = "auto",
    ) -> None:
        if schedule not in _SCHEDULES:
            raise OptionError(unknown_name("schedule", schedule, _SCHEDULES))
        if reduction not in ("auto", "mean", "sum"):
            raise OptionError(unknown_name("reduction", reduction, ("auto", "mean", "sum")))
        for name, value, least in (("stages", stages, 2), ("microbatches", microbatches, 1)):
            if value is not None and not is_whole(value, least):
                raise OptionError(f"{name}={value!r}: it must be a whole number from {least}.")
        self.stages, self.schedule, self.microbatches = stages, schedule, microbatches
        self.split, self.reduction = split, reduction
        self._mesh: DeviceMesh | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mesh": None}

    def check(self, run: Options) -> None:
        why = "torch's schedules do not wait for all that stages exchange"
        require_torch("strategy='pipeline'", PIPELINE_SINCE, why, "strategy='zero1'")
        if run.comm is not None:
            raise OptionError("strategy='pipeline' exchanges gradients by itself: leave comm out.")

    def setup(self, world: World) -> Layout | None:
        size = world.placement.world_size
        stages = self.stages or size
        if size % stages:
            raise OptionError(
                f"strategy='pipeline' with stages={stages} needs a multiple of {stages} ranks, and there are {size}. "
                f"Take a divisor of {size}, or start {size + stages - size % stages} ranks by nprocs=."
            )
        self._mesh = mesh_over(world, (size // stages, stages), ("data", "stage"))
        return Layout(self._mesh.get_local_rank("data"), size // stages, self._mesh.get_group("data"), self._mesh)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        if world.placement.world_size == 1:
            return local(model, wrapping)
        if wrapping.comm is not None:
            raise OptionError("strategy='pipeline' exchanges gradients by itself: leave comm out.")
        for name in wrapping.options:
            raise OptionError(
                f"wrap_model() got {name!r}, and strategy='pipeline' takes no options there: give its own to "
                f"PipelineStrategy(...)."
            )
        if self._mesh is None:
            raise OptionError(
                "strategy='pipeline' arranges the ranks when the run begins: give it to @distributed(strategy=...), or "
                "as DISTWRAP_STRATEGY, and leave it out of wrap_model()."
            )
        group = self._mesh.get_group("stage")
        ranks = dist.get_process_group_ranks(group)
        stages = len(ranks) * (2 if self.schedule == "interleaved" else 1)
        chain = find_chain(model, stages, self.split)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                numbers = tensor.detach().contiguous()
                dist.broadcast(numbers, src=0)
                tensor.copy_(numbers)
        own = list(range(dist.get_rank(group), stages, len(ranks)))
        line = Line(group, ranks, own, stages, wrapping.device)
        settings = PassSettings(
            self.schedule, self.microbatches or 2 * len(ranks), self.microbatches is not None, self.reduction
        )
        world.part(StageOptimizers)
        return PipelineModel(PipelineRouting(model, chain, line, world, wrapping, settings))

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        _refuse_whole(optimizer)
        return optimizer

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        routing_of(model).syncs = on

    def clip(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        everything = list(parameters)
        given = [parameter for parameter in everything if is_here(parameter) and parameter.grad is not None]
        divided: set[int] = set()
        counted: set[int] = set()
        group = None
        for model in current_world().part(WrappedModels).of_optimizer(optimizer):
            if isinstance(routing := routing_of(model), PipelineRouting):
                divided |= set(map(id, routing.model.parameters()))
                counted |= routing.holders.counted_here()
                group = routing.line.group
        if group is None or dist.get_rank(group) == 0:  # tensors outside of pipelines are equal on all ranks of one
            counted |= set(map(id, given)) - divided
        grads = [parameter.grad for parameter in given if id(parameter) in counted and parameter.grad is not None]
        place = current_world().device
        square = torch.zeros((), dtype=widest(place), device=place)
        if grads:
            square += nn.utils.get_total_norm(grads).to(square.dtype) ** 2
        if group is not None:
            dist.all_reduce(square, group=group)
        norm = square.sqrt().to(everything[0].dtype if everything else torch.float32)
        nn.utils.clip_grads_with_norm_(given, max_norm, norm)
        return norm

    def held(self, model: nn.Module) -> Iterable[Held]:
        routing: PipelineRouting = routing_of(model)
        own, size = left_to_ranks(model), len(routing.line.ranks)
        for name, tensor in routing.holders.tensors().items():
            if name not in own and is_here(tensor):
                places = sorted(routing.holders.ranks[name])
                where = f"{places[0]}: {named_ranks(places)} of a pipeline"
                yield Held(name, "" if len(places) == size else where, tensor)

    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        states = _states(thing)
        if states is None:
            return super().state(thing, everywhere=everywhere)
        if isinstance(thing, nn.Module):
            return states.of_model(everywhere=everywhere)
        return states.of_optimizer(thing, everywhere=everywhere)

    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        states = _states(thing)
        if states is None:
            super().load_state(thing, state)
        elif isinstance(thing, nn.Module):
            states.load_model(state)
        else:
            states.load_optimizer(thing, state)

    def parts_to_load(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        states = _states(thing)
        return None if states is None else states.needed(thing, state)

    def give_back(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        if isinstance(prepared, Optimizer) or not isinstance(routing_of(prepared), PipelineRouting):
            super().give_back(original, prepared, state)
            return
        model = prepared
        models = current_world().part(WrappedModels)
        own = [each for each in models.optimizers_of_all_ranks() if model in models.of_optimizer(each)]
        states = [self.state(optimizer, everywhere=True) for optimizer in own]
        routing_of(model).give_back(state)
        for optimizer, whole in zip(own, states, strict=True):
            optimizer.load_state_dict(whole)

    def parts(self, thing: nn.Module | Optimizer) -> dict[str, Any] | None:
        states = _states(thing)
        if states is None:
            return None
        return states.parts_of_model() if isinstance(thing, nn.Module) else states.parts_of_optimizer(thing)


class StageOptimizers(RunPart):
    """Hooks on steps of optimizers of models in stages, in which they see no absent gradient."""

    def __init__(self, world: World) -> None:
        self._taken: WeakSet[Optimizer] = WeakSet()
        steps = world.part(OptimizerSteps)
        steps.listen(Phase.BEGIN, self._begin)
        steps.listen(Phase.END, self._end)

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        _refuse_whole(optimizer)
        if optimizer not in self._taken and _holds_absent(optimizer):
            refuse_scope(optimizer)
            self._taken.add(optimizer)
        frame = _frame_of_step()
        if frame is not None and not is_in_step(frame):  # a base class's step is part of it
            Absent.step, Absent.asked = frame, False

    def _end(self, *_: Any) -> None:
        if Absent.step is not None and _frame_of_step() is Absent.step:
            Absent.step = None

    def close(self) -> None:
        """Forget a step that has not ended."""
        Absent.step = None


def _frame_of_step() -> FrameType | None:
    """Return the frame in which torch runs the hooks of the current step."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != Optimizer.__module__:
        frame = frame.f_back
    return frame


def _refuse_whole(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs all gradients at once, and drop its state for parameters of other stages."""
    gone = [
        parameter for parameter in optimizer.state if isinstance(parameter, torch.Tensor) and not is_here(parameter)
    ]
    for parameter in gone:
        del optimizer.state[parameter]
    if isinstance(optimizer, torch.optim.LBFGS) and _holds_absent(optimizer):
        raise ModelError(
            "LBFGS takes products over all gradients of a model, and under strategy='pipeline' each rank has those of "
            "its stage. Use an optimizer that steps each parameter by itself, as AdamW, or strategy='ddp'."
        )


def _holds_absent(optimizer: Optimizer) -> bool:
    return not all(map(is_here, parameters_of(optimizer).values()))


def _states(thing: nn.Module | Optimizer) -> States | None:
    models = [thing] if isinstance(thing, nn.Module) else current_world().part(WrappedModels).of_optimizer(thing)
    for model in models:
        if isinstance(routing := routing_of(model), PipelineRouting):
            return States(routing.model, routing.holders, routing.line.device)
    return None
