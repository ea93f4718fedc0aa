"""Test whether an optimizer's step mixes the gradients of several parameters, or draws random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from distwrap._internals.torch_zero import without_step_hooks
from distwrap.devices.kinds import widest
from distwrap.errors import ModelError
from distwrap.model.wrapped_models import parameters_of
from distwrap.seeding import RandomState, preserved

_LONGEST = 8  # largest size of the trial tensors in each dimension
_STEPS = 10  # an estimate over all parameters may start at zero
_MUCH = 1e3  # factor of a gradient in another trial, beyond the limit of any clip in the step


def refuse_mixing(optimizer: Optimizer) -> None:
    """Refuse an optimizer that uses a norm over all gradients, or draws, if each rank steps some parameters.

    It is tried with small tensors instead of its parameters. If that is not possible, or it is torch's own, it is
    accepted.

    Raises:
        ModelError: the optimizer is refused; the message names the strategies that accept it.
    """
    if type(optimizer).__module__.startswith("torch."):
        return
    found = _tried(optimizer)
    if found == "draws":
        raise ModelError(
            f"{type(optimizer).__name__} draws random numbers for each parameter in its step. Under this "
            "strategy each rank steps only some of the parameters, and would draw for these only: it would get "
            "other numbers than one process, and afterwards the ranks' generators would differ. Use "
            "strategy='ddp' or 'fsdp' for it."
        )
    if not found:
        return
    raise ModelError(
        f"{type(optimizer).__name__} steps by all gradients at once, as by a norm over all of them: in a trial "
        "with small numbers one parameter's step changed with the gradient of another. Under this strategy "
        "each rank steps only some of the parameters, and would take the norm of these only. If that is "
        "gradient clipping, switch it off in the optimizer and call distwrap.optimizer_step(optimizer, "
        "max_norm=...); or use strategy='ddp' or 'fsdp'."
    )


def refuse_shaped(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step depends on a weight's shape, if it has to step a row of numbers.

    It is tried with small tensors, whole and in pieces. If that is not possible, or it is torch's own, it is accepted.

    Raises:
        ModelError: the optimizer is refused; the message names the strategies that accept it.
    """
    if type(optimizer).__module__.startswith("torch."):
        return
    with preserved(), _put_aside(optimizer):
        torch.manual_seed(0)  # so that all ranks see the same
        tensors = [torch.rand(_LONGEST, 4, dtype=torch.float64) for _ in optimizer.param_groups]
        grads = [torch.randn_like(tensor) for tensor in tensors]
        places = list(range(len(tensors)))
        try:
            whole = _stepped(optimizer, places, tensors, grads)
            cut = [
                [piece for tensor in given for piece in tensor.view(-1).tensor_split([18])]
                for given in (tensors, grads)
            ]
            pieces = _stepped(optimizer, [place for place in places for _ in range(2)], *cut)
        except Exception:  # noqa: BLE001 - the trial lacks what the step needs
            return
    if not torch.allclose(torch.cat([tensor.view(-1) for tensor in whole]), torch.cat(pieces), equal_nan=True):
        raise ModelError(
            f"{type(optimizer).__name__} steps by a weight as a whole: in a trial with small numbers it made other "
            f"steps of a matrix than of the same numbers in two rows. Under this strategy each rank steps a row of "
            f"numbers, out of one weight or several. Use strategy='zero1' or 'ddp' for it, or an optimizer "
            f"that treats each number by itself, as AdamW."
        )


def _tried(optimizer: Optimizer) -> Literal["draws", "mixes", ""]:
    """Return what an optimizer does in a trial that cannot be done in parts: it draws, mixes, or neither."""
    kinds: dict[tuple[int, int], tuple[torch.Size, torch.device]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            size = torch.Size(min(length, _LONGEST) for length in parameter.shape)
            kinds.setdefault((number, len(size)), (size, parameter.device))
    tried = list(kinds.items()) * (1 if len(kinds) > 1 else 2)
    places = [number for (number, _), _ in tried]
    with preserved(), _put_aside(optimizer):
        torch.manual_seed(0)  # so that all ranks see the same
        tensors = [torch.rand(size, device=device, dtype=widest(device)) for _, (size, device) in tried]
        grads = [torch.randn_like(tensor) for tensor in tensors]
        try:
            expected = _stepped(optimizer, places, tensors, grads)
            drawn = _random_states()
            for is_more in _halves(len(grads)):
                more = [grad * _MUCH if raised else grad for grad, raised in zip(grads, is_more, strict=True)]
                found = _stepped(optimizer, places, tensors, more)
                for raised, one, other in zip(is_more, found, expected, strict=True):
                    if not raised and not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
                        return "mixes"
            for is_here in _halves(len(grads)):  # as if other ranks have the other gradients
                own = [grad if here else None for here, grad in zip(is_here, grads, strict=True)]
                _stepped(optimizer, places, tensors, own)
                if _random_states() != drawn:
                    return "draws"
        except Exception:  # noqa: BLE001 - the trial lacks what the step needs
            return ""
    return ""


def _random_states() -> list[Any]:
    state = RandomState.capture()
    return [state.torch.tolist(), state.python, repr(state.numpy)]


def _halves(count: int) -> Iterator[list[bool]]:
    """Yield a few subsets of indices such that for any two, one subset has the first and not the second."""
    for bit in range((count - 1).bit_length()):
        for side in (0, 1):
            yield [number >> bit & 1 == side for number in range(count)]


def _stepped(
    optimizer: Optimizer, places: list[int], tensors: list[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return tensors after steps of an optimizer with these gradients, each in the group of its number."""
    torch.manual_seed(0)
    probes = [tensor.clone().requires_grad_() for tensor in tensors]
    groups = optimizer.param_groups[:]
    optimizer.state.clear()
    for number, group in enumerate(groups):
        own = [probe for probe, place in zip(probes, places, strict=True) if place == number]
        optimizer.param_groups[number] = {**group, "params": own, **_rate(group)}

    def closure() -> Any:
        for probe, grad in zip(probes, grads, strict=True):
            probe.grad = None if grad is None else grad.clone()
        return torch.zeros(())

    try:
        for _ in range(_STEPS):
            closure()
            try:
                type(optimizer).step(optimizer, closure)
            except TypeError:  # it takes no closure
                type(optimizer).step(optimizer)
    finally:
        optimizer.param_groups[:] = groups
    return [probe.detach() for probe in probes]


def _rate(group: dict[str, Any]) -> dict[str, Any]:
    """Return a learning rate that makes a step visible, since a schedule may begin at zero."""
    given = group.get("lr")
    return {} if given is None else {"lr": torch.full_like(given, 0.1) if isinstance(given, torch.Tensor) else 0.1}


@contextmanager
def _put_aside(optimizer: Optimizer) -> Iterator[None]:
    """Save and restore an optimizer's state and attributes, and all gradients, within a ``with``."""
    attributes, state = dict(vars(optimizer)), dict(optimizer.state)
    grads = [(each, each.grad) for each in parameters_of(optimizer).values() if each.grad is not None]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        with without_step_hooks(optimizer):
            yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.state.clear()
        optimizer.state.update(state)
        for parameter, grad in grads:
            parameter.grad = grad
