"""Models without numbers, which are made on the meta device and get their numbers where they are divided.

Source: https://docs.pytorch.org/docs/stable/meta.html
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distwrap._internals.torch import watch_operators
from distwrap._internals.torch_sharding import reset_of
from distwrap._internals.torch_tree import tensors_in
from distwrap.devices.kinds import generators_kept
from distwrap.errors import ModelError
from distwrap.group.collectives import broadcast
from distwrap.group.world import say_once

Copy = Callable[[torch.Tensor, torch.Tensor], object]


@contextmanager
def init_empty() -> Iterator[None]:
    """Make models without numbers within a ``with``: they take no memory, so they may exceed what one process holds.

    `wrap_model` divides such a model, and then lets its modules draw their numbers by ``reset_parameters()``, each rank
    for its own share. These are not the numbers that the model would have had otherwise. Changes that a constructor
    makes to weights by other functions, as by ``self.apply(self._init_weights)``, are lost, and a notice names these
    functions.

    Example:
        >>> with init_empty():
        ...     model = nn.Linear(10**6, 10**6)
        >>> model.weight.device
        device(type='meta')
    """
    lost: Counter[str] = Counter()

    def look(operator: Any, args: tuple[Any, ...]) -> None:
        if not operator.__name__.partition(".")[0].endswith("_"):
            return
        given = tensors_in(args)
        if any(isinstance(tensor, nn.Parameter) and tensor.is_meta for tensor in given) or (
            torch.Tag.nondeterministic_seeded in operator.tags and any(tensor.is_meta for tensor in given)
        ):
            lost.update(_setter())

    with torch.device("meta"), watch_operators(look):
        yield
    if lost:
        say_once(
            f"lost {[*lost]}",
            f"init_empty(): {' and '.join(map('{}()'.format, lost))} set weights that have no numbers yet, so "
            "that nothing came of it: wrap_model() will draw those of reset_parameters() instead. Set them "
            "again after wrap_model(), as by model.apply(model._init_weights), unless a checkpoint is loaded.",
        )


def _setter() -> list[str]:
    """Return the name of the user's function that changes a weight now; none where it is a ``reset_parameters()``."""
    frame, user = inspect.currentframe(), ""
    while frame is not None:
        name, module = frame.f_code.co_name, str(frame.f_globals.get("__name__"))
        if name in ("reset_parameters", "_reset_parameters"):
            return []
        if not user and not module.startswith(("torch.", "distwrap.")):
            user = name
        frame = frame.f_back
    return [user] if user else []


def fill(net: nn.Module, device: torch.device, seed: int, copy: Copy | None = None) -> None:
    """Give a model that was made without numbers its numbers, one module at a time.

    A module with others inside of it whose numbers it may draw, as torch's ``Transformer``, is whole while it does.

    Args:
        net: the model, whose parameters may be divided.
        device: to put it on.
        seed: of the numbers, the same on all ranks.
        copy: fills a parameter, whatever part of it is here, from the whole tensor; by default in place.

    Raises:
        ModelError: names a module with weights or buffers that has no ``reset_parameters()``, or one that has numbers.
    """
    drawn = {name: part for name, part in net.named_modules() if any(tensor.is_meta for tensor in _own(part))}
    for name, part in net.named_modules():
        of = f"{type(net).__name__} was made without numbers, and {name or 'the model itself'!r}"
        if name in drawn and reset_of(part) is None:
            raise ModelError(
                f"{of} has no reset_parameters() to draw them. Give its class one, which fills its parameters and "
                f"buffers in place."
            )
        if name not in drawn and any(True for _ in part.parameters(recurse=False)):
            raise ModelError(
                f"{of} with them, which would be lost. Make the whole model in init_empty(), or none of it."
            )
    with generators_kept(device), torch.no_grad():
        groups = _groups(net, drawn)
        _make_room(net, device)
        torch.manual_seed(seed)
        for group in reversed(groups):  # what is inside of others first, as constructors do
            with _whole(group, device) as wholes:
                for reset in filter(None, map(reset_of, reversed(group))):
                    reset()
            for parameter, whole in wholes.items():
                (copy or torch.Tensor.copy_)(parameter, whole.detach())


def is_empty(model: nn.Module) -> bool:
    """Return whether a model lacks numbers."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def drawn_seed() -> int:
    """Return a number drawn from torch's generator on rank 0, on every rank."""
    return int(broadcast(int(torch.randint(2**62, ()))))


def _groups(net: nn.Module, drawn: dict[str, nn.Module]) -> list[list[nn.Module]]:
    """Return the modules that draw numbers, each by itself, or one that may draw others' too together with those."""
    draw, placed = {id(part) for part in drawn.values()}, set[int]()
    groups: list[list[nn.Module]] = []
    for part in net.modules():
        draws_inside = _may_draw_inside(part)
        if id(part) not in placed and (draws_inside or id(part) in draw):
            inside = list(part.modules()) if draws_inside else [part]
            placed.update(map(id, inside))
            groups.append([each for each in inside if id(each) in draw or _may_draw_inside(each)])
    if _may_draw_inside(net):
        say_once(
            "drawn at once",
            f"init_empty(): reset_parameters() of {type(net).__name__} may draw the numbers of all modules inside of "
            "it, so each rank holds all of them whole until they are drawn. To save memory, let each module draw its "
            "own, and this one none.",
        )
    return groups


def _may_draw_inside(part: nn.Module) -> bool:
    """Return whether a module's ``reset_parameters()`` may draw the numbers of others inside of it, which it has."""
    return reset_of(part) is not None and any("." in name for name, _ in part.named_parameters())


def _make_room(net: nn.Module, device: torch.device) -> None:
    """Put a model on a device, where its parameters have no numbers yet, and its buffers those that they have."""
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in net.modules():
        for name, parameter in part.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((part, name))
    net._apply(lambda value: torch.empty_like(value, device=device) if value.is_meta else value.to(device))  # type: ignore[no-untyped-call]
    for (first, own), *others in tied.values():  # each place has got a parameter of its own
        for part, name in others:
            setattr(part, name, getattr(first, own))


@contextmanager
def _whole(parts: list[nn.Module], device: torch.device | str) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Give modules whole parameters without numbers within a ``with``; yield those by the ones that they stand for."""
    own = [(part, name, value) for part in parts for name, value in part.named_parameters(recurse=False)]
    wholes = {
        value: nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device=device), value.requires_grad)
        for _, _, value in own
    }
    try:
        for part, name, value in own:
            setattr(part, name, wholes[value])
        yield wholes
    finally:
        for part, name, value in own:
            wholes[value] = getattr(part, name)
            setattr(part, name, value)


def _own(part: nn.Module) -> list[torch.Tensor]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]
