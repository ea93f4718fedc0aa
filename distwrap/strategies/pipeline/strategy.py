"""`PipelineStrategy`: the blocks of a model are divided among ranks, which work on several microbatches at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MethodType
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
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, parameters_of, routing_of, strategy_of
from distwrap.options import Options
from distwrap.strategies.base import Strategy, Wrapping, take_rank_zero_weights
from distwrap.strategies.optimizer_scope import refuse_scope
from distwrap.strategies.pipeline.model import PipelineModel, PipelineRouting
from distwrap.strategies.pipeline.placement import Placement, StageGroup, find_blocks
from distwrap.strategies.pipeline.remote import RemoteTensor, is_here
from distwrap.strategies.shards import mesh_over
from distwrap.strategies.single import local
from distwrap.versions import PIPELINE_SINCE, require_torch
from distwrap.wording import unknown_name

_SCHEDULES = ("1f1b", "gpipe", "interleaved")
_REDUCTIONS = ("mean", "sum")


class PipelineStrategy(Strategy):
    """Strategy in which a model's blocks run in stages, one after the other on the ranks, over microbatches.

    A step is ``loss = model.loss(x, y); loss.backward()``: the method that `loss` names runs torch's schedule, which
    also computes the gradients, and the loss's backward adds them to the parameters. Without `loss`, and with gradients
    switched off, a forward of the model runs a whole batch through all stages, and returns its result on every rank.
    All ranks of a pipeline must give it the same batch, which `shard_loader` does.

    Args:
        split: the names of the blocks at which stages begin, without the first; by default the longest list of blocks
            is cut into stages with about equally many parameters.
        stages: the number of ranks of one pipeline; several pipelines train as under DDP. By default all ranks are one
            pipeline.
        loss: the name of the model's method that returns the loss, with the target as its last argument; or a function
            of the model's output and a target, which then is ``model.loss(*inputs, target)``.
        reduction: whether a loss is the ``"mean"`` or the ``"sum"`` over its batch.
        weight: for a mean over what counts, as words that are no padding: a function of the target, the last tensor in
            the order of the loss method's arguments, that returns how much counts in it. Without it each sample counts
            alike.
        microbatches: the largest number of parts into which a batch is cut; the largest number up to it that divides
            the batch is taken. By default it is two for each rank.
        schedule: ``"1f1b"``, ``"gpipe"``, or ``"interleaved"``, in which a rank has two stages.
        everywhere: the names of modules and parameters outside of the blocks that every stage holds. By default the
            first stage holds what is registered before the blocks, and the last one what is registered after them.
        check: whether the loss of each batch is also computed as a whole, from the outputs that the last stage has, and
            compared. Use it in a first run.

    Raises:
        OptionError: an option is wrong.

    Example:
        >>> PipelineStrategy(loss="loss", schedule="gpipe", microbatches=4).microbatches
        4

    Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
    """

    shards = True
    steps_parameters = True
    exchanges = "the stages send gradients to each other"

    def __init__(
        self,
        split: Sequence[str] | None = None,
        *,
        stages: int | None = None,
        loss: str | Callable[[Any, Any], torch.Tensor] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        weight: Callable[[Any], Any] | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        everywhere: Collection[str] = (),
        check: bool = False,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise OptionError(unknown_name("schedule", schedule, _SCHEDULES))
        if reduction not in _REDUCTIONS:
            raise OptionError(
                unknown_name("reduction", reduction, _REDUCTIONS, {"auto": "It is not found out: say which."})
            )
        for name, value, least in (("stages", stages, 2), ("microbatches", microbatches, 1)):
            if value is not None and not is_whole(value, least):
                raise OptionError(f"{name}={value!r}: it must be a whole number from {least}.")
        for name, names in (("split", split), ("everywhere", everywhere)):
            if isinstance(names, str):
                raise OptionError(f"{name}={names!r}: it is a list of names, as [{names!r}].")
        if weight is not None and (reduction == "sum" or not callable(weight)):
            raise OptionError("weight= is a function of a target, for reduction='mean': a sum needs no weights.")
        said = {"reduction": reduction != "mean", "weight": weight, "check": check, "microbatches": microbatches}
        if loss is None and (lost := [name for name, value in said.items() if value]):
            raise OptionError(
                f"{lost[0]}= is of use with loss= alone: name the method that returns the loss, as loss='loss'. "
                "Without it a batch runs as a whole."
            )
        self.split, self.stages, self.loss, self.reduction, self.weight = split, stages, loss, reduction, weight
        self.microbatches, self.schedule, self.everywhere, self.checks = microbatches, schedule, everywhere, check
        self._mesh: DeviceMesh | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mesh": None}

    def check(self, run: Options) -> None:
        why = "torch's schedules do not wait for all that stages exchange"
        require_torch("strategy='pipeline'", PIPELINE_SINCE, why, "strategy='zero1'")
        super().check(run)

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
        name, net = self.loss, unwrap_model(model)
        if callable(name):
            name = _put_loss(net, name)
        elif name is not None and not _is_method(net, name):
            methods = [each for each in dir(net) if not hasattr(nn.Module, each) and _is_method(net, each)]
            raise ModelError(unknown_name(f"method of {type(net).__name__} in loss=", name, ["forward", *methods]))
        if world.placement.world_size == 1:
            return local(model, wrapping)
        self.refuse_options(wrapping)
        if self._mesh is None:
            raise OptionError(
                "strategy='pipeline' arranges the ranks when the run begins: give it to @distributed(strategy=...), or "
                "as DISTWRAP_STRATEGY, and leave it out of wrap_model()."
            )
        ranks = dist.get_process_group_ranks(self._mesh.get_group("stage"))
        stages = len(ranks) * (2 if self.schedule == "interleaved" else 1)
        own = list(range(self._mesh.get_local_rank("stage"), stages, len(ranks)))
        group = StageGroup(self._mesh.get_group("stage"), ranks, own, stages, wrapping.device)
        blocks = find_blocks(net, stages, self.split)
        take_rank_zero_weights(net)
        placement = Placement(net, blocks, group, self.everywhere)
        world.part(StageOptimizers)
        return PipelineModel(PipelineRouting(model, blocks, placement, group, world, wrapping, self, name))

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        if not all(map(is_here, parameters_of(optimizer).values())):
            _adopt(optimizer)
        return optimizer

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        routing_of(model).syncs = on

    def clip(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        everything = list(parameters)
        given = [parameter for parameter in everything if is_here(parameter) and parameter.grad is not None]
        placements = [routing.placement for routing in _routings(optimizer)]
        group = placements[0].group.group if placements else None
        # Each is counted by the first place that holds it; what is outside of pipelines is alike in all places.
        first = {key: place for each in placements for key, place in each.first_places().items()}
        own = 0 if group is None else dist.get_rank(group)
        counted = [parameter.grad for parameter in given if first.get(id(parameter), 0) == own]
        grads = [grad for grad in counted if grad is not None]
        place = current_world().device
        square = torch.zeros((), dtype=widest(place), device=place)
        if grads:
            square += nn.utils.get_total_norm(grads).to(square.dtype) ** 2
        if group is not None:
            dist.all_reduce(square, group=group)
        norm = square.sqrt().to(everything[0].dtype if everything else torch.float32)
        nn.utils.clip_grads_with_norm_(given, max_norm, norm)
        return norm

    def holders(self, thing: nn.Module | Optimizer) -> Mapping[int, Collection[int]] | None:
        found = [routing.placement.holders() for routing in _routings(thing)]
        return {key: ranks for each in found for key, ranks in each.items()} if found else None

    def restore_original(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        if isinstance(prepared, Optimizer) or not isinstance(routing_of(prepared), PipelineRouting):
            super().restore_original(original, prepared, state)
            return
        models = current_world().part(WrappedModels)
        own = [each for each in models.optimizers_of_all_ranks() if prepared in models.of_optimizer(each)]
        states = [self.state(optimizer, everywhere=True) for optimizer in own]
        routing_of(prepared).restore_original(state)
        for optimizer, whole in zip(own, states, strict=True):
            optimizer.load_state_dict(whole)


class StageOptimizers(RunPart):
    """Hook before the first step of each optimizer of parameters in stages."""

    def __init__(self, world: World) -> None:
        self._taken: WeakSet[Optimizer] = WeakSet()
        world.part(OptimizerSteps).listen(Phase.BEGIN, self._begin)

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._taken and not all(map(is_here, parameters_of(optimizer).values())):
            _adopt(optimizer)
            refuse_scope(optimizer)
            self._taken.add(optimizer)


def _adopt(optimizer: Optimizer) -> None:
    """Drop an optimizer's state for parameters of other stages, and refuse one that two strategies divide.

    Its groups keep these parameters, so that their numbers in a checkpoint are those of one process; they have no
    gradient in a step, so that it leaves them out.
    """
    for parameter in [each for each in optimizer.state if isinstance(each, torch.Tensor) and not is_here(each)]:
        del optimizer.state[parameter]
    world = current_world()
    for model in world.part(WrappedModels).of_optimizer(optimizer):
        if not isinstance(routing_of(model), PipelineRouting) and (other := strategy_of(model, world)).shards:
            raise ModelError(
                f"one {type(optimizer).__name__} holds parameters of a model under strategy='pipeline' and of one "
                f"under {type(other).__name__}, which divide it in different ways. Make an optimizer for each model."
            )


def _is_method(net: nn.Module, name: str) -> bool:
    found = getattr(net, name, None)
    return callable(found) and not isinstance(found, nn.Module)


def _put_loss(net: nn.Module, function: Callable[[Any, Any], torch.Tensor]) -> str:
    """Give a model the method ``loss(*inputs, target)``, and return its name."""
    if hasattr(net, "loss"):
        raise OptionError(
            f"loss= is a function, which would be {type(net).__name__}.loss(), and there is one already. Write "
            "loss='loss', or the name of another method."
        )

    def loss(self: nn.Module, *inputs: Any, **options: Any) -> torch.Tensor:
        return function(self(*inputs[:-1], **options), inputs[-1])

    vars(net)["loss"] = MethodType(loss, net)
    return "loss"


def _routings(thing: nn.Module | Optimizer) -> list[PipelineRouting]:
    models = [thing] if isinstance(thing, nn.Module) else current_world().part(WrappedModels).of_optimizer(thing)
    routings = [routing for model in models if isinstance(routing := routing_of(model), PipelineRouting)]
    if isinstance(thing, Optimizer):
        known = {id(parameter) for routing in routings for parameter in routing.model.parameters()}
        for parameter in parameters_of(thing).values():
            if isinstance(parameter, RemoteTensor) and id(parameter) not in known:
                raise ModelError(
                    f"{type(thing).__name__} holds {parameter.source!r}, a parameter of a model under "
                    "strategy='pipeline' whose wrapper is gone, so nobody knows which rank has its numbers and state. "
                    "Keep what wrap_model() has returned as long as the optimizer is in use."
                )
    return routings
