"""DeepSpeed, and what its engine imports when it is made: torch's compiler, for an optimizer that nobody asked for."""

from __future__ import annotations

import pytest

from distwrap.strategies.deepspeed.engine import quiet

with pytest.MonkeyPatch.context() as patched, quiet(verbose=False):
    patched.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
