"""A wrapped model that answers like the user's own: attributes, methods, parameter names, state dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distwrap.state_dict import strip_module_prefix


class TransparentModule(nn.Module):
    """Mixin for wrappers that hold the user's model as ``module``.

    What the wrapper does not have itself is looked up on the model; names and keys carry no prefix. Pickled or
    copied, it is the plain model: a copy trains nothing with the others.
    """

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and not name.startswith("_") and not hasattr(type(self), name):
            modules = self.__dict__.get("_modules")
            if modules and "module" in modules and name != "module":
                setattr(modules["module"], name, value)
                return
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self.__dict__.get("_modules", ()):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted(
            {
                *super().__dir__(),  # type: ignore[no-untyped-call]
                *dir(self.module),
            }
        )

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (unwrap_model(self),)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict, without a prefix."""
        state: dict[str, Any] = unwrap_model(self).state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights saved with or without a wrapper."""
        model = unwrap_model(self)
        return model.load_state_dict(strip_module_prefix(dict(state_dict), target=model), *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Reached when the wrapper is a part of another module: its keys have no "module." there.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if not key.startswith(f"{prefix}module."):
                state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Name the parameters as the model does."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Name the buffers as the model does."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Name the modules as the model does."""
        names: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return names

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Name the children as the model does."""
        return self.module.named_children()


def _same(model: nn.Module) -> nn.Module:
    return model


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's model out of any nesting of distwrap, DDP, DataParallel and torch.compile.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> unwrap_model(nn.DataParallel(model)) is model
        True
    """
    while True:
        if isinstance(model, (TransparentModule, nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
