"""Estimate the memory of a rank under each strategy from a model's parameters, and choose one that fits.

The numbers are those of a step's peak without activations, which no strategy divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap import entry_points
from distwrap.checks import parsed
from distwrap.errors import OptionError
from distwrap.model.transparent import unwrap_model
from distwrap.precision import InPrecision
from distwrap.strategies.fsdp.units import computed_in, norms_of, units_of
from distwrap.strategies.zero import balanced
from distwrap.wording import as_size, first_line, unknown_name

MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Need:
    """Bytes needed under one strategy by the rank that needs most.

    Attributes:
        strategy: the name of the strategy.
        parameters: parameters and buffers of the model.
        gradients: gradients between backward and step.
        buckets: DDP's buckets, in which gradients are sent.
        optimizer: the state of the optimizer.
        gathered: under fsdp, temporarily whole tensors: the weights of two units, the gradients of one, and the weights
            outside of units.
        why_not: why there is no estimate, or no use for it; all other values are 0 then.
    """

    strategy: str
    parameters: int = 0
    gradients: int = 0
    buckets: int = 0
    optimizer: int = 0
    gathered: int = 0
    why_not: str = ""

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.parameters + self.gradients + self.buckets + self.optimizer + self.gathered


def estimate(
    model: nn.Module, ranks: int, ranks_a_node: int, in_precision: InPrecision, make: MakeOptimizer
) -> list[Need]:
    """Estimate the memory of a rank under each strategy, from the simplest one on.

    Args:
        model: a model on any device, also the meta device.
        ranks: the number of ranks.
        ranks_a_node: the number of ranks on a node.
        in_precision: the precision in which the model is trained.
        make: makes the optimizer whose state is measured.

    Raises:
        OptionError: the optimizer cannot be made with these parameters, or not be measured.

    Example:
        >>> found = estimate(nn.Linear(9, 100), 2, 2, InPrecision("32", torch.device("cpu")), optimizer("adamw"))
        >>> [(need.strategy, need.total) for need in found if not need.why_not]
        [('ddp', 20008), ('zero1', 19204), ('fsdp', 20008)]
    """
    model = unwrap_model(model)
    kept = _Kept(model, in_precision)
    state = state_bytes(kept.trained, make)
    fixed, gradients = kept.bytes, _bytes(kept.trained)
    everything = sum(state.values())
    if ranks == 1:
        alone = "one rank has no other to share with"
        names = ("zero1", "hsdp", "fsdp")
        return [Need("ddp", fixed, gradients, 0, everything), *(Need(name, why_not=alone) for name in names)]
    owners = balanced(kept.trained, [0] * ranks)
    shares = [[own for own, owner in owners.items() if owner == rank] for rank in range(ranks)]
    needs = [
        Need("ddp", fixed, gradients, gradients, everything),
        Need("zero1", fixed, gradients, gradients, max(sum(state[own] for own in share) for share in shares)),
    ]
    if ranks_a_node in (1, ranks):
        why_not = "a node has one rank" if ranks_a_node == 1 else "one node: fsdp is the same"
        needs.append(Need("hsdp", why_not=why_not))
    else:
        needs.append(_divided("hsdp", model, kept, ranks_a_node, make))
    return [*needs, _divided("fsdp", model, kept, ranks, make)]


def optimizer(text: str) -> MakeOptimizer:
    """Return a function that makes an optimizer by name: ``"adamw"``, ``"sgd(momentum=0.9)"``, ``"package:Class"``.

    Raises:
        OptionError: torch has no such optimizer, it cannot be imported, or it has no such options.
    """
    name, options = parsed("optimizer", text)
    kind: Any = entry_points.load(f"optimizer {text!r}", (name,)) if ":" in name else _of_torch(name)

    def make(parameters: Sequence[nn.Parameter]) -> Optimizer:
        try:
            made = kind(parameters, **options)
        except (TypeError, ValueError) as error:
            raise OptionError(f"optimizer {text!r} cannot be made of this model: {first_line(error)}") from error
        if not isinstance(made, Optimizer):
            raise OptionError(f"optimizer {text!r} is a {type(made).__name__}, not an optimizer of torch's kind.")
        return made

    return make


def state_bytes(parameters: Sequence[nn.Parameter], make: MakeOptimizer) -> dict[nn.Parameter, int]:
    """Return the bytes of an optimizer's state for each parameter on the meta device, after a step there.

    Raises:
        OptionError: it cannot step on the meta device.
    """
    if not parameters:
        return {}
    asked = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    step = type(asked).step
    try:
        getattr(step, "__wrapped__", step)(asked)  # without hooks, as those of a run count all steps
    except Exception as error:
        if not all(asked.state.get(parameter) for parameter in parameters):  # else it failed with its state made
            raise OptionError(
                f"the state of {type(asked).__name__} cannot be estimated, since it cannot step on the meta "
                f"device ({first_line(error)}). Estimate with a similar optimizer, as AdamW."
            ) from error
    finally:
        for parameter in parameters:
            parameter.grad = None
    return {
        parameter: _bytes(value for value in asked.state.get(parameter, {}).values() if isinstance(value, torch.Tensor))
        for parameter in parameters
    }


class _Kept:
    """Parameters and buffers of a model, without numbers, in the types in which a precision trains them."""

    def __init__(self, model: nn.Module, in_precision: InPrecision) -> None:
        shadow = nn.Module()
        own = list(model.parameters())
        for number, value in enumerate(own):
            empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
            shadow.register_parameter(f"weight{number}", nn.Parameter(empty, value.requires_grad))
        for number, buffer in enumerate(model.buffers()):
            shadow.register_buffer(f"buffer{number}", torch.empty_like(buffer, device="meta"))
        shadow = in_precision.precision.weights(shadow)
        self.of = {id(value): each for value, each in zip(own, shadow.parameters(), strict=True)}
        self.parameters = list(self.of.values())
        self.trained = [kept for kept in self.parameters if kept.requires_grad]
        self.buffers = _bytes(shadow.buffers())
        self.bytes = self.buffers + _bytes(self.parameters)
        self.in_precision, self.shadow = in_precision, shadow


def _share(value: nn.Parameter, ranks: int) -> nn.Parameter:
    """Return the first rank's share of a parameter, which is the largest, or the whole of a scalar."""
    if value.dim() == 0:
        return value
    return nn.Parameter(value.detach()[: -(-value.shape[0] // ranks)].clone(), value.requires_grad)


def _divided(name: str, model: nn.Module, kept: _Kept, ranks: int, make: MakeOptimizer) -> Need:
    """Estimate FSDP2 over some ranks by the first one, which has most, since tensors are cut along dimension 0."""
    if any(value.dim() == 0 for value in kept.parameters):
        return Need(
            name, why_not="FSDP2 takes no parameter without dimensions: give the parameter one dimension of size 1"
        )
    shards = [_share(value, ranks) for value in kept.parameters]
    trained = [shard for shard in shards if shard.requires_grad]
    state = sum(state_bytes(trained, make).values())
    return Need(name, kept.buffers + _bytes(shards), _bytes(trained), 0, state, _gathered(model, kept))


def _gathered(model: nn.Module, kept: _Kept) -> int:
    """Return the bytes of whole tensors at a time: those of two units, as the next unit is gathered early.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    dtype = computed_in(kept.in_precision, kept.shadow)
    seen: set[int] = set()

    def whole(parameters: Iterable[nn.Parameter], *, cast: bool = True) -> tuple[int, int]:
        """Return the bytes of weights outside of earlier units, and of their gradients with copies to send."""
        own = {id(value): kept.of[id(value)] for value in parameters if id(value) not in seen}
        seen.update(own)
        size = torch.empty(0, dtype=dtype).element_size() if cast and dtype is not None else None
        weights = [(value.numel(), size or value.element_size(), value) for value in own.values()]
        gradients = (number * (each + value.element_size()) for number, each, value in weights if value.requires_grad)
        return sum(number * each for number, each, _ in weights), sum(gradients)

    norms = norms_of(model) if dtype is not None else []
    stays = whole([value for norm in norms for value in norm.parameters(recurse=False)], cast=False)[0]
    units = [whole(unit.parameters()) for unit in units_of(model, "auto")]
    root, of_root = whole(model.parameters())
    largest = sorted((weights for weights, _ in units), reverse=True)[:2]
    return stays + root + sum(largest) + max([of_root, *(gradients for _, gradients in units)])


def _of_torch(name: str) -> type[Optimizer]:
    known = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name.lower() not in known:
        raise OptionError(unknown_name("optimizer", name, known))
    return known[name.lower()]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# Shares of a device that an estimate may fill. The rest is for unknown activations, and for torch's temporary memory
# and fragmentation.
_WITHOUT_ACTIVATIONS, _WITH_ACTIVATIONS = 0.75, 0.88


@dataclass(frozen=True)
class Choice:
    """A recommendation.

    Attributes:
        strategy: the name of the strategy.
        fits: whether its estimate leaves room in a rank's memory.
        why: the numbers, in words.
    """

    strategy: str
    fits: bool
    why: str


def recommended(needs: Sequence[Need], memory: int, activations: int | None = None) -> Choice:
    """Return the first strategy that leaves room in a rank's memory, or else the one that needs least.

    Args:
        needs: the needs of the strategies, from the simplest on.
        memory: the bytes of a rank's device.
        activations: the bytes of activations; ``None`` if unknown.

    Example:
        >>> needs = [Need("ddp", 6, 6, 6, 12), Need("zero1", 6, 6, 6, 6), Need("fsdp", 3, 3, 0, 6, 4)]
        >>> recommended(needs, 34)
        Choice(strategy='zero1', fits=True, why='it needs 24 B of 34 B a rank; ddp 30 B')
    """
    possible = [need for need in needs if not need.why_not]
    fitting = [need for need in possible if fit(need, memory, activations) == "fits"]
    chosen = fitting[0] if fitting else min(possible, key=lambda need: need.total)
    others = ", ".join(
        f"{need.strategy} {as_size(need.total + (activations or 0))}" for need in possible[: possible.index(chosen)]
    )
    why = f"it needs {as_size(chosen.total + (activations or 0))} of {as_size(memory)} a rank{others and '; '}{others}"
    if not fitting:
        why = f"no strategy fits, and this one needs least: {why}. Take more ranks, or a smaller model"
    return Choice(chosen.strategy, bool(fitting), why)


def fit(need: Need, memory: int, activations: int | None = None) -> str:
    """Return ``"fits"``, ``"tight"`` if too little room is left, ``"too large"``, or an empty text if unknown."""
    if need.why_not:
        return ""
    share = _WITHOUT_ACTIVATIONS if activations is None else _WITH_ACTIVATIONS
    total = need.total + (activations or 0)
    return "fits" if total <= share * memory else "tight" if total <= memory else "too large"
