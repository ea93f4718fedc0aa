"""Private names of torch for a tensor subclass without numbers.

Every function says which names it relies on, and what happens without them; all were seen in version 2.13.
"""

from functools import cache
from typing import Any, TypeVar

import torch

_Sub = TypeVar("_Sub", bound=torch.Tensor)


def wrapper_tensor(kind: type[_Sub], like: torch.Tensor, device: torch.device) -> _Sub:
    """Make a tensor of a subclass with the size and type of another, a device, and no memory.

    Relies on ``torch:Tensor()._make_wrapper_subclass``.
    Without it: strategy="pipeline" cannot be used.
    """
    made: _Sub = torch.Tensor._make_wrapper_subclass(
        kind, like.size(), strides=like.stride(), dtype=like.dtype, device=device
    )
    return made


@cache
def effects_of(operator: Any) -> tuple[frozenset[int | str], bool, bool]:
    """Return the arguments that an operator writes to, whether it returns these, and whether it returns views.

    Relies on ``torch:ops.aten.add.Tensor._schema``.
    Without it: strategy="pipeline" cannot be used.
    """
    schema = operator._schema
    written = {
        place
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for place in (number, argument.name)
    }
    aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
    return frozenset(written), any(alias.is_write for alias in aliases), bool(aliases)
