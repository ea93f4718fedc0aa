"""An older torch than something needs is refused, and this one does what its version says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distwrap import versions
from distwrap.errors import OptionError


def test_an_older_torch_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is needed, what is here, why, and what to use instead; the version itself is enough."""
    monkeypatch.setattr(versions, "TORCH", "2.7.1")
    monkeypatch.setattr(versions, "TORCH_RELEASE", (2, 7))
    versions.require_torch("strategy='x'", (2, 7), "it loops", "strategy='ddp'")
    with pytest.raises(OptionError) as caught:
        versions.require_torch("strategy='x'", (2, 8), "it loops", "strategy='ddp'")
    assert str(caught.value) == (
        "strategy='x' needs torch 2.8 or newer, and this is 2.7.1: before, it loops. "
        "Install a newer torch, or use strategy='ddp'."
    )


def test_this_torch_does_what_its_version_says() -> None:
    """What can be asked for agrees with the version."""
    assert hasattr(dist.Store, "clone") == versions.STORES_CLONE
    assert hasattr(torch.accelerator, "empty_cache") == versions.ASKS_WITHOUT_DRIVER
