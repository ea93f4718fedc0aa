"""Comparison of each divided block with its gathered self, where a user asks for it by ``check=True``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.devices.kinds import generators_kept
from distwrap.errors import ModelError
from distwrap.strategies import shards
from distwrap.strategies.fsdp.tensor_math import spread
from distwrap.strategies.fsdp.tensor_parallel import TensorParallel
from distwrap.strategies.fsdp.units import alike_blocks

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_NOISE = 0.02  # added to the weights, so that a block that ends in zeros is compared too


class PlanCheck:
    """Comparison of each block at its first forward.

    Args:
        net: the divided model, which FSDP has not divided yet.
        tensor_parallel: its division.
    """

    def __init__(self, net: nn.Module, tensor_parallel: TensorParallel) -> None:
        self._tensor_parallel = tensor_parallel
        names = list(dict.fromkeys(_block_of(net, name) for name in tensor_parallel.names))
        blocks = {name: net.get_submodule(name) for name in names}
        looks = {name: partial(self._compare, name, _twin(block), _placements(block)) for name, block in blocks.items()}
        self._handles = {
            name: block.register_forward_pre_hook(looks[name], with_kwargs=True) for name, block in blocks.items()
        }

    def _compare(
        self, name: str, twin: nn.Module, placements: dict[str, Any], block: nn.Module, args: Any, kwargs: Any
    ) -> None:
        self._handles.pop(name).remove()
        for part, other in zip(block.modules(), twin.modules(), strict=True):
            other.training = part.training
        math, generator = self._tensor_parallel.math, torch.Generator().manual_seed(0)
        numbers, divided = dict[str, Any](), dict[str, Any]()
        for key, parameter in block.named_parameters():
            value = shards.whole(parameter.detach())
            noise = torch.randn(value.shape, generator=generator, device="cpu").to(value) * _NOISE
            numbers[key] = _precise(value + noise)
            divided[key] = spread(numbers[key], math.mesh, placements[key])
        math.is_compared = True
        try:
            expected = self._computed(twin, block, numbers, args, kwargs)
            found = self._computed(twin, block, divided, args, kwargs)
        finally:
            math.is_compared = False
        largest = max(float(value.abs().max()) for value in expected.values() if value.numel())
        for what, wanted in expected.items():
            limit = _TOLERANCE[wanted.dtype] * max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1e-2 * largest)
            is_alike = wanted.shape == found[what].shape and bool(((wanted - found[what]).abs() <= limit).all())
            if not is_alike:
                raise ModelError(
                    f"check=True: {name or 'the model'!r}, a {type(block).__name__} of which plan= divides layers, "
                    f"does not compute what it computes whole: {what} differs. Say 'whole' of its layers in plan=, or "
                    "let it use tensors of the whole, as without to_local() and kernels of other packages."
                )

    def _computed(
        self, twin: nn.Module, block: nn.Module, numbers: dict[str, Any], args: Any, kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return outputs, and gradients of inputs and parameters, by what they are."""
        math = self._tensor_parallel.math
        leaves = {key: value.detach().requires_grad_() for key, value in numbers.items()}
        buffers = {key: _precise(value).clone() for key, value in block.named_buffers()}
        inputs: list[torch.Tensor] = []

        def given(tensor: torch.Tensor) -> torch.Tensor:
            tensor = _precise(tensor.detach()).clone()
            if tensor.is_floating_point():
                inputs.append(tensor.requires_grad_())
            return tensor

        def compute(part: nn.Module) -> dict[str, torch.Tensor]:
            outputs = [each for each in tensors_in(math.whole(part(*args, **kwargs))) if each.is_floating_point()]
            named = {f"output {number}": output for number, output in enumerate(outputs)}
            wanted = {f"the gradient of input {number}": each for number, each in enumerate(inputs)}
            wanted |= {f"the gradient of {key}": leaf for key, leaf in leaves.items()}
            ends = [output for output in outputs if output.requires_grad]
            generator = torch.Generator().manual_seed(1)
            probes = [torch.randn(end.shape, generator=generator, device="cpu").to(end) for end in ends]
            grads = torch.autograd.grad(ends, list(wanted.values()), probes, allow_unused=True) if ends else ()
            pairs = zip(wanted.items(), grads, strict=False)
            return named | {key: leaf * 0 if grad is None else grad for (key, leaf), grad in pairs}

        kind = math.mesh.device_type
        with generators_kept(kind), torch.enable_grad(), torch.autocast(kind, enabled=False):
            args, kwargs = map_tensors(given, (args, kwargs))
            inside = {f"part.{key}": value for key, value in (leaves | buffers).items()}
            found = functional_call(_Computation(twin), inside, (compute,))
        return {key: shards.whole(value.detach()) for key, value in found.items()}


class _Computation(nn.Module):
    """Forward and backward of a block, in both of which its parameters have numbers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        return compute(self.part)


def _block_of(net: nn.Module, name: str) -> str:
    """Return the name of the outermost block in a list of alike ones that holds a layer, or of the module around it."""
    blocks = {id(block) for block in alike_blocks(net)}
    parts = name.split(".")[:-1]
    outer = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return next((each for each in outer if id(net.get_submodule(each)) in blocks), ".".join(parts))


def _placements(block: Any) -> dict[str, Any]:
    return {key: parameter.placements[0] for key, parameter in block.named_parameters()}


def _twin(block: nn.Module) -> nn.Module:
    """Return a copy of a block whose parameters have no numbers."""
    memo: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device="meta"), each.requires_grad)
        for each in block.parameters()
    }
    return copy.deepcopy(block, memo)


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
