"""What each loader does is said once: samples a rank and a step, steps an epoch, mode, order."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from distwrap import shard_loader
from tests.data.ranks import standing_on


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(int, 1)


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"batch_size": 16, "shuffle": True},
        {},
        "16 a rank x 4 ranks = 64 a step; 16 steps an epoch (63 in one process); mode pad (all ranks get "
        "equally many samples); shuffled in the order of torch's DistributedSampler",
    ),
    (
        {"batch_size": 16},
        {"batch_size": "global"},
        "4 a rank x 4 ranks = 16 a step; 63 steps an epoch (63 in one process); mode exact (each sample once); "
        "in order",
    ),
    (
        {"batch_size": 10, "shuffle": True, "drop_last": True},
        {"order": "stream", "mode": "drop"},
        "10 a rank x 4 ranks = 40 a step; 25 steps an epoch (100 in one process); mode drop (samples that do "
        "not divide evenly are left out); shuffled in the same order on any number of ranks",
    ),
    (
        {"batch_size": None, "sampler": WeightedRandomSampler([1.0] * 1000, 400)},
        {},
        "100 steps an epoch (400 in one process); mode pad (all ranks get equally many samples); "
        "order of its WeightedRandomSampler",
    ),
]


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTWRAP_QUIET", "0")


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize(("options", "sharding", "said"), CASES)
def test_a_line_a_loader(
    options: dict[str, Any], sharding: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On rank 0, for each place in the code once."""
    for rank in (1, 0):
        with standing_on(rank, 4):
            for _ in range(2):
                shard_loader(DataLoader(range(1000), **options), **sharding)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("distwrap: loader at test_start_line.py:")
    assert lines[0].partition(": ")[2].partition(": ")[2] == said


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize(
    ("samples", "options", "sharding", "said"),
    [
        (
            9,
            {"shuffle": True},
            {},
            "3 steps an epoch (9 in one process); mode pad (all ranks get equally many samples, 3 of them twice)",
        ),
        (
            1,
            {},
            {"mode": "pad"},
            "1 step an epoch (1 in one process); mode pad (all ranks get equally many samples, 3 of them repeated)",
        ),
        (
            6,
            {"batch_sampler": [[0, 1], [2], [3, 4], [5], [0]]},
            {"mode": "pad"},
            "all ranks get equally many batches, 3 of them twice",
        ),
        (
            2,
            {"batch_size": 2},
            {},
            "1 step an epoch (1 in one process); mode exact (each sample once); ranks 2, 3 of 4 will have no batch",
        ),
        (3, {"batch_size": 2}, {}, "rank 3 of 4 will have no batch, as there are fewer samples than ranks"),
    ],
)
def test_what_does_not_divide_is_counted(
    samples: int, options: dict[str, Any], sharding: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many samples are repeated, and which ranks have none at all; nothing where all divides evenly."""
    with standing_on(0, 4):
        shard_loader(DataLoader(range(samples), **options), **sharding)  # type: ignore[arg-type]
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("loud")
def test_an_iterable_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    """Says how it is divided."""
    with standing_on(0, 2):
        shard_loader(DataLoader(Endless()), mode="exact", split="items")
    assert capsys.readouterr().err.endswith(": Endless, divided: every n-th item\n")


@pytest.mark.usefixtures("loud")
def test_a_single_process_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to say."""
    shard_loader(DataLoader(range(8), shuffle=True))  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
