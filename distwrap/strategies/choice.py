"""Choose the simplest strategy that fits into a rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distwrap.strategies.estimate import Need
from distwrap.wording import as_size

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
