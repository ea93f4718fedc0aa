"""Pretended accelerators, and what runs on those or on real ones."""

from __future__ import annotations

import torch


def accelerator() -> str:
    """Return torch's name of the accelerator's type; for tests that are marked ``gpu``."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device.type
