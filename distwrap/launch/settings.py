"""Settings that a program makes at its top level, brought to ranks that are no forks of it and do not run it again.

They decide what a rank computes: torch's default dtype and device, its precision of matrix products and deterministic
mode, the filters of warnings, and what numpy does about errors of arithmetic. Others, as of logging, belong into the
function.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from distwrap._internals.torch import default_device


def _numpys_errors() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {} if numpy is None else numpy.geterr()


def _filters() -> list[Any]:
    """Return the filters of warnings, but for those of the script's own classes, which a rank may not know."""
    return [each for each in warnings.filters if each[2].__module__ != "__main__"]


@dataclass(frozen=True)
class Settings:
    """Settings of the process in which it is made."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    device: torch.device | None = field(default_factory=default_device)
    matmul: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: int = field(default_factory=torch.get_deterministic_debug_mode)
    filters: list[Any] = field(default_factory=_filters)
    numpy: dict[str, Any] = field(default_factory=_numpys_errors)

    def restore(self) -> None:
        """Make this process like it, where it differs."""
        torch.set_default_dtype(self.dtype)
        if self.device != default_device():
            torch.set_default_device(self.device)
        torch.set_float32_matmul_precision(self.matmul)
        if self.deterministic != torch.get_deterministic_debug_mode():
            torch.set_deterministic_debug_mode(self.deterministic)
        if self.filters != _filters():
            warnings.resetwarnings()
            warnings.filters.extend(self.filters)  # type: ignore[attr-defined]
        if self.numpy != _numpys_errors():
            import numpy

            numpy.seterr(**self.numpy)
