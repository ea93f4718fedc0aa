"""torch's news of a loader's worker does not come while a failure is being told, nor after it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from distwrap.data import workers


class Endless(Dataset[torch.Tensor]):
    """Samples that take their time."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05 if index else 0)
        return torch.zeros(1)


@pytest.mark.parametrize("away", [True, False])
def test_the_news_is_kept_away(away: bool) -> None:
    """Within the ``with`` and after it; without it torch raises at any line, which shows that there is news."""
    batches: Any = iter(DataLoader(Endless(), num_workers=1))
    before = signal.getsignal(signal.SIGCHLD)
    next(batches)

    def kill() -> None:
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            time.sleep(0.01)

    if away:
        with workers.news_kept_away():
            kill()
        signal.raise_signal(signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is before
    else:
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            kill()
