"""Refusal of versions of torch that lack what a strategy needs."""

from __future__ import annotations

import torch

from distwrap._internals.torch import TORCH
from distwrap.errors import OptionError


def require_torch(what: str, least: tuple[int, int], why: str, otherwise: str) -> None:
    """Refuse an older version of torch.

    Args:
        what: needs the version.
        least: the first version that has it.
        why: what an older one lacks.
        otherwise: what can be used with this version.

    Raises:
        OptionError: this torch is older.
    """
    if least > TORCH:
        raise OptionError(
            f"{what} needs torch {least[0]}.{least[1]} or newer, and this is {torch.__version__}: before, {why}. "
            f"Install a newer torch, or use {otherwise}."
        )
