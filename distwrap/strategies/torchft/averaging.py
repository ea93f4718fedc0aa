"""Averages of gradients over the members, in buckets that are the same on a rank that has just come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from distwrap._internals.torch import after_backward
from distwrap.errors import ModelError
from distwrap.group.world import RunPart, World
from distwrap.strategies.optimizer_share import refuse_sparse
from distwrap.strategies.torchft.members import TorchFTMembers
from distwrap.strategies.torchft.state import running_statistics

T = TypeVar("T", bound=torch.Tensor)

_BUCKET_BYTES = 25 * 2**20  # as in DDP


class Averaging:
    """Averages of one model's gradients, at the end of each backward that exchanges them.

    Args:
        model: the trained model; it is not kept alive.
        members: the members over which gradients are averaged.

    Attributes:
        is_on: whether the next backward averages; false within a window of `accumulate`.
    """

    def __init__(self, model: nn.Module, members: TorchFTMembers) -> None:
        self.is_on = True
        self._members, self._model = members, ref(model)
        parameters = [each for each in model.parameters() if each.requires_grad]
        refuse_sparse(model, "max_lost=")
        self._trained = {id(each) for each in parameters}
        self._buckets = [[ref(each) for each in bucket] for bucket in in_buckets(parameters)]
        self._is_queued = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, _: torch.Tensor) -> None:
        if self.is_on and not self._is_queued:
            self._is_queued = True
            after_backward(self._average)

    def _refuse_unfrozen(self) -> None:
        model = self._model()
        for name, parameter in model.named_parameters() if model is not None else ():
            if parameter.requires_grad and id(parameter) not in self._trained:
                raise ModelError(
                    f"{name} was made trainable after wrap_model(), so that its gradient is not averaged. Set "
                    "requires_grad before wrap_model()."
                )

    @torch.no_grad()
    def _average(self) -> None:
        self._is_queued = False
        self._refuse_unfrozen()
        self._members.begin_exchange()
        for bucket in self._buckets:
            parameters = [parameter for each in bucket if (parameter := each()) is not None]
            used = torch.tensor([float(each.grad is not None) for each in parameters])
            flat = torch.cat([used.to(parameters[0]), *(_flat_gradient(each) for each in parameters)])
            self._members.quorum.mean(flat)
            used, start = flat[: len(parameters)], len(parameters)
            for parameter, share in zip(parameters, used.tolist(), strict=True):
                part = flat[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
                if share == 0:
                    continue  # no rank used it
                if parameter.grad is None:
                    parameter.grad = part.clone()
                else:
                    parameter.grad.copy_(part)
        model = self._model()
        for together in in_buckets(running_statistics(model) if model is not None else []):
            flat = self._members.quorum.of_first(torch.cat([each.reshape(-1) for each in together]))
            for buffer, values in zip(together, flat.split([each.numel() for each in together]), strict=True):  # type: ignore[no-untyped-call]
                buffer.copy_(values.view_as(buffer))


class Averagings(RunPart):
    """Averages of all models of a run."""

    def __init__(self, world: World) -> None:
        self.of: WeakKeyDictionary[nn.Module, Averaging] = WeakKeyDictionary()


def in_buckets(parameters: Sequence[T]) -> Iterable[list[T]]:
    """Divide tensors into buckets of one type and device, starting with the last tensors.

    Example:
        >>> [len(bucket) for bucket in in_buckets([nn.Parameter(torch.zeros(4 * 2**20)) for _ in range(3)])]
        [2, 1]
    """
    bucket: list[T] = []
    size = 0
    for parameter in reversed(parameters):
        unlike = bucket and (bucket[0].dtype, bucket[0].device) != (parameter.dtype, parameter.device)
        if unlike or size > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


def _flat_gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter).reshape(-1)
    return parameter.grad.reshape(-1)
