"""The strategy ddp: a process for each device, with torch's DistributedDataParallel.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distwrap.errors import ModelError, OptionError
from distwrap.group.setup import require_group
from distwrap.group.world import World, current_world
from distwrap.model.buffers import Buffers
from distwrap.model.checks.in_sync import ComparedTensor, tensors_of
from distwrap.model.distributed import DistributedModel, ReplicaModel
from distwrap.model.gradients import refuse_unfreezing
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, bind, handle_of, under_ddp
from distwrap.protocols import Algorithm
from distwrap.registry import algorithms
from distwrap.strategies.base import Strategy, Wrapping, take_rank_zero_weights
from distwrap.strategies.single import check_ddp_options, local
from distwrap.versions import DDP_BROADCAST_OPTIONS


class DDPStrategy(Strategy):
    """Strategy in which each process has the same model, and the gradients are averaged during the backward.

    Args:
        backend: the backend of the process group, as ``"gloo"``.
        comm: the algorithm of exchange, if `wrap_model` and `@distributed` name none.
        **ddp_options: options of ``DistributedDataParallel``, as ``static_graph=True``.

    Raises:
        OptionError: DistributedDataParallel has no such option.

    Example:
        >>> DDPStrategy(static_graph=True, backend="gloo")
        DDPStrategy(backend='gloo', static_graph=True)
    """

    def __init__(self, *, backend: str | None = None, comm: str | Algorithm | None = None, **ddp_options: Any) -> None:
        check_ddp_options("DDPStrategy", ddp_options, ("backend", "comm"))
        self.backend, self.comm = backend, None if comm is None else algorithms.make(comm)
        self.ddp_options = ddp_options

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        if world.placement.world_size == 1:
            return local(model, wrapping)
        check_ddp_options("wrap_model()", wrapping.options)
        require_group("wrap_model")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            take_rank_zero_weights(model)
            refuse_unfreezing(model.named_parameters())
            return local(model, wrapping)  # DDP refuses a model with nothing to average
        models = world.part(WrappedModels)
        for other, handle in models.handles.items():
            if unwrap_model(other) is unwrap_model(model):
                handle.end_exchange()
        options = {**self.ddp_options, **wrapping.options}
        if wrapping.device.type != "cpu":
            options = {**self.devices(wrapping), **options}
        buffers = None
        if world.channel is not None and not DDP_BROADCAST_OPTIONS.intersection(options):
            buffers = Buffers(unwrap_model(model), world.placement.rank, world.channel, str(world.count("model")))
        comm = wrapping.comm if wrapping.comm is not None else self.comm
        if comm is not None:
            _refuse_with_comm(model, comm, options)
        kind = self.wrapper(comm)
        wrapped = kind(model, wrapping, buffers, **options)
        if comm is not None:
            models.handles[wrapped].exchange = comm.attach(wrapped, world)
        bind(wrapped, self)
        models.add(wrapped)  # here, since a subclass may wrap it again, as torch.compile does
        return wrapped

    def wrapper(self, comm: Algorithm | None) -> type[DistributedModel]:
        """Return the class to wrap the model in."""
        return DistributedModel if comm is None or comm.same_weights else ReplicaModel

    def devices(self, wrapping: Wrapping) -> dict[str, Any]:
        """Return DDP's ``device_ids``."""
        return {"device_ids": [wrapping.device.index]}

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        for wrapped in current_world().part(WrappedModels):
            ddp = under_ddp(wrapped)  # also torch's own, which a subclass may return
            if ddp is not None and unwrap_model(ddp) is unwrap_model(model):
                ddp.require_backward_grad_sync = on

    def held(self, model: nn.Module) -> Iterable[ComparedTensor]:
        return tensors_of(model)

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        for wrapped in current_world().part(WrappedModels).of_optimizer(optimizer):
            if (handle := handle_of(wrapped)) is not None and handle.exchange is not None:
                optimizer = handle.exchange.prepare_optimizer(optimizer)
        return optimizer


def _refuse_with_comm(model: nn.Module, comm: Algorithm, options: dict[str, Any]) -> None:
    if options.get("static_graph") and not comm.same_weights:
        raise OptionError(
            f"static_graph=True lets DDP count on gradients that are exchanged in each step, and "
            f"comm={type(comm).__name__} exchanges weights. Leave one of them out."
        )
    if options.get("process_group") is not None:
        raise OptionError(
            "comm= exchanges between all ranks, so process_group= cannot be given with it. Leave one of them out."
        )
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise ModelError(
                f"comm= takes dense gradients, and {name or 'the model'} is an {type(part).__name__}(sparse=True), "
                f"whose gradients are sparse. Build it with sparse=False, or leave comm out."
            )
