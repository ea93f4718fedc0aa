"""However it is trained, the weights are those of one process: each pair of what goes together, in some row."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import distwrap as dw
from distwrap.testing import run_ranks
from tests.equality import program
from tests.equality.on_ranks import verdicts
from tests.equality.pairs import allowed_pairs, covering_rows
from tests.equality.rows import DIMENSIONS, FORBIDDEN, LAUNCHES, RANKS, ROWS, Row, group
from tests.forked_commands import forked_commands
from tests.interpreters import run_python
from tests.slow import nightly, slow

ROOT = Path(__file__).parents[2]
FROM_TWO = [row for row in ROWS if row.launch == "forkserver"]


@functools.cache
def trained(launch: str, is_fast: bool) -> tuple[dict[Row, list[str]], str]:
    """Train the rows of a launch; return how each went on each rank, and how the launch failed, if it did."""
    rows, failure = group(launch, is_fast), ""
    with tempfile.TemporaryDirectory(prefix="distwrap-equality-") as folder:
        try:
            _launch(launch, is_fast, Path(folder))
        except Exception as error:  # noqa: BLE001 - the rows that it leaves out have it
            failure = f"{type(error).__name__}: {error}"
        return {row: verdicts(Path(folder), str(row)) for row in rows}, failure


def _launch(launch: str, is_fast: bool, folder: Path) -> None:
    if launch == "forkserver" or launch in RANKS:
        run_ranks(program.of_launch, RANKS.get(launch, 2), launch, is_fast, folder, timeout=250)
    elif launch in ("script", "torchrun"):
        outer = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if launch == "torchrun" else []
        own = {"DISTWRAP_LAUNCHER": "script"} if launch == "script" else {"OMP_NUM_THREADS": "1", **forked_commands()}
        words = [*outer, "-m", program.__name__, launch, folder]
        done = run_python(*words, cwd=ROOT, env={**os.environ, **own}, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        dw.distributed(nprocs=2, launcher=launch, timeout=250)(program.of_launch)(launch, is_fast, folder)


def of_its_tier(row: Row) -> Any:
    if row.launch == "four ranks":
        return nightly(row, row="products", why="tests/conformance/test_conformance.py, by the hearts of both")
    return row if row.is_fast else slow(row, why="every pair of what may stand together")


@pytest.mark.timeout(300)  # a guard: the first row of a launch waits for all of them
@pytest.mark.parametrize("row", list(map(of_its_tier, ROWS)), ids=str)
def test_weights_are_those_of_one_process(row: Row) -> None:
    """After two epochs."""
    found, failure = trained(row.launch, row.is_fast)
    assert [words for words in found[row] if words] == []
    assert len(found[row]) == RANKS.get(row.launch, 2), failure


@pytest.mark.timeout(300)  # a guard
@pytest.mark.parametrize(
    "nprocs", [nightly(nprocs, row="products", why="two ranks show it in the same rows") for nprocs in (3, 4)]
)
def test_more_ranks(nprocs: int, tmp_path: Path) -> None:
    """The rows of two warm ranks again."""
    run_ranks(program.train, nprocs, FROM_TWO, tmp_path, timeout=250)
    wrong = {str(row): each for row in FROM_TWO for each in verdicts(tmp_path, str(row)) if each}
    assert wrong == {}
    assert all(len(verdicts(tmp_path, str(row))) == nprocs for row in FROM_TWO)


def test_each_pair_that_goes_together_is_in_a_row() -> None:
    """What is left out stands in the table of what is forbidden, and nothing of it is in a row."""
    rows = [set(row) for row in ROWS]
    assert [pair for pair in allowed_pairs(DIMENSIONS, FORBIDDEN) if not any(pair <= row for row in rows)] == []
    assert [pair for pair in FORBIDDEN if any(pair <= row for row in rows)] == []
    assert {row.launch for row in ROWS} == set(LAUNCHES)
    assert {row.strategy for row in ROWS if row.is_fast} == {"ddp", "fsdp", "pipeline"}
    values = [value for values in DIMENSIONS.values() for value in values]
    assert len(values) == len(set(values))
    assert {value for pair in FORBIDDEN for value in pair} <= set(values)


def test_few_rows_cover_all_pairs() -> None:
    """The rows are few, and the same in each process; what no row can have is told."""
    sizes = sorted((len(values) for values in DIMENSIONS.values()), reverse=True)
    assert max(sizes) <= len(ROWS) <= 1.2 * sizes[0] * sizes[1]
    assert covering_rows(DIMENSIONS, FORBIDDEN) == list(ROWS)
    assert covering_rows({"a": "01", "b": "xy"}, {frozenset("0x")}) == [("0", "y"), ("1", "x"), ("1", "y")]
    with pytest.raises(ValueError, match="no row has both"):
        covering_rows({"a": "01", "b": "xy", "c": "z"}, {frozenset("0x"), frozenset("0y")})
