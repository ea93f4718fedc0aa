"""The strategies zero1 and zero2: DDP with optimizer state, and in stage 2 gradients, divided over the ranks.

Source: https://arxiv.org/abs/1910.02054
"""

from collections.abc import Iterable
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.comm.base import Algorithm
from distwrap.devices.memory import return_freed_memory
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import World, current_world
from distwrap.model.distributed import AveragingModel, DistributedModel
from distwrap.model.in_sync import Held, tensors_of
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, gradients_of, parameters_of
from distwrap.options import Options
from distwrap.strategies.base import Wrapping
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.gradient_share import GradientShares
from distwrap.strategies.optimizer_share import OptimizerShare, OptimizerShares
from distwrap.strategies.optimizer_state import full_state, own_state, parts_to_load, state_in_parts


class ZeroStrategy(DDPStrategy):
    """Strategy with the same model in each process, and the optimizers' states divided over the processes.

    Args:
        stage: 1 divides the states of optimizers; 2 also frees averaged gradients on ranks that do not step them.
        backend: the backend of the process group, as ``"gloo"``.
        **ddp_options: options of ``DistributedDataParallel``, as ``static_graph=True``.

    Raises:
        OptionError: DistributedDataParallel has no such option, or divided optimizers do not allow it.

    Example:
        >>> ZeroStrategy(stage=1)
        ZeroStrategy(backend=None, comm=None, ddp_options={}, stage=1)
    """

    shards = True
    steps_parameters = True

    def __init__(self, *, stage: Literal[1, 2] = 1, backend: str | None = None, **ddp_options: Any) -> None:
        if stage not in (1, 2):
            raise OptionError(f"ZeroStrategy(stage={stage!r}): it is 1 or 2; stage 3 is strategy='fsdp'.")
        super().__init__(backend=backend, **ddp_options)
        self.stage = stage
        self._refuse(ddp_options)
        self._refuse_comm(self.comm)

    def check(self, run: Options) -> None:
        self._refuse_comm(run.comm)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        self._refuse(wrapping.options)
        self._refuse_comm(wrapping.comm)
        wrapped = super().prepare_model(model, world, wrapping)
        if isinstance(wrapped, DistributedModel):
            if self.stage == 2:
                return_freed_memory(world.device)
                world.part(GradientShares).divide(wrapped)
            world.part(OptimizerShares).adopt_by(_divide)
        return wrapped

    def wrapper(self, comm: Algorithm | None) -> type[DistributedModel]:
        return _ZeroModel

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        optimizer = super().prepare_optimizer(optimizer, model)
        world = current_world()
        if world.placement.world_size > 1 and any(True for _ in _divided(optimizer)):
            world.part(OptimizerShares).divide(optimizer, _divided)
        return optimizer

    def gradients(self, model: nn.Module) -> list[torch.Tensor]:
        current_world().part(GradientShares).hand_out(model)
        return super().gradients(model)

    def clip(
        self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], max_norm: float
    ) -> torch.Tensor | float | None:
        world = current_world()
        if self.stage == 1 or world.placement.world_size == 1:
            return super().clip(optimizer, parameters, max_norm)
        return world.part(GradientShares).clip(parameters, max_norm)

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        return self.stage == 2 and current_world().part(GradientShares).has_overflowed(optimizer)

    def give_back(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        if isinstance(original, Optimizer):
            current_world().part(OptimizerShares).release(original)
        super().give_back(original, prepared, state)

    def held(self, model: nn.Module) -> Iterable[Held]:
        options = current_world().part(OptimizerShares).options(model)
        return [*tensors_of(model), *(Held(name, "", value) for name, value in options)]

    def is_divided(self, thing: nn.Module | Optimizer) -> bool:
        return _share_of(thing) is not None

    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        share = _share_of(thing)
        if share is None:
            return super().state(thing, everywhere=everywhere)
        assert isinstance(thing, Optimizer)
        return full_state(*own_state(thing, share), everywhere=everywhere)

    def parts(self, thing: nn.Module | Optimizer) -> dict[str, Any] | None:
        share = _share_of(thing)
        if share is None:
            return None
        assert isinstance(thing, Optimizer)
        return state_in_parts(*own_state(thing, share))

    def parts_to_load(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        share = _share_of(thing)
        return None if share is None or not isinstance(thing, Optimizer) else parts_to_load(thing, share, state)

    def _refuse(self, options: dict[str, Any]) -> None:
        """Refuse options of DDP that do not allow a division over all ranks."""
        if options.get("process_group") is not None:
            raise OptionError(
                f"strategy='zero{self.stage}' divides over all ranks, so process_group= cannot be given. Leave it out."
            )
        if self.stage == 2 and options.get("gradient_as_bucket_view"):
            raise OptionError(
                "strategy='zero2' frees gradients, which gradient_as_bucket_view=True would keep in DDP's buckets. "
                "Leave it out, or use strategy='zero1'."
            )

    def _refuse_comm(self, comm: Algorithm | None) -> None:
        """Refuse algorithms that need all gradients, or the whole optimizer state, on each rank."""
        if comm is not None and (self.stage == 2 or comm.needs_optimizer_state):
            what, way = "the gradients", "strategy='zero1' or 'ddp'"
            if comm.needs_optimizer_state:
                what, way = "the optimizer's state", "strategy='ddp'"
            raise OptionError(
                f"strategy='zero{self.stage}' does not go with comm={type(comm).__name__}, which needs all of {what} "
                f"on each rank. Use {way} with it."
            )


class _WithoutJoin(AveragingModel):
    """DDP inside a model whose ranks also exchange weights after each step, which ``Join`` does not support."""

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse torch's ``Join``, in which a rank without data would miss the others' steps."""
        raise ModelError(
            f"rank {current_world().placement.rank}: torch's Join does not go with strategy='zero1' or 'zero2', where "
            f"every rank takes part in every step of the optimizer. Loop over distwrap.lockstep(loader) instead."
        )


class _ZeroModel(DistributedModel):
    """Wrapped model whose optimizers are divided."""

    _distwrap_ddp = _WithoutJoin


def _divide(optimizer: Optimizer) -> None:
    strategy = bound_strategy(optimizer)
    if isinstance(strategy, ZeroStrategy):
        strategy.prepare_optimizer(optimizer, None)


def _divided(optimizer: Optimizer) -> dict[nn.Parameter, int | None]:
    """Return an optimizer's parameters whose gradients all ranks have averaged under this strategy."""
    world = current_world()
    models, owners = world.part(WrappedModels), world.part(GradientShares).owners()
    averaged = {
        id(parameter)
        for model in models.of_optimizer(optimizer)
        if isinstance(bound_strategy(model), ZeroStrategy) and (gradients := gradients_of(model)) is not None
        for parameter in gradients.averaged()
    }
    held = parameters_of(optimizer)
    return {parameter: owners.get(parameter) for key, parameter in held.items() if key in averaged}


def _share_of(thing: Any) -> OptimizerShare | None:
    return current_world().part(OptimizerShares).of(thing) if isinstance(thing, Optimizer) else None
