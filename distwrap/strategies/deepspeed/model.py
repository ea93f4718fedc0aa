"""The wrapper of a model under DeepSpeed, whose forwards with gradients run through the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_calls import pre_hooks_of, run_new_pre_hooks
from distwrap._internals.torch_tree import tensors_in
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.model.buffers import Buffers
from distwrap.model.forward_routing import ForwardMethods, MethodCall, Routing, has_gradient
from distwrap.model.proxy import UncopiedModel
from distwrap.precision import InPrecision
from distwrap.strategies.deepspeed.engine import ModelEngine
from distwrap.strategies.deepspeed.state import full_weights, load_weights
from distwrap.strategies.rendezvous import Rendezvous


class EngineRouting(Routing):
    """Forward of a model that DeepSpeed trains.

    Args:
        module: the user's model.
        in_precision: the precision and device of the computation.
        forward_methods: the methods that may run a forward.
        buffers: the buffers that ranks take over from rank 0 when training pauses.
        make_engine: makes the engine at the first forward that trains, or returns ``None`` without an optimizer.
        divides_weights: whether each rank has only a share of the weights.

    Attributes:
        engine: the engine of the model, once it exists.
        alignment: the forwards in which all ranks take part, if weights are divided.
    """

    def __init__(
        self,
        module: nn.Module,
        in_precision: InPrecision,
        forward_methods: ForwardMethods,
        buffers: Buffers | None,
        make_engine: Callable[[], ModelEngine | None],
        *,
        divides_weights: bool,
    ) -> None:
        super().__init__(module, in_precision, forward_methods)
        self.buffers, self._make_engine, self.divides_weights = buffers, make_engine, divides_weights
        self.engine: ModelEngine | None = None
        self.alignment = Rendezvous(type(self.model).__name__) if divides_weights else None
        self.forward = in_precision(self._through_engine)

    def _through_engine(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        self._count()
        return self._out(self.module(*args, **kwargs))

    def _count(self) -> None:
        if in_backward():
            return  # a recomputation
        if self.engine is None and torch.is_grad_enabled():
            self.make_engine()
        if self.alignment is not None and self.engine is not None:
            self.alignment.forward()
        if self.buffers is not None and self.model.training:
            self.buffers.count_forward()

    def make_engine(self) -> ModelEngine | None:
        """Return the model's engine, which is made if possible; every rank calls it."""
        if self.engine is None:
            self.engine = self._make_engine()
        return self.engine

    def _begin(self, call: MethodCall) -> bool:
        super()._begin(call)
        before = pre_hooks_of(call.module)
        self._count()
        call.args = run_new_pre_hooks(call.module, before, call.args)  # an engine was made within the module's call
        return False

    def _end(self, output: Any, call: MethodCall) -> Any:
        return super()._end(self._out(output) if call.begun or has_gradient(output) else output, call)

    def _out(self, output: Any) -> Any:
        if not has_gradient(output):
            return output
        if self.engine is not None:
            return self.engine.watch(output)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._refuse_backward)  # type: ignore[no-untyped-call]
        return output

    def _refuse_backward(self, gradient: torch.Tensor) -> NoReturn:
        raise ModelError(
            f"rank {current_world().placement.rank}: {type(self.model).__name__} had no optimizer at its "
            "forward, and under strategy='deepspeed' an engine needs both. Make the optimizer before the first "
            "forward that trains."
        )

    def refuse_copy(self) -> NoReturn:
        """Refuse to copy or pickle the model.

        Raises:
            ModelError: always; the message says what to do instead.
        """
        raise ModelError(
            f"{type(self.model).__name__} belongs to an engine of DeepSpeed, and can be neither copied nor "
            f"pickled. distwrap.save({{'model': model}}, path) writes all of it; load that into a plain model."
        )


class EngineModel(UncopiedModel):
    """Model that DeepSpeed trains, which behaves like the user's own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict, with all weights; if they are divided, every rank calls it."""
        routing = self._distwrap_routing
        if routing.divides_weights and routing.engine is not None:
            routing.engine.take_over_weights()
            return full_weights(routing.model, everywhere=True)
        found: dict[str, Any] = routing.model.state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights saved with or without a wrapper."""
        return load_weights(self._distwrap_routing.model, state_dict, self._distwrap_routing.engine)
