"""The two tiers of tests on pretended devices: `make test` has none, since a compiler works a minute for them."""

from __future__ import annotations

import pytest

again = pytest.mark.slow("a test of the CPU again, on pretended devices")
in_nightly = pytest.mark.nightly(
    row="accelerator", why="on the CPU the same is shown, and by other tests here on two devices"
)
