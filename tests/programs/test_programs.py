"""Programs put together of parts give the numbers of one process on two and three ranks."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import distwrap as dw
from distwrap.testing import run_ranks
from tests.programs.parts import BETWEEN, CALLS, DATA, LOOPS, MODELS, OPTIMIZERS, SCHEDULERS, Found, Program, chosen
from tests.slow import nightly

PROGRAMS = chosen(160)
PARTS = 8
TOLERANCE = 1e-9
LIMIT = 100.0


def run_all(programs: Sequence[Program], folder: Path) -> list[Found | str]:
    """Run programs one after the other on this rank; one that fails is put into words, if it fails on all ranks."""
    torch.set_num_threads(1)
    found: list[Found | str] = []
    for number, program in enumerate(programs):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        try:
            found.append(program.run(place))
        except dw.DistwrapError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@cache
def in_one_process(programs: tuple[Program, ...]) -> list[Found | str]:
    """Run programs on one rank, once for all numbers of ranks that are compared to it."""
    with TemporaryDirectory() as folder:
        [found] = run_ranks(run_all, 1, programs, Path(folder), timeout=LIMIT)
    return found


def compare(programs: Sequence[Program], folder: Path, nprocs: int) -> list[str]:
    """Return in words where ranks find other numbers than one process does."""
    alone = in_one_process(tuple(programs))
    together = run_ranks(run_all, nprocs, programs, folder, timeout=LIMIT)
    wrong = []
    for number, program in enumerate(programs):
        for rank, found in enumerate(together):
            difference = _difference(alone[number], found[number])
            if not difference <= TOLERANCE:
                wrong.append(f"{program}: rank {rank} of {nprocs} differs by {difference}: {_words(found[number])}")
    return wrong


def _difference(one: Found | str, other: Found | str) -> float:
    if isinstance(one, str) or isinstance(other, str):
        return math.inf
    weights = [float((one[0][name] - other[0][name]).abs().max()) for name in one[0]]
    measured = [abs(a - b) for a, b in zip(one[1], other[1], strict=True)]
    return max([*weights, *measured, 0.0 if one[0].keys() == other[0].keys() else math.inf])


def _words(found: Found | str) -> str:
    return found if isinstance(found, str) else "weights"


@pytest.mark.parametrize(
    ("part", "nprocs"),
    [
        (0, 2),
        (1, 2),
        *(
            nightly(part, 2, row="products", why="forty programs, by each part of a program")
            for part in range(2, PARTS)
        ),
        *(nightly(part, 3, row="products", why="the same programs on two ranks") for part in range(0, PARTS, 2)),
    ],
)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_programs_give_the_numbers_of_one_process(part: int, nprocs: int, tmp_path: Path) -> None:
    """160 programs, in which each pair of parts comes up, and half of them on three ranks too."""
    assert not compare(PROGRAMS[part::PARTS], tmp_path, nprocs)


def test_pairs_of_parts() -> None:
    """The programs chosen have nearly every pair of parts."""
    assert len(set(PROGRAMS)) >= 150
    for names, part in ((MODELS, "model"), (OPTIMIZERS, "optimizer"), (LOOPS, "loop"), (DATA, "data")):
        assert {getattr(program, part) for program in PROGRAMS} == set(names)


ANY = st.builds(
    Program, *(st.sampled_from(list(names)) for names in (MODELS, OPTIMIZERS, SCHEDULERS, DATA, LOOPS, CALLS, BETWEEN))
)


@pytest.mark.nightly(row="products", why="test_programs_give_the_numbers_of_one_process")
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs=st.lists(ANY, min_size=5, max_size=10, unique=True))
def test_programs_that_nobody_has_seen(programs: list[Program], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever hypothesis puts together."""
    assert not compare(programs, tmp_path_factory.mktemp("programs"), 3)
