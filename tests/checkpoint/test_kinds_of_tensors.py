"""Tensors of every kind that people save are loaded: without memory, sparse, quantized, parts of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap.versions import TORCH_RELEASE

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:TypedStorage", "ignore:torch.quantize_per")
MANY = 50_000_000
ONE, ZERO = torch.ones(1), torch.zeros(1, dtype=torch.int64)


def in_channels() -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(4, 4), torch.ones(4), ZERO.expand(4).clone(), 0, torch.qint8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ONE.expand(MANY),
        lambda: torch.empty(10**6, 10**6, device="meta"),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 5], [3, 7]]), torch.ones(2), (10**9, 10**9)),
        lambda: torch.eye(50).to_sparse_csr(),
        lambda: [torch.nn.Parameter(row) for row in torch.ones(300, 30_000).unbind()],
        lambda: [torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, dtype=torch.complex64).conj().imag],
        in_channels,
    ],
    ids=["expanded", "meta", "sparse", "csr", "parts of one", "complex", "quantized"],
)
@pytest.mark.parametrize("map_location", ["cpu", "meta"])
def test_what_people_save(tmp_path: Path, make: Callable[[], Any], map_location: str) -> None:
    """Neither a tensor without memory, nor many parts of one, nor a large sparse one is more than its file."""
    if make is in_channels and map_location == "meta":
        return  # torch has no quantized tensors without numbers
    state = make()
    is_sparse = "sparse" in str(getattr(state, "layout", ""))
    if map_location == "meta" and is_sparse and not (2, 7) <= TORCH_RELEASE < (2, 15):
        return  # nor sparse ones, in 2.6 and from 2.15 on
    torch.save(state, tmp_path / "a.pt")
    assert type(dw.load(tmp_path / "a.pt", map_location=map_location)) is type(state)
