"""Words in a plan of tensor parallelism, by which users say how layers are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from distwrap.errors import OptionError
from distwrap.wording import unknown_name

Plan = Literal["auto"] | Mapping[str, str] | Callable[[str, nn.Module], str | None]

WORDS = ("colwise", "rowwise", "packed2", "packed3", "heads", "gathered", "vocabulary", "whole")


def check_plan(plan: object) -> None:
    """Refuse a value that is not a plan.

    Raises:
        OptionError: it is not "auto", words by patterns of names, or a function.
    """
    if plan == "auto" or (callable(plan) and not isinstance(plan, type)):
        return
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        raise OptionError(
            f"FSDPStrategy(plan={plan!r}): it is 'auto', words by patterns of modules' names as "
            f"{{'blocks.*.mlp.0': 'colwise', 'blocks.*.mlp.2': 'rowwise'}}, or a function of a name and a module."
        )
    for word in plan.values():
        if word not in WORDS:
            raise OptionError(unknown_name("style of a module in plan=", word, WORDS))
