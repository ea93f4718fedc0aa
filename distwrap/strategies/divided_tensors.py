"""Uses of divided tensors that are right as in one process, or refused, and whole weights within a ``with``."""

from __future__ import annotations

import copyreg
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distwrap._internals.torch import version_of
from distwrap._internals.torch_autograd import look_at_backwards, nodes_of
from distwrap._internals.torch_divided import DividedTensorRules
from distwrap._internals.torch_sharding import own_parameters
from distwrap.errors import ModelError
from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.checks.in_sync import fingerprint
from distwrap.model.transparent import unwrap_model
from distwrap.strategies import shards
from distwrap.strategies.parameter_swap import ReplacedParameter
from distwrap.strategies.rendezvous import Rendezvous

_SAVES_PARTS = ("torch.distributed.checkpoint", "distwrap.checkpoint")


class DividedTensors(RunPart):
    """Rules for divided tensors during a run; simulated ranks share them.

    Attributes:
        rendezvous: the reads of numbers and weights.
    """

    def __init__(self, world: World) -> None:
        self.rendezvous = Rendezvous("")
        if not _runs:
            # A hook on the base of such a view is set in `Gathered.after_forward`.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            _filters.append(warnings.filters[0])
            copyreg.pickle(DTensor, _reduced)
            _rules.append(DividedTensorRules(_meet, _refuse, _part_of, on_cpu=world.device.type == "cpu"))
        _runs.append(self)

    def close(self) -> None:
        """Give ``DTensor`` back at the end of the last run."""
        _runs.remove(self)
        if not _runs:
            copyreg.dispatch_table.pop(DTensor, None)
            _rules.pop().end()
            with suppress(ValueError):  # the loop has set filters of its own
                warnings.filters.remove(_filters.pop())  # type: ignore[attr-defined]


_runs: list[DividedTensors] = []
_rules: list[DividedTensorRules] = []
_filters: list[Any] = []


def _meet(*, always: bool = True) -> None:
    """Wait for the other ranks to read the same number, or to gather the same weights."""
    current_world().part(DividedTensors).rendezvous.read(always=always)


def _refuse(what: str, why: str) -> NoReturn:
    rank = current_world().placement.rank
    raise ModelError(f"rank {rank}: {what} of a divided tensor, of which each rank has a part, {why}")


def _part_of(pattern: DTensor, whole: torch.Tensor) -> DTensor:
    if whole.shape != pattern.shape or any(placement.is_partial() for placement in pattern.placements):
        return shards.on_all_ranks(pattern, whole)
    part = shards.divided_like(pattern, whole)
    assert isinstance(part, DTensor)
    return part


@contextmanager
def gathered_weights(model: nn.Module) -> Iterator[None]:
    """Let a divided model, or a module of it, have whole weights and gradients within a ``with``; every rank enters it.

    Changes, which every rank makes alike, are kept. Where every rank has whole weights, nothing is done.

    Args:
        model: what `wrap_model` has returned, or a module in it, whose weights fit on each device.

    Raises:
        ModelError: the ranks have changed a weight differently, a change would be lost, or a rank cannot have all
            weights.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> with gathered_weights(layer), torch.no_grad():
        ...     layer.weight.fill_(1)[0] = 0
        >>> layer.weight.sum().item()
        2.0
    """
    net = unwrap_model(model)
    places = [(own_parameters(part), name) for part in net.modules() for name in own_parameters(part)]
    divided = [(own, name, own[name]) for own, name in places if isinstance(own[name], DTensor)]
    wholes: dict[DTensor, nn.Parameter] = {}
    if divided:
        _meet()
    elif any(_is_elsewhere(parameter) for parameter in net.parameters()):
        raise ModelError(
            "gathered_weights(): it is for fsdp, hsdp and tp. In a pipeline each stage has its own blocks: change "
            "weights before wrap_model(). DeepSpeed has its own, in distwrap.strategies.deepspeed."
        )
    for own, name, tensor in divided:
        if tensor not in wholes:
            wholes[tensor] = _gathered(tensor)
        own[name] = wholes[tensor]
    before, versions = _marks(wholes), [version_of(tensor) for tensor in wholes]
    loads = [
        part.register_load_state_dict_pre_hook(_refuse_load)  # type: ignore[no-untyped-call]
        for part in net.modules()
        if divided
    ]
    try:
        yield
        _refuse_lost(divided, wholes, versions)
        _refuse_unlike(_marks(wholes) if divided else [])
    finally:
        for handle in loads:
            handle.remove()
        for own, name, tensor in divided:
            own[name] = tensor
        for (tensor, whole), was, now in zip(wholes.items(), before, _marks(wholes), strict=True):
            with torch.no_grad():
                if now[0] != was[0]:
                    shards.fill(tensor, whole)
                if now[1] != was[1]:
                    tensor.grad = None if whole.grad is None else shards.divided_like(tensor, whole.grad)
                tensor.requires_grad_(whole.requires_grad)
                whole.data = torch.empty(0, dtype=whole.dtype, device=whole.device)
            whole.__class__ = ReplacedParameter


def _refuse_load(module: nn.Module, *given: Any) -> NoReturn:
    raise ModelError(
        "load_state_dict() within gathered_weights(): it divides what it loads, and weights are "
        "whole there. Call it outside of the 'with', or copy_() the numbers of each weight."
    )


def _refuse_lost(divided: list[Any], wholes: Mapping[DTensor, nn.Parameter], versions: list[int]) -> None:
    changed = any(version_of(tensor) != before for tensor, before in zip(wholes, versions, strict=True))
    if changed or any(own[name] is not wholes[tensor] for own, name, tensor in divided):
        what = "an optimizer has stepped" if changed else "another parameter was put in the place of a weight"
        raise ModelError(
            f"gathered_weights(): {what} within the 'with', which would be lost. Only change the numbers of weights "
            "and gradients there."
        )


def _refuse_unlike(own: list[tuple[int, int]]) -> None:
    for rank, its in enumerate(gather_object(own) if own else ()):
        if its != own:
            raise ModelError(
                f"rank {current_world().placement.rank} has changed weights within gathered_weights() otherwise than "
                f"rank {rank}. Every rank makes the same changes, with the same random numbers: leave conditions such "
                "as 'if rank() == 0' out."
            )


def _gathered(tensor: DTensor) -> nn.Parameter:
    whole = nn.Parameter(shards.whole(tensor).clone(), tensor.requires_grad)
    whole.grad = None if tensor.grad is None else shards.whole(tensor.grad).clone()
    return whole


def _marks(wholes: Mapping[DTensor, nn.Parameter]) -> list[tuple[int, int]]:
    """Return a hash of each tensor and of its gradient."""
    pairs = [(whole, whole.grad) for whole in wholes.values()]
    return [(fingerprint(whole), 0 if grad is None else fingerprint(grad)) for whole, grad in pairs]


def _is_elsewhere(parameter: torch.Tensor) -> bool:
    """Return whether this rank does not have all of a parameter."""
    own = parameter.untyped_storage().nbytes()
    return parameter.is_meta or hasattr(parameter, "ds_id") or own < parameter.numel() * parameter.element_size()


def refuse_gradient_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Make ``register_hook`` of parameters an error, since a gradient from an exchange calls no such hook."""
    for parameter in parameters:
        parameter.__dict__["register_hook"] = _refuse_hook


def _refuse_hook(hook: Any) -> NoReturn:
    raise ModelError(
        "register_hook() of a divided parameter: such a hook would never be called, since the gradient comes "
        "from an exchange. Use register_post_accumulate_grad_hook()."
    )


def _reduced(tensor: DTensor) -> Any:
    """Return the pickled form of a tensor, if all its parts are saved or sent.

    Raises:
        ModelError: a part would be saved or sent as the whole.
    """
    callers = _callers()
    by = next(callers)
    is_torchs = by.startswith(("torch.", "multiprocessing")) and by != "torch.serialization"
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    if not (is_whole or is_torchs or any(caller.startswith(_SAVES_PARTS) for caller in callers)):
        raise ModelError(
            f"rank {current_world().placement.rank} has a part of a tensor of {tuple(tensor.shape)}, and would "
            f"save or send that part in place of the whole. distwrap.save({{'model': model, 'optimizer': "
            f"optimizer}}, path), called on every rank, writes all of it; tensor.full_tensor(), called on "
            "every rank, returns the whole."
        )
    return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def _callers() -> Iterator[str]:
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back  # the function that pickles
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back
    yield ""


class Exchanging(Protocol):
    """Model whose parameters get their gradients from an exchange, and not from autograd."""

    @property
    def model(self) -> nn.Module:
        """The user's model."""

    def exchanges(self, nodes: Iterable[Any]) -> bool:
        """Return whether autograd passes gradients to the exchange at any of these nodes of a graph."""


class NamedInputs(RunPart):
    """Check of each backward of a run that has ``inputs=``.

    Attributes:
        models: the models to check, as long as something refers to them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.models: WeakSet[Exchanging] = WeakSet()
        self._stop = look_at_backwards(self._refuse)

    def close(self) -> None:
        """Stop checking backwards."""
        self._stop()

    def _refuse(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Refuse to compute gradients that would stay ``None``, or lack the part from an exchange.

        Raises:
            ModelError: they would; the message says what to do instead.
        """
        named = {id(tensor) for tensor in inputs if isinstance(tensor, torch.Tensor)}
        models = [each for each in self.models if not named.isdisjoint(map(id, each.model.parameters()))]
        if any(each.exchanges(nodes_of(outputs)) for each in models):
            raise ModelError(
                f"rank {self._world.placement.rank}: a backward through a divided model names parameters, as "
                "backward(inputs=…) or torch.autograd.grad(loss, parameters), and would give them no "
                "gradients, since these come from an exchange. Call loss.backward() and read parameter.grad; "
                "freeze parameters that need no gradient before the forward, by requires_grad_(False)."
            )
