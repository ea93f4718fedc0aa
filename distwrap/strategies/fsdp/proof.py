"""Proof that a divided block computes the same outputs and gradients as the whole block."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.devices.kinds import generators_kept
from distwrap.errors import ModelError
from distwrap.group.tensor_exchange import gather_numbers
from distwrap.strategies import shards
from distwrap.strategies.fsdp.pieces import Running
from distwrap.strategies.fsdp.styles import spread, summed_of

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_SMALL = 1e-2  # of the largest gradient: smaller ones may be mere rounding, and are compared with this


class Twins:
    """Two copies of a block without numbers, one whole and one divided, which compute with given numbers.

    Args:
        block: the whole block, before anything was divided.
        cut: divides a block in place.
        mesh: the mesh of the group.
        running: the running forwards of the model.
        dtype: the type in which both compute.
    """

    def __init__(
        self, block: nn.Module, cut: Callable[[nn.Module], object], mesh: DeviceMesh, running: Running, dtype: Any
    ) -> None:
        self.whole, self.cut = _empty(block, dtype), _empty(block, dtype)
        self.mesh, self.running, self.dtype = mesh, running, dtype
        cut(self.cut)

    def difference(
        self, numbers: dict[str, torch.Tensor], args: Any, kwargs: Any
    ) -> tuple[str, list[tuple[str, str]]] | None:
        """Return how the two differ, or an empty text, and the gradients that must be summed over ranks.

        Ranks of the group call it together, with the same arguments, and get the same answer. If the arguments
        overflow, small ones of the same shapes are used. The result is ``None`` if the weights overflow, so that
        nothing can be compared.

        Args:
            numbers: whole parameters and buffers.
            args: arguments of the forward.
            kwargs: keyword arguments of the forward.
        """
        kind = self.mesh.device_type
        with (
            generators_kept(kind),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(kind, enabled=False),
            saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),  # instead of the caller's checkpointing
        ):
            names = [name for name, _ in self.whole.named_parameters()]
            try:
                expected = self._computed(self.whole, [numbers[name] for name in names], numbers, args, kwargs)
                if not _is_finite(expected):
                    args, kwargs = map_tensors(_small, (args, kwargs))
                    expected = self._computed(self.whole, [numbers[name] for name in names], numbers, args, kwargs)
            except Exception as error:  # noqa: BLE001 - the caller tells it
                return f"its forward cannot be computed by itself: {type(error).__name__}: {error}", []
            if not _is_finite(expected):
                return None
            pieces = dict(self.cut.named_parameters())
            own = [spread(numbers[name], self.mesh, pieces[name].placements[0]) for name in names]  # type: ignore[attr-defined]
            try:
                with self.running:
                    found = self._computed(self.cut, own, numbers, args, kwargs)
            except Exception as error:  # noqa: BLE001 - the caller tells it
                return f"its forward raises {type(error).__name__}: {error}", []
        return self._compared(names, own, found, expected)

    def can_be_tried(self, numbers: dict[str, torch.Tensor], args: tuple[torch.Tensor, ...]) -> bool:
        """Return whether the whole block accepts several such arguments, and its output has the first one's shape."""
        if len(args) == 1:
            return True
        names = [name for name, _ in self.whole.named_parameters()]
        try:
            with torch.enable_grad():
                outputs, *_ = self._computed(self.whole, [numbers[name] for name in names], numbers, args, {})
        except Exception:  # noqa: BLE001 - it takes other arguments
            return False
        return bool(outputs) and next(iter(outputs.values())).shape == args[0].shape

    def _computed(
        self,
        block: nn.Module,
        parameters: Sequence[torch.Tensor],
        numbers: dict[str, torch.Tensor],
        args: Any,
        kwargs: Any,
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Return outputs by name, gradients of the inputs, and gradients of the parameters."""
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        names = [name for name, _ in self.whole.named_parameters()]
        buffers = {name: _as(numbers[name], self.dtype).clone() for name, _ in self.whole.named_buffers()}
        inputs: list[torch.Tensor] = []

        def given(tensor: torch.Tensor) -> torch.Tensor:
            tensor = _as(tensor.detach(), self.dtype).clone()
            if tensor.is_floating_point():
                inputs.append(tensor.requires_grad_())
            return tensor

        args, kwargs = map_tensors(given, (args, kwargs))

        def compute(block: nn.Module) -> tuple[dict[str, torch.Tensor], Sequence[torch.Tensor | None]]:
            floating = [tensor for tensor in tensors_in(block(*args, **kwargs)) if tensor.is_floating_point()]
            outputs = {f"output {i}": tensor for i, tensor in enumerate(floating)} | _left_in_attributes(block)
            ends = [tensor for tensor in outputs.values() if tensor.requires_grad]
            generator = torch.Generator().manual_seed(0)
            probes = [torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor) for tensor in ends]
            return outputs, torch.autograd.grad(ends, [*inputs, *leaves], probes, allow_unused=True)

        given_numbers = {**dict(zip(names, leaves, strict=True)), **buffers}
        inside = {f"block.{name}": value for name, value in given_numbers.items()}
        outputs, gradients = functional_call(_Computation(block), inside, (compute,))
        values = {name: tensor.detach() for name, tensor in outputs.items()}
        return values, list(gradients[: len(inputs)]), list(gradients[len(inputs) :])

    def _compared(self, names: list[str], own: list[DTensor], found: Any, expected: Any) -> tuple[str, Any]:
        outputs, of_inputs, of_parameters = found
        if [(name, tensor.shape) for name, tensor in outputs.items()] != [
            (name, tensor.shape) for name, tensor in expected[0].items()
        ]:
            return f"its outputs, {_shapes(outputs)}, have other shapes, {_shapes(expected[0])}", []
        scale = max((float(grad.abs().max()) for grad in (*expected[1], *expected[2]) if grad is not None), default=0.0)
        pairs: list[tuple[str, Any, Any, float]] = [
            (name, tensor, expected[0][name], 0.0) for name, tensor in outputs.items()
        ]
        pairs += [
            (f"the gradient of input {i}", *pair, scale)
            for i, pair in enumerate(zip(of_inputs, expected[1], strict=True))
        ]
        for name, parameter, mine, wanted in zip(names, own, of_parameters, expected[2], strict=True):
            if mine is not None:
                mine = mine.redistribute(placements=parameter.placements).to_local()
            if wanted is not None:
                wanted = spread(wanted, self.mesh, parameter.placements[0]).to_local()
            pairs.append((f"the gradient of {name}", mine, wanted, scale))
        wrong = self._wrong(pairs)
        summed: list[tuple[str, str]] = []
        for (what, mine, wanted, least), is_wrong in zip(pairs, wrong, strict=True):
            name = what.removeprefix("the gradient of ")
            if not is_wrong:
                continue
            owner, _, attribute = name.rpartition(".")
            if name not in names or summed_of(self.cut.get_submodule(owner)) is None or wanted is None:
                return f"{what} differs", []
            total = torch.zeros_like(wanted) if mine is None else mine.clone()
            dist.all_reduce(total, group=self.mesh.get_group())
            if any(self._wrong([(what, total, wanted, least)])):
                return f"{what} differs", []
            summed.append((owner, attribute))
        return "", summed

    def _wrong(self, pairs: list[tuple[str, Any, Any, float]]) -> list[bool]:
        """Return which of these pairs differ on any rank of the group."""
        flags = torch.tensor([float(self._differ(*pair)) for _, *pair in pairs], device=self.mesh.device_type)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.mesh.get_group())
        return [flag > 0 for flag in flags.tolist()]

    def _differ(self, found: torch.Tensor | None, expected: torch.Tensor | None, scale: float) -> bool:
        if found is None or expected is None:
            one = found if expected is None else expected
            return one is not None and float(one.abs().max()) > _TOLERANCE[self.dtype] * scale
        if not expected.numel():
            return False
        largest = max(float(expected.abs().max()), _SMALL * scale)
        return not float((found - expected).abs().max()) <= _TOLERANCE[self.dtype] * largest


class _Computation(nn.Module):
    """Forward and backward of a block, in both of which its parameters have numbers, for recomputation."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        return compute(self.block)


class Proof:
    """Proof of one kind of block, before its first forward.

    Args:
        name: the name of the first such block.
        twins: the twins of this block.
        blocks: all blocks of this kind.
        layers: the names of the divided layers, which may not run outside of the block.
        says: advice for the user.
    """

    def __init__(self, name: str, twins: Twins, blocks: list[nn.Module], layers: list[str], says: str) -> None:
        self._name, self._twins, self._blocks, self._says = name, twins, blocks, says
        self._handles = [
            block.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True) for block in blocks
        ]
        inside = [block.get_submodule(layer) for block in blocks for layer in layers if layer]
        self._handles += [layer.register_forward_pre_hook(self._outside) for layer in inside]

    def end(self) -> None:
        """Stop checking forwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._handles:
            return
        prove = self._prove
        if "torch._dynamo" in sys.modules:  # a compiled model leaves this out
            prove = torch.compiler.disable(prove)  # type: ignore[no-untyped-call]
        prove(block, args, kwargs)

    def _prove(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._compare_inputs([*tensors_in((args, kwargs))])
        twins, named = self._twins, (*block.named_parameters(), *block.named_buffers())
        numbers = {name: _as(shards.whole(value.detach()), twins.dtype) for name, value in named}
        found = twins.difference(numbers, args, kwargs)
        if found is None:  # the next forward may prove it
            return
        why, summed = found
        if why:
            raise ModelError(
                f"{self._name!r}, a {type(block).__name__} that is cut over {twins.mesh.size()} ranks, does "
                f"not compute what it computes in one process: {why}. {self._says}"
            )
        for other in self._blocks:
            add_summed(other, summed)
        self.end()

    def _outside(self, layer: nn.Module, args: Any) -> None:
        if self._handles:
            raise ModelError(
                f"a layer of {self._name!r} runs outside of that block's own forward, so that the cut layer "
                f"cannot be checked against the whole one. {self._says}"
            )

    def _compare_inputs(self, inputs: list[torch.Tensor]) -> None:
        mesh = self._twins.mesh
        marks = []
        for number, tensor in enumerate(inputs):
            generator = torch.Generator().manual_seed(number)
            probe = torch.rand(tensor.shape, generator=generator, device="cpu").double()
            value = tensor.detach().cpu().double().nan_to_num(1.0, 2.0, 3.0)  # for overflows and masks
            marks.append(
                torch.stack(
                    [(value * probe).sum(), value.abs().sum(), torch.tensor(float(value.numel()), device="cpu")]
                )
            )
        count = torch.tensor([len(marks), -len(marks)], device=mesh.device_type)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=mesh.get_group())
        alike = bool(count[0] == -count[1])
        if alike and marks:
            everyones = gather_numbers(torch.stack(marks).flatten().tolist(), mesh.get_group())
            theirs = torch.tensor(everyones, dtype=torch.float64, device="cpu").view(mesh.size(), len(marks), 3)
            size = 1e-6 * theirs[0, :, 1:2] + 1e-9
            alike = bool(((theirs - theirs[0]).abs() <= size).all())
        if not alike:
            ranks = ", ".join(map(str, mesh.mesh.flatten().tolist()))
            raise ModelError(
                f"ranks {ranks} are one tensor-parallel group, but were given different batches: the "
                f"inputs of {self._name!r} differ between them. Take the data from "
                "distwrap.shard_loader(loader), or choose them by the rank's share in the layout, not by the rank."
            )


def add_summed(block: nn.Module, summed: list[tuple[str, str]]) -> None:
    """Sum the gradients of some parameters over the ranks of a group from now on."""
    for owner, attribute in summed:
        names = summed_of(block.get_submodule(owner))
        assert names is not None
        names.add(attribute)


def trial_inputs(block: nn.Module, width: int, ranks: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Return inputs to try a block before there is data, all of one shape."""
    parameters = list(inspect.signature(block.forward).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [each for each in parameters if each.kind in kinds and each.default is inspect.Parameter.empty]
    if any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in needed):
        return ()
    generator = torch.Generator().manual_seed(1)
    shape = 3, 2 * ranks, width
    return tuple(torch.randn(shape, dtype=dtype, generator=generator, device="cpu").to(device) for _ in needed)


def trial_numbers(block: nn.Module, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor] | None:
    """Return random parameters, and the block's buffers, for a trial; ``None`` if the buffers have no numbers."""
    if any(buffer.is_meta for buffer in block.buffers()):
        return None
    generator = torch.Generator().manual_seed(2)
    drawn = {
        name: torch.randn(value.shape, dtype=dtype, generator=generator, device="cpu").mul_(0.3).to(device)
        for name, value in block.named_parameters()
    }
    return {**drawn, **{name: _as(value.to(device), dtype) for name, value in block.named_buffers()}}


def _empty(block: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a block in evaluation mode, whose parameters have no numbers."""
    memo: dict[int, Any] = {}
    for parameter in block.parameters():
        empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty)
    try:
        twin = copy.deepcopy(block, memo)
    except Exception as error:
        raise ModelError(
            f"a {type(block).__name__} cannot be copied, so that the cut block cannot be checked against the "
            f"whole one: {error}. Write 'whole' for its layers in plan=."
        ) from error
    return twin.eval()


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _is_finite(computed: tuple[dict[str, Any], list[Any], list[Any]]) -> bool:
    tensors = [*computed[0].values(), *computed[1], *computed[2]]
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


def _shapes(outputs: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in outputs.items())


def _left_in_attributes(block: nn.Module) -> dict[str, torch.Tensor]:
    """Remove and return tensors with a graph that a forward has stored in attributes, such as a loss."""
    found: dict[str, torch.Tensor] = {}
    for at, part in block.named_modules():
        for name, value in [*vars(part).items()]:
            tensors = tensors_in(value) if isinstance(value, (torch.Tensor, list, tuple)) else []
            for number, tensor in enumerate(each for each in tensors if each.grad_fn is not None):
                called = f"{at}.{name}" if at else name
                found[f"what it leaves in {called!r}" + f" at {number}" * (number > 0)] = tensor
                vars(part).pop(name, None)
    return found


def _small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0).clamp(-1.0, 1.0) if tensor.is_floating_point() else tensor
