"""`wrap_model`, `wrap_optimizer` and `local_model`, which pass the user's objects to the strategy of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap.errors import ModelError, OptionError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World, current_world, say_once
from distwrap.model.batch_norm import sync_batch_norm
from distwrap.model.checks.drift import Drift
from distwrap.model.checks.optimizers import Optimizers
from distwrap.model.checks.same_inputs import SameInputs
from distwrap.model.checks.unwrapped import Unwrapped
from distwrap.model.distributed import DistributedModel, ReplicaModel
from distwrap.model.forward_routing import ForwardMethods, check_forward_methods
from distwrap.model.transparent import WRAPPERS, mark_users_model, unwrap_model
from distwrap.model.wrapped_models import WrappedModels, bind, bound_strategy, handle_of, parameters_of, strategy_of
from distwrap.precision import InPrecision, LossScaling
from distwrap.protocols import Algorithm, Precision, Strategy, Wrapping
from distwrap.registry import AlgorithmName, PrecisionName, StrategyName, algorithms, strategies
from distwrap.strategies.optimizer_scope import Scope, say_scope
from distwrap.strategies.single import local, on_device
from distwrap.supervision.activity import Activity

Model = TypeVar("Model", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def wrap_model(
    model: Model,
    *,
    strategy: StrategyName | str | Strategy | None = None,
    device: torch.device | str | None = None,
    precision: PrecisionName | str | Precision | None = None,
    sync_batchnorm: bool = False,
    forward_methods: ForwardMethods = "auto",
    comm: AlgorithmName | str | Algorithm | None = None,
    same_inputs: bool = False,
    **ddp_kwargs: Any,
) -> Model:
    """Prepare a model for distributed training; in a single process on the CPU in float32 it only gets a thin wrapper.

    The result is an ``nn.Module`` (under DDP a ``DistributedDataParallel``) that behaves like the user's own: it has
    its attributes, methods and parameter names, a ``state_dict`` without prefix, and a ``load_state_dict`` that takes
    keys with and without prefix. It is also an instance of the user's class, and ``model.module`` is the user's model,
    with one rank as with several. A method that runs a forward, as ``model.loss(x)``, trains like ``model(x)``. With
    gradients switched off the bare model runs, so that ranks may evaluate independently; ``eval()`` takes over rank 0's
    buffers, such as BatchNorm's statistics. The optimizer may be made before or after.

    Args:
        model: the user's model.
        strategy: a strategy for this model, instead of the run's.
        device: where to put it; by default this rank's device.
        precision: ``"32"``, ``"bf16"``, ``"fp16"`` or ``"bf16-true"``, instead of the run's. The forward runs under
            autocast, or with weights and inputs in bfloat16, and returns its floating-point outputs in float32.
        sync_batchnorm: let BatchNorm take its statistics from the batches of all ranks; by torch's SyncBatchNorm, or on
            CPUs by one of ours that computes the same.
        forward_methods: ``"auto"``: a method begins a forward when it calls a module inside of the model. Or a list of
            the methods that may; all others then run on the bare model.
        comm: how the ranks exchange what they have learnt, instead of the run's algorithm: a name, as ``"bytegrad"``, a
            name with options, as ``"local_sgd(sync_every=16)"``, or an object from `distwrap.comm`.
        same_inputs: whether all ranks train the model on the same inputs on purpose; otherwise that is an error.
        **ddp_kwargs: options of ``DistributedDataParallel``, as ``find_unused_parameters=True``.

    Returns:
        A model that type checkers take for one of the user's class.

    Raises:
        ModelError: `model` is not a module, or is wrapped already; it has no method of a name in `forward_methods`; its
            batch norms cannot be synchronised here; or the strategy returns no model. Raised later for gradients that
            would not be averaged, for parameters without a gradient, for parameters that were moved, frozen or unfrozen
            after wrapping, and for ranks that train apart.
        OptionError: the strategy, precision or algorithm is unknown, or the strategy refuses the run's options.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> model = wrap_model(net)
        >>> sorted(model.state_dict()), model.module is net
        (['bias', 'weight'], True)
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"wrap_model() takes an nn.Module, not a {type(model).__qualname__}.")
    if isinstance(model, WRAPPERS):
        raise ModelError(
            f"wrap_model() got a {type(unwrap_model(model)).__name__} that is in a {_wrapper(model)} already: wrap a "
            f"model once, or hand over unwrap_model(model)."
        )
    world = current_world()
    world.part(Activity).record("wrap_model")
    chosen = strategies.make(strategy) if strategy is not None else world.strategy
    algorithm = algorithms.make(comm) if comm is not None else world.options.comm
    where = torch.device(device) if device is not None else world.device
    if sync_batchnorm and (where.type != "cpu" or world.placement.world_size > 1):
        model = sync_batch_norm(model, where)
    check_forward_methods(model, forward_methods)
    _refuse_divided(model, world)
    world.part(Unwrapped).local.discard(model)
    says_more = any(each is not None for each in (strategy, comm, precision))
    precision = precision if precision is not None else world.options.precision
    run = replace(world.options, strategy=chosen, precision=precision, comm=algorithm)
    if says_more:
        chosen.check(run)
    if strategy is not None and chosen.formerly:
        say_once(f"formerly {chosen.formerly}", f"strategy={chosen.formerly!r} is here {chosen!r}")
    chosen = chosen.choose(model, run, where)
    in_precision = InPrecision(precision, where, owns_scale=chosen.owns_scale)
    wrapping = Wrapping(where, in_precision, forward_methods, algorithm, dict(ddp_kwargs))
    if not chosen.places_model:
        model = cast("Model", in_precision.precision.weights(on_device(model, where)))
    models = world.part(WrappedModels)
    last = models.last
    with world.part(Activity).exchanging_nothing():
        wrapped = chosen.prepare_model(model, world, wrapping)
    if not isinstance(wrapped, nn.Module):
        raise _of_no_use(wrapped, chosen, "prepare_model", "the module")
    world.part(LossScaling).add(model, in_precision.make_scaler())
    if type(in_precision.precision).after_step is not Precision.after_step:
        world.part(StepHooks).add(precision, in_precision.precision, model)
    bind(wrapped, chosen, own=wrapped is model)
    mark_users_model(wrapped, model)
    if chosen.shards or any(parameter.requires_grad for parameter in wrapped.parameters()):
        if models.last is last:  # unless the strategy has added it
            models.add(wrapped)
        if world.tells_others:
            _watch_for_drift(models.last, world)
            if not same_inputs and (handle := handle_of(wrapped)) is not None:
                world.part(SameInputs).watch(handle.routing)
        elif where.type != "cpu":
            world.part(Optimizers)  # an earlier optimizer may hold parameters from before a .to()
    return cast("Model", wrapped)


def wrap_optimizer(
    optimizer: OptimizerT, model: nn.Module | None = None, *, scope: Scope | None = None, apart: bool = False
) -> OptimizerT:
    """Prepare an optimizer: return it as it is, unless the model's ``comm=`` works through it, as ``"qadam"`` does.

    Args:
        optimizer: an optimizer of the parameters of a wrapped model.
        model: that model; by default the model that has the optimizer's parameters.
        scope: what its step of one number looks at, for strategies whose ranks step only some of the parameters:
            ``"element"``, the number alone, as Adam's; ``"parameter"``, its whole parameter, as a norm of each weight;
            or ``"all"``, as a norm of all gradients, or where it draws random numbers. torch's own are known.
        apart: whether its parameters are meant to differ between ranks, as each rank's own noise or probe. The
            optimizer then comes back as it is, and its tensors are not compared with those of other ranks.

    Raises:
        OptionError: it is not an optimizer, holds parameters of a wrapped model although `apart` is set, or `scope` is
            none of the words.
        ModelError: the strategy cannot step a part of its parameters.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> wrap_optimizer(optimizer) is optimizer
        True
    """
    if not isinstance(optimizer, Optimizer):
        raise OptionError(f"wrap_optimizer() takes a torch optimizer, not a {type(optimizer).__qualname__}.")
    if scope is not None:
        say_scope(optimizer, scope)
    world = current_world()
    if apart:
        if world.part(WrappedModels).of_optimizer(optimizer):
            raise OptionError(
                f"wrap_optimizer(apart=True): this {type(optimizer).__name__} holds parameters of a wrapped "
                "model, which all ranks train together. Make another optimizer for the parameters that should "
                "differ between ranks."
            )
        world.part(Unwrapped).per_rank.add(optimizer)
        return optimizer
    strategy = strategy_of(optimizer if model is None else model, world)
    prepared = strategy.prepare_optimizer(optimizer, model)
    if not callable(getattr(prepared, "step", None)):  # an engine's may not be a torch Optimizer
        raise _of_no_use(prepared, strategy, "prepare_optimizer", "the optimizer")
    bind(prepared, strategy)
    return cast("OptimizerT", prepared)


def local_model(model: Model, *, device: torch.device | str | None = None) -> Model:
    """Prepare a model that each rank trains for itself: its gradients are not averaged, nor its weights compared.

    Use it for a model that is meant to differ between ranks, as a probe, a player or a member of an ensemble: the
    optimizer of any other model that is not wrapped is refused at its first step. A model that is only evaluated does
    not need it.

    Args:
        model: the user's model.
        device: where to put it; by default this rank's device.

    Returns:
        The model, on the device; its forward moves its inputs there. It computes in its own precision, not in the
        run's.

    Raises:
        ModelError: `model` is not a module, or is wrapped already.

    Example:
        >>> probe = local_model(nn.Linear(2, 1))
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"local_model() takes an nn.Module, not a {type(model).__qualname__}.")
    world = current_world()
    if isinstance(model, WRAPPERS) or bound_strategy(model) is not None:
        raise ModelError(
            f"local_model() got a {type(unwrap_model(model)).__name__} that is in a {_wrapper(model)} already, which "
            f"all ranks train together. Give each rank one that was never wrapped."
        )
    where = torch.device(device) if device is not None else world.device
    placed = on_device(model, where)
    world.part(Unwrapped).local.add(placed)
    world.part(LossScaling).add(placed, None)
    if where.type == "cpu":
        return cast("Model", placed)
    return cast("Model", local(placed, Wrapping(where, InPrecision("32", where), "auto", None, {})))


def _wrapper(model: nn.Module) -> str:
    """Return a name for a wrapper, for messages."""
    return type(model).__name__ if type(model).__module__.startswith("torch.") else "wrapper of wrap_model()"


def _of_no_use(result: object, strategy: Strategy, method: str, wanted: str) -> ModelError:
    return ModelError(
        f"{type(strategy).__name__}.{method}() has returned a {type(result).__qualname__}: it must return {wanted} "
        f"that the loop uses."
    )


def _refuse_divided(model: nn.Module, world: World) -> None:
    """Refuse a model with parts or replaced parameters of a model that is already divided."""
    inside = {id(part): name for name, part in model.named_modules()}
    parts = [
        part
        for other in (world.part(WrappedModels) if world.placement.world_size > 1 else ())
        if (strategy := bound_strategy(other)) is not None and strategy.is_divided(other)
        for part in unwrap_model(other).modules()
        if id(part) in inside and any(True for _ in part.parameters())
    ]
    replaced = [name for name, value in model.named_parameters() if type(value).__name__ == "ReplacedParameter"]
    if parts or replaced:
        what = repr(inside[id(parts[0])] or "the model itself") if parts else repr(replaced[0])
        raise ModelError(
            f"rank {world.placement.rank}: wrap_model() got a model in which {what} is a part of a model that "
            f"wrap_model() has divided already. Weights are divided once: wrap one module that has all of them, or "
            f"make a new model."
        )


def _watch_for_drift(model: nn.Module | None, world: World) -> None:
    """Compare a model's weights between ranks from now on, unless its algorithm lets them differ."""
    if model is None:
        return
    world.part(Optimizers)
    strategy = bound_strategy(model)
    if strategy is not None and not strategy.same_weights:
        return
    drift = world.part(Drift)
    if not isinstance(model, DistributedModel):
        drift.watch(model, list(range(world.placement.world_size)), by_steps=True)
    elif not isinstance(model, ReplicaModel):
        handle = world.part(WrappedModels).handles[model]
        ranks = dist.get_process_group_ranks(handle.routing.inner.process_group)
        handle.gradients.watch = drift.watch(model, ranks)


class StepHooks(RunPart):
    """Precisions that act after steps of their models' optimizers."""

    def __init__(self, world: World) -> None:
        self._of_models: WeakKeyDictionary[nn.Module, tuple[object, Precision]] = WeakKeyDictionary()
        world.part(OptimizerSteps).listen(Phase.FINISH, self._after)

    def add(self, given: str | Precision, precision: Precision, model: nn.Module) -> None:
        """Let a precision, `given` as a name or an object, act after each step over a model."""
        self._of_models[model] = (given if isinstance(given, str) else id(given), precision)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held, strategy = parameters_of(optimizer).keys(), bound_strategy(optimizer)
        shards = strategy is not None and strategy.shards  # it may hold other tensors than the model's parameters
        acting = dict(
            chosen
            for model, chosen in self._of_models.items()
            if shards or not held.isdisjoint(map(id, model.parameters()))
        )
        for precision in acting.values():
            precision.after_step(optimizer)
