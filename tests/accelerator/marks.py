"""The tier of what needs an accelerator, but for what `make test-all` runs of it."""

from __future__ import annotations

import pytest

in_nightly = pytest.mark.nightly(
    row="accelerator", why="on the CPU the same is shown, and by other tests here on two devices"
)
