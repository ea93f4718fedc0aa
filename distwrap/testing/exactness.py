"""The type in which the nets of a suite compute, and how closely their numbers are compared in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}

_type = torch.float64


def exact_type() -> torch.dtype:
    """Return the type in which nets compute where a behaviour is of no precision."""
    return _type


def tolerance() -> float:
    """Return by how much numbers in that type may differ from one process's."""
    return TOLERANCES[_type]


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Let nets compute in another type within a ``with``."""
    global _type
    before, _type = _type, dtype
    try:
        yield
    finally:
        _type = before


@dataclass(frozen=True)
class Computing:
    """A function for a rank, whose nets compute in a type."""

    fn: Callable[..., Any]
    dtype: torch.dtype

    def __call__(self, *args: Any) -> Any:
        with computing_in(self.dtype):
            return self.fn(*args)
