"""Datasets without an index, for tests of several rooms."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import IterableDataset


class Resumable(IterableDataset[int]):
    """The numbers up to n, from a stream that knows its own position."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
