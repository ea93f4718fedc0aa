"""The strategy zero1: DDP with the optimizer's state divided over the ranks.

Source: https://arxiv.org/abs/1910.02054
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from distwrap.errors import ModelError, OptionError
from distwrap.group.world import World, current_world
from distwrap.model.checks.in_sync import ComparedTensor, tensors_of
from distwrap.model.distributed import AveragingModel, DistributedModel
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, gradients_of, parameters_of
from distwrap.options import Options
from distwrap.protocols import Algorithm
from distwrap.strategies.base import Wrapping
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.optimizer_share import OptimizerShare, OptimizerShares
from distwrap.strategies.optimizer_state import full_state, own_state, parts_to_load, state_in_parts


class ZeroStrategy(DDPStrategy):
    """Strategy with the same model in each process, and the optimizers' states divided over the processes.

    Args:
        backend: the backend of the process group, as ``"gloo"``.
        **ddp_options: options of ``DistributedDataParallel``, as ``static_graph=True``.

    Raises:
        OptionError: DistributedDataParallel has no such option, or divided optimizers do not allow it.

    Example:
        >>> ZeroStrategy()
        ZeroStrategy()
    """

    shards = True
    steps_parameters = True

    def __init__(self, *, backend: str | None = None, **ddp_options: Any) -> None:
        super().__init__(backend=backend, **ddp_options)
        self._refuse(ddp_options)
        self._refuse_comm(self.comm)

    def check(self, run: Options) -> None:
        self._refuse_comm(run.comm)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        self._refuse(wrapping.options)
        self._refuse_comm(wrapping.comm)
        wrapped = super().prepare_model(model, world, wrapping)
        if isinstance(wrapped, DistributedModel):
            world.part(OptimizerShares).adopt_by(_divide)
        return wrapped

    def wrapper(self, comm: Algorithm | None) -> type[DistributedModel]:
        return _ZeroModel

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        optimizer = super().prepare_optimizer(optimizer, model)
        world = current_world()
        if world.placement.world_size > 1 and _divided(optimizer):
            world.part(OptimizerShares).divide(optimizer, _divided)
        return optimizer

    def give_back(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        if isinstance(original, Optimizer):
            current_world().part(OptimizerShares).release(original)
        super().give_back(original, prepared, state)

    def held(self, model: nn.Module) -> Iterable[ComparedTensor]:
        options = current_world().part(OptimizerShares).options(model)
        return [*tensors_of(model), *(ComparedTensor(name, "", value) for name, value in options)]

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
                "strategy='zero1' divides over all ranks, so process_group= cannot be given. Leave it out."
            )

    def _refuse_comm(self, comm: Algorithm | None) -> None:
        """Refuse algorithms that need the whole optimizer state on each rank."""
        if comm is not None and comm.needs_optimizer_state:
            raise OptionError(
                f"strategy='zero1' does not go with comm={type(comm).__name__}, which needs all of the optimizer's "
                "state on each rank. Use strategy='ddp' with it."
            )


class _WithoutJoin(AveragingModel):
    """DDP inside a model whose ranks also exchange weights after each step, which ``Join`` does not support."""

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse torch's ``Join``, in which a rank without data would miss the others' steps."""
        raise ModelError(
            f"rank {current_world().placement.rank}: torch's Join does not go with strategy='zero1', where "
            f"every rank takes part in every step of the optimizer. Loop over distwrap.lockstep(loader) instead."
        )


class _ZeroModel(DistributedModel):
    """Wrapped model whose optimizers are divided."""

    _distwrap_ddp = _WithoutJoin


def _divide(optimizer: Optimizer) -> None:
    strategy = bound_strategy(optimizer)
    if isinstance(strategy, ZeroStrategy):
        strategy.prepare_optimizer(optimizer, None)


def _divided(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters whose gradients all ranks have averaged under this strategy."""
    models = current_world().part(WrappedModels)
    averaged = {
        id(parameter)
        for model in models.of_optimizer(optimizer)
        if isinstance(bound_strategy(model), ZeroStrategy) and (gradients := gradients_of(model)) is not None
        for parameter in gradients.averaged()
    }
    return [parameter for key, parameter in parameters_of(optimizer).items() if key in averaged]


def _share_of(thing: Any) -> OptimizerShare | None:
    return current_world().part(OptimizerShares).of(thing) if isinstance(thing, Optimizer) else None
