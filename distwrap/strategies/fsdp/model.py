"""The wrapper of a divided model, whose forward and methods gather the weights that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_fsdp import GatheredUnits
from distwrap._internals.torch_sharding import begin_fsdp_forward, end_fsdp_forward
from distwrap.errors import ModelError
from distwrap.model.buffers import Buffers
from distwrap.model.forward_routing import ForwardMethods, MethodCall, Routing
from distwrap.model.wrapped_models import UncopiedModel
from distwrap.precision import InPrecision
from distwrap.strategies import shards
from distwrap.strategies.fsdp.gathered import Gathered
from distwrap.strategies.fsdp.tensor_parallel import TensorParallel
from distwrap.strategies.rendezvous import Rendezvous, SameBatch

_OF_PARAMETERS = {"zero_grad", "requires_grad_", "parameters", "named_parameters"}


class FSDPRouting(Routing):
    """Forward of a divided model, in which all ranks take part, with or without gradients.

    Attributes:
        buffers: the buffers that ranks take over from rank 0 when training pauses.
        gathered: the gathered weights of the model.
        tensor_parallel: the division of its blocks, if they are divided.
    """

    tensor_parallel: TensorParallel | None = None

    def __init__(
        self,
        module: nn.Module,
        in_precision: InPrecision,
        forward_methods: ForwardMethods,
        buffers: Buffers | None,
        gathered: Gathered,
    ) -> None:
        super().__init__(module, in_precision, forward_methods)
        self.buffers, self.gathered = buffers, gathered
        self.units = GatheredUnits(
            self.model,
            lambda unit, gradients: self.alignment.exchange(unit, gradients),
            self._refuse_replaced,
            gathered.refuse_graph,
        )
        gathered.units = self.units
        self.alignment = Rendezvous(class_of(self.model), units=self.units.names)
        self.forward = in_precision(self._everywhere)

    def cut(self, tensor_parallel: TensorParallel, group: dist.ProcessGroup, *, is_divided: bool) -> None:
        """Note that blocks are divided over a group whose ranks run the same batch through the same blocks.

        Args:
            tensor_parallel: the division.
            group: the ranks of the group.
            is_divided: whether FSDP also divides the model, so that its exchanges are already compared.
        """
        self.tensor_parallel = tensor_parallel
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]
        ranks = "the ranks of a tensor-parallel group"
        batch = SameBatch(group, self._in_precision.device, ranks, draws_alike=False)
        tensor_parallel.watch("", lambda given: batch.check("forward", given))
        if not is_divided:
            blocks = [[name] for name in tensor_parallel.names]
            order = self.alignment = Rendezvous(class_of(self.model), units=blocks, does="runs")
            for number, name in enumerate(tensor_parallel.names):
                tensor_parallel.watch(name, partial(lambda number, _: order.exchange(number, -1), number))

    def _everywhere(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        self._count()
        try:
            with self._running():
                output = self.module(*args, **kwargs)
        except Exception:
            self._start_afresh()
            raise
        self._rest()
        return output

    def _running(self) -> AbstractContextManager[object]:
        return nullcontext() if self.tensor_parallel is None else self.tensor_parallel.running()

    def _count(self) -> None:
        if in_backward():  # a recomputation
            return
        if self.units.begin():
            self.alignment.forget()
        if not self.alignment.forwards:  # before FSDP first reads them
            for unit in range(len(self.units.names)):
                self._refuse_replaced(unit)
        self.alignment.forward(self.units.average)
        self.gathered.begin()
        if self.buffers is not None and self.model.training:
            self.buffers.count_forward()

    def _begin(self, call: MethodCall) -> bool:
        super()._begin(call)
        self._count()
        call.inside.push(self._after_failure)
        begin_fsdp_forward(self.model)
        call.inside.enter_context(self._running())
        return False

    def _end(self, output: Any, call: MethodCall) -> Any:
        if self.tensor_parallel is not None:
            output = self.tensor_parallel.math.whole(output)
        if call.begun:
            self.gathered.after_forward(self.model, (), output)
            output = end_fsdp_forward(self.model, output)
            self._rest()
        return super()._end(output, call)

    def _refuse_replaced(self, unit: int) -> None:
        """Refuse to gather the weights of a unit if its modules have other tensors instead.

        Raises:
            ModelError: a parameter was replaced; the message names it.
        """
        name = self.units.replaced(unit)
        if name:
            raise ModelError(
                f"{name!r} of {class_of(self.model)}, which is divided, is no longer the parameter that "
                "wrap_model() has made, as in torch.func.functional_call(), or after a parametrization, "
                "pruning, an assignment or within gathered_weights(). A forward gathers its own weights, and "
                "would not use the replacement. Change the model before wrap_model(), or only the numbers, by "
                "parameter.copy_(…) or within gathered_weights(); or use strategy='ddp'."
            )

    def _rest(self) -> None:
        if not in_backward():
            self.units.end()

    def _after_failure(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._start_afresh()

    def _start_afresh(self) -> None:
        if not in_backward():
            self.units.start_afresh()
            self.alignment.forget()

    def exchanges(self, nodes: Iterable[Any]) -> bool:
        """Return whether any of these graph nodes accumulates the gradient of a gathered weight."""
        return self.gathered.are_leaves_of(nodes)

    def settle(self) -> None:
        """Put the shards back on the modules if an exception has ended a backward."""
        if self.units.is_broken():
            self.units.begin()
            self.alignment.forget()

    def refuse_copy(self) -> NoReturn:
        """Refuse to copy or pickle a model of which each rank has a share.

        Raises:
            ModelError: always; the message says what to do instead.
        """
        raise ModelError(
            f"{class_of(self.model)} is divided, and can be neither copied nor pickled. "
            f"distwrap.save({{'model': model}}, path) writes all of it; load that into a plain model. For a "
            "second model with these weights, such as a moving average, copy the plain model and wrap both."
        )


class DividedModel(UncopiedModel):
    """Model of which each rank holds a share of every weight as a ``DTensor``, around a real ``FSDPModule``."""

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PARAMETERS:
            self._distwrap_routing.settle()
        return super().__getattr__(name)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights with or without a wrapper's prefix, whole or divided; ``assign=True`` also copies."""
        net, strict = self._distwrap_routing.model, kwargs.get("strict", next(iter(args), True))
        return net.load_state_dict(shards.divided_state(net, state_dict), strict)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for parameter in self._distwrap_routing.model.parameters():
            before = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise ModelError(
                    f"a divided model cannot be changed to {after.dtype} on {after.device}: its shards would "
                    "no longer fit together. Do it before wrap_model(), or use wrap_model(precision=…)."
                )
            break
        return super()._apply(fn, *args, **kwargs)


def class_of(model: nn.Module) -> str:
    """Return the name of the user's class of a divided model, without the class that FSDP puts in front."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
