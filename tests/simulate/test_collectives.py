"""Each collective and message gives simulated ranks what gloo gives real ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from distwrap.testing import run_ranks, simulate
from tests.simulate import collectives

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch's renamed functions


@functools.cache
def results(size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return run_ranks(collectives.all_results, size), simulate(collectives.all_results, size)


@pytest.mark.parametrize("name", collectives.RESULTS)
@pytest.mark.parametrize("size", [2, 3])
def test_it_gives_what_gloo_gives(name: str, size: int) -> None:
    """On every rank, to the last bit: the sums of so few numbers have no rounding."""
    real, simulated = results(size)
    for rank in range(size):
        assert as_plain(simulated[rank][name]) == as_plain(real[rank][name])


def as_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    return [as_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
