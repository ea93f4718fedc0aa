"""Convert states into plain values for torch's safe loader, and copy them for writing in the background.

Source of the safe loader: https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
"""

from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Parameter

from distwrap._internals.torch import metadata_of, set_metadata
from distwrap.checkpoint.pieces import Later, Piece
from distwrap.checkpoint.untrusted import DEEPEST
from distwrap.errors import CheckpointError
from distwrap.model import unwrap_model
from distwrap.model.wrapped_models import bound_strategy
from distwrap.nesting import rebuilt

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.Size, torch.dtype, torch.device)


def plain(value: Any, where: str = "", depth: int = 0) -> Any:
    """Return a state in which objects are replaced by their state dicts.

    Args:
        value: any part of the state.
        where: its position in the state.
        depth: the number of containers around it.

    Raises:
        CheckpointError: the safe loader would refuse a value, which the message names; or parts are nested too deep.
    """
    if depth > DEEPEST:
        raise CheckpointError(
            f"the state is nested deeper than {DEEPEST} levels, or contains itself: save a flatter one"
        )
    below = depth + 1
    if type(value) in (dict, OrderedDict, Counter):
        items = {
            plain(key, f"'s key {key!r}", below): plain(item, f"{where}[{key!r}]", below) for key, item in value.items()
        }
        if type(value) is not OrderedDict:
            return type(value)(items)
        result = OrderedDict(items)
        set_metadata(result, metadata_of(value))
        return result
    if type(value) in (list, tuple, set):
        return type(value)(plain(item, f"{where}[{index}]", below) for index, item in enumerate(value))
    if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
        return value.detach().resolve_conj().resolve_neg()  # its memory does not hold its values
    if isinstance(value, _PLAIN) and type(value).__module__.split(".")[0] in ("builtins", "torch"):
        return value
    if isinstance(value, Later):
        return value
    strategy = bound_strategy(value)
    if strategy is not None:
        return plain(strategy.state(value), f"{where}.state_dict()", depth)
    if isinstance(value, torch.nn.Module):
        value = unwrap_model(value)
    if callable(getattr(value, "state_dict", None)):
        return plain(value.state_dict(), f"{where}.state_dict()", depth)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = " (use .item() or torch.as_tensor(…))" if kind.startswith("numpy.") else ""
    if isinstance(value, torch.Tensor):
        hint = ". Of a divided model give save() the model itself: save({'model': model}, path)"
    raise CheckpointError(
        f"state{where} is a {kind}, which the safe loader refuses; save plain values or tensors{hint}"
    )


def on_cpu(state: Any) -> Any:
    """Return a plain state whose tensors are on the CPU, since another machine may lack the device in a file.

    A `Piece` stays as it is.
    """
    return Staging(of_cpu_too=False).copied(state)


class Staging:
    """Memory for copies of states that are written in the background; reused for the next state.

    Tensors that share memory share it in the copy too, as in the file.

    Args:
        of_cpu_too: whether tensors on the CPU are copied too.
    """

    def __init__(self, *, of_cpu_too: bool = True) -> None:
        self._of_cpu_too = of_cpu_too
        self._storages: list[torch.UntypedStorage] = []

    def copied(self, state: Any) -> Any:
        """Return a copy of a plain state on the CPU, which overwrites the previous copy."""
        free, copies = self._storages, {}
        self._storages = []

        def copy(leaf: Any, path: tuple[Any, ...]) -> Any:
            if isinstance(leaf, Piece) and self._of_cpu_too:
                return replace(leaf, local=copy(leaf.local, path))
            if not isinstance(leaf, torch.Tensor) or (leaf.device.type == "cpu" and not self._of_cpu_too):
                return leaf
            if leaf.layout is not torch.strided or leaf.is_quantized or type(leaf) not in (torch.Tensor, Parameter):
                return leaf.detach().cpu().clone()
            storage = leaf.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes(), leaf.device)
            if key not in copies:
                copies[key] = self._copy_of(free, storage)
            twin = torch.empty(0, dtype=leaf.dtype, device="cpu")
            twin.set_(copies[key], leaf.storage_offset(), leaf.size(), leaf.stride())
            return twin if type(leaf) is torch.Tensor else Parameter(twin, leaf.requires_grad)

        return rebuilt(state, copy)

    def _copy_of(self, free: list[torch.UntypedStorage], storage: torch.UntypedStorage) -> torch.UntypedStorage:
        size = storage.nbytes()
        found = next((index for index, one in enumerate(free) if one.nbytes() == size), None)
        copy = torch.UntypedStorage(size) if found is None else free.pop(found)  # type: ignore[no-untyped-call]
        # Several threads copy tensors of bytes.
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(copy).copy_(source)
        self._storages.append(copy)
        return copy
