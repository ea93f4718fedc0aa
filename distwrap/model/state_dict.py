"""Repair the keys of a state dict: remove what wrappers put in front, or put it there.

DistributedDataParallel and DataParallel keep the user's model as ``module``, torch.compile as ``_orig_mod``, FSDP and
activation checkpointing as ``_fsdp_wrapped_module`` and ``_checkpoint_wrapped_module``; so do the keys they save.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, TypeVar

from torch import nn

from distwrap._internals.torch import metadata_of, set_metadata
from distwrap.errors import StateDictError

StateDict = TypeVar("StateDict", bound="Mapping[str, Any]")

MODULE = "module"
# No user names a child so: these are a wrapper's wherever they stand.
_MARKS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def strip_module_prefix(
    state_dict: StateDict, *, target: nn.Module | Mapping[str, Any] | Iterable[str] | None = None
) -> StateDict:
    """Remove ``module.``, ``_orig_mod.`` and FSDP's prefix from the keys of a state dict, in any nesting.

    ``module.`` is taken for a wrapper's prefix if every key has it, at its beginning or behind the prefix of another
    wrapper. A child of the model that is really called ``module`` keeps its name if it has siblings; if it is the only
    child, only `target` can tell.

    Args:
        state_dict: the saved state; it is not changed, and its tensors are not copied.
        target: the model that is to load it, or the state dict or the keys of that model. Each key then gets the
            target's own spelling, and keys that the target lacks are stripped as without it.

    Returns:
        A state dict of the same type, order and metadata.

    Raises:
        StateDictError: two keys would become one.

    Example:
        >>> strip_module_prefix({"module._orig_mod.weight": 1, "module._orig_mod.bias": 2})
        {'weight': 1, 'bias': 2}
    """
    keys = list(state_dict)
    others = [key for key in keys if not isinstance(key, str)]
    if others:
        raise StateDictError(f"a state dict has names as keys, but this one has {others[0]!r}.")
    root = _root(keys)
    bare = [key[len(root) :] for key in keys] if root else keys
    marked = any("_orig_mod" in name or "_wrapped_module" in name for name in bare)
    real = _real_modules(bare) if marked else set()
    names = [_unmarked(name, real) for name in bare] if marked else bare
    if target is None:
        return _rebuilt(state_dict, names, lambda path: _stripped_path(path, root, real))
    names = _aligned(keys, names, target)
    parents = {_parent(old): _parent(new) for old, new in zip(keys, names, strict=True)}
    return _rebuilt(
        state_dict, names, lambda path: parents[path] if path in parents else _stripped_path(path, root, real)
    )


def add_module_prefix(state_dict: StateDict) -> StateDict:
    """Put ``module.`` in front of every key, which a bare DistributedDataParallel or DataParallel needs to load it.

    Args:
        state_dict: the state of the plain model; it is not changed.

    Example:
        >>> add_module_prefix({"weight": 1})
        {'module.weight': 1}
    """
    return _rebuilt(state_dict, [f"{MODULE}.{key}" for key in state_dict], lambda path: f"{MODULE}.{path}".rstrip("."))


def _root(keys: list[str]) -> str:
    """Find the wrappers' names that all keys begin with, as ``"module._orig_mod."``."""
    root = ""
    parts = keys[0].split(".")[:-1] if keys else []
    for part in parts:
        if part != MODULE and part not in _MARKS:
            break
        longer = f"{root}{part}."
        if not all(map(str.startswith, keys, repeat(longer))):
            break
        root = longer
    return root


def _real_modules(names: list[str]) -> set[str]:
    """Find the parents of children really called ``module`` and wrapped alone: a wrapper's has nothing beside it."""
    children: dict[str, set[str]] = {}  # of each module, by its name with a dot at the end; "" is the model itself
    for name in names:
        start = 0
        for part in name.split("."):
            children.setdefault(name[:start], set()).add(part)
            start += len(part) + 1
    return {parent for parent, parts in children.items() if MODULE in parts and len(parts) > 1}


def _unmarked(key: str, real: set[str]) -> str:
    """Remove the marks, and each ``module`` in front of one that is not the user's own."""
    kept: list[str] = []
    parts, start = key.split("."), 0
    for index, part in enumerate(parts):
        is_users = part != MODULE or key[:start] in real or not _in_chain_with_mark(parts, index)
        if part not in _MARKS and is_users:
            kept.append(part)
        start += len(part) + 1
    return ".".join(kept)


def _in_chain_with_mark(parts: list[str], index: int) -> bool:
    """Return whether wrappers' names from here on meet a mark: as in ``module._orig_mod``, not ``_orig_mod.module``.

    What follows a mark directly may be the user's own child called ``module``.
    """
    return next((part in _MARKS for part in parts[index + 1 :] if part != MODULE), False)


def _aligned(keys: list[str], stripped: list[str], target: nn.Module | Mapping[str, Any] | Iterable[str]) -> list[str]:
    """Spell each key as the target does; what the target lacks stays stripped, for the loader to report."""
    wanted = list(target.state_dict() if isinstance(target, nn.Module) else target)
    exact = set(wanted)
    front = _root(wanted)
    for names in (keys, stripped, [front + key for key in keys], [front + name for name in stripped]):
        if exact.issuperset(names):
            return names
    if exact.intersection(keys) and not exact.intersection(stripped):
        return keys
    by_bare: dict[str, list[str]] = {}
    for name in wanted:
        by_bare.setdefault(_bare(name), []).append(name)
    names = []
    for key, name in zip(keys, stripped, strict=True):
        candidates = by_bare.get(_bare(key), [])
        if name not in exact and candidates:
            # Several candidates: the target has real children called `module`, and the longest that fits is meant.
            fitting = [candidate for candidate in candidates if key.endswith(f".{candidate}")] or candidates[:1]
            name = max(fitting, key=len)
        names.append(name)
    return names


def _bare(key: str) -> str:
    if MODULE not in key and "_mod" not in key:
        return key
    return ".".join(part for part in key.split(".") if part != MODULE and part not in _MARKS)


def _rebuilt(state_dict: StateDict, names: list[str], rename_path: Callable[[str], str]) -> StateDict:
    """Copy the container with new keys; ``_metadata``, which torch hangs on it, gets its paths renamed."""
    first: dict[str, str] = {}
    for key, name in zip(state_dict, names, strict=True):
        if first.setdefault(name, key) != key:
            raise StateDictError(
                f"the keys {first[name]!r} and {key!r} would both become {name!r}. Pass target=model to align them."
            )
    result: Any = copy.copy(state_dict)
    result.clear()
    result.update(zip(names, state_dict.values(), strict=True))
    metadata = metadata_of(state_dict)
    if metadata is not None:
        # A wrapper's own entry comes before the entry of what it wraps, which is the one to keep.
        renamed = type(metadata)()
        for path, value in metadata.items():
            renamed[rename_path(path)] = value
        set_metadata(result, renamed)
    return result  # type: ignore[no-any-return]


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _stripped_path(path: str, root: str, real: set[str]) -> str:
    if root.startswith(f"{path}."):
        return ""
    return _unmarked(f"{path}."[len(root) :].rstrip(".") if f"{path}.".startswith(root) else path, real)
