"""Nestings of tensors, by torch's pytree, which is private by its name.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from distwrap.nesting import rebuilt

_pytree: Any = None
with suppress(ImportError):
    from torch.utils import _pytree


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """Rebuild a nesting with each leaf changed.

    Relies on ``torch.utils._pytree:tree_map``.
    Without it: tuples, lists and dicts alone count as nestings, and registered classes as leaves.
    """
    return _pytree.tree_map(change, value) if _pytree is not None else _plain_tree_map(change, value)


def _plain_tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    return rebuilt(value, lambda part, path: part if isinstance(part, (list, tuple, dict)) else change(part))


def tree_flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Return the leaves of a nesting, and what `tree_unflatten` needs to rebuild it; `is_leaf` tells of more leaves.

    Relies on ``torch.utils._pytree:tree_flatten``.
    Without it: as for tree_map.
    """
    if _pytree is not None:
        return _pytree.tree_flatten(value, is_leaf)  # type: ignore[no-any-return]
    leaves: list[Any] = []
    numbered = _plain_tree_map(lambda leaf: (leaves.append(leaf), len(leaves) - 1)[1], value)  # type: ignore[func-returns-value]
    return leaves, numbered


def tree_unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Rebuild a nesting from its leaves and the structure that `tree_flatten` has returned.

    Relies on ``torch.utils._pytree:tree_unflatten``.
    Without it: as for tree_map.
    """
    if _pytree is not None:
        return _pytree.tree_unflatten(leaves, structure)
    return _plain_tree_map(lambda number: leaves[number], structure)


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of a nesting.

    Relies on ``torch.utils._pytree:tree_leaves``.
    Without it: as for tree_map.
    """
    return _pytree.tree_leaves(value) if _pytree is not None else tree_flatten(value)[0]
