"""The wrapper of a divided model: its forward and its methods gather what they use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distwrap._internals.torch_sharding import begin_fsdp_forward, end_fsdp_forward, leave_fsdp_forward
from distwrap._internals.torch_tree import tensors_in
from distwrap.errors import ModelError
from distwrap.model.buffers import Buffers
from distwrap.model.forward_routing import ForwardMethods, MethodCall, Routing
from distwrap.model.model_first import ModelFirst
from distwrap.precision import InPrecision
from distwrap.strategies import shards
from distwrap.strategies.alignment import Alignment
from distwrap.strategies.fsdp.tensor_parallel import TensorParallel


class FSDPRouting(Routing):
    """Forward of a divided model, in which all ranks take part, with gradients or without.

    Attributes:
        buffers: by which the ranks take over rank 0's when training pauses.
        give_back: makes the user's module what it was, with the numbers of a full state.
        tensor_parallel: how its blocks are cut, where they are.
    """

    give_back: Callable[[dict[str, torch.Tensor]], None]
    tensor_parallel: TensorParallel | None = None

    def __init__(
        self, module: nn.Module, in_precision: InPrecision, forward_methods: ForwardMethods, buffers: Buffers | None
    ) -> None:
        super().__init__(module, in_precision, forward_methods)
        self.buffers = buffers
        self.alignment = Alignment(class_of(self.model))
        self.run = in_precision(self._everywhere)

    def _everywhere(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        self._count()
        try:
            with self._running():
                return self._differentiated_once(self.module(*args, **kwargs))
        except Exception:
            leave_fsdp_forward(self.model)
            raise

    def _running(self) -> AbstractContextManager[object]:
        return nullcontext() if self.tensor_parallel is None else self.tensor_parallel.running

    def _count(self) -> None:
        self.alignment.forward()
        if self.buffers is not None and self.model.training:
            self.buffers.forwards += 1

    def _begin(self, call: MethodCall) -> bool:
        super()._begin(call)
        self._count()
        begin_fsdp_forward(self.model)
        call.inside.enter_context(self._running())
        call.inside.push(self._after_failure)
        return False

    def _end(self, output: Any, call: MethodCall) -> Any:
        if call.begun:
            output = self._differentiated_once(end_fsdp_forward(self.model, output))
        return super()._end(output, call)

    def _differentiated_once(self, output: Any) -> Any:
        """Refuse a backward through an output that is to be differentiated itself."""
        if torch.is_grad_enabled() and isinstance(self.model, FSDPModule):
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]
        return output

    def _after_failure(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            leave_fsdp_forward(self.model)


def _refuse_graph(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise ModelError(
            "a backward with create_graph=True through a model that is divided: its weights are let go of in the first "
            "backward, and the second one needs them. Use strategy='ddp', 'zero1' or 'tp' for a gradient penalty."
        )


class DividedModel(ModelFirst):
    """A model of which each rank holds a share of every weight, as a ``DTensor``; a real ``FSDPModule`` is inside."""

    def train(self, mode: bool = True) -> Any:
        """Set the training flag; when training pauses, take over rank 0's buffers."""
        pauses = self.training and not mode
        super().train(mode)
        if pauses and self._distwrap.buffers is not None:
            self._distwrap.buffers.pause()
        return self

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights saved with or without a wrapper, whole or divided."""
        net = self._distwrap.model
        return net.load_state_dict(shards.divided_state(net, state_dict), *args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for parameter in self._distwrap.model.parameters():
            before = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise ModelError(
                    f"a divided model cannot be changed to {after.dtype} on {after.device}: its shards would no longer "
                    f"fit together. Do it before wrap_model(), or say wrap_model(precision=)."
                )
            break
        return super()._apply(fn, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy(self)

    def __copy__(self) -> NoReturn:
        refuse_copy(self)

    def __reduce__(self) -> NoReturn:
        refuse_copy(self)


def class_of(model: nn.Module) -> str:
    """Return the name of the user's class of a divided model, whose own FSDP has put in front."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def refuse_copy(model: ModelFirst) -> NoReturn:
    """Refuse to copy or pickle a model of which each rank has a share.

    Raises:
        ModelError: says what to do instead.
    """
    raise ModelError(
        f"{class_of(model._distwrap.model)} is divided, and can be neither copied nor pickled. "
        f"distwrap.save({{'model': model}}, path) writes all of it; load that into a plain model."
    )
