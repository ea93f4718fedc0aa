"""A tensor that looks large and takes no memory stays so: no file of 2 KB takes a gigabyte before it is refused."""

from __future__ import annotations

import resource
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import _rebuild_device_tensor_from_cpu_tensor, _rebuild_qtensor, _rebuild_sparse_tensor
from torch.serialization import _get_layout

import distwrap as dw
from distwrap.errors import CheckpointError
from distwrap.versions import TORCH_RELEASE

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:TypedStorage", "ignore:torch.quantize_per")
MANY = 50_000_000
ONE, ZERO = torch.ones(1), torch.zeros(1, dtype=torch.int64)
ROWS = torch.ones(1).expand(2_000_000)


class Call:
    """Object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *parameters: Any) -> None:
        self.reduced = function, parameters

    def __reduce__(self) -> Any:
        return self.reduced


class Rows(tuple[Any, ...]):
    """Parameters of a call that are a tensor in the pickle, of which each row becomes a parameter."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ROWS.__reduce_ex__(protocol)


class CallOfRows:
    """Object whose pickle calls a function with the rows of a tensor."""

    def __reduce__(self) -> Any:
        return OrderedDict, Rows()


def sparse(is_coalesced: bool) -> Call:
    layout = Call(_get_layout, "torch.sparse_coo")
    return Call(_rebuild_sparse_tensor, layout, (ZERO.expand(1, MANY), ONE.expand(MANY), (10,), is_coalesced))


def in_channels() -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(4, 4), torch.ones(4), ZERO.expand(4).clone(), 0, torch.qint8)


def quantized() -> Call:
    per_channel = (torch.per_channel_affine, ONE.expand(MANY), ZERO.expand(MANY), 0)
    return Call(_rebuild_qtensor, in_channels()._typed_storage(), 0, (MANY,), (0,), per_channel, False, OrderedDict())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Call(_rebuild_device_tensor_from_cpu_tensor, ONE.expand(MANY), torch.float64, "cpu", False),
        lambda: sparse(True),
        lambda: sparse(False),
        quantized,
        lambda: Call(set, ROWS),
        lambda: Call(Counter, ROWS),
        CallOfRows,
        lambda: Call(torch.Size, Call(torch.UntypedStorage, 20_000_000)),
    ],
    ids=["copied", "coalesced", "not coalesced", "quantized", "set", "counter", "parameters", "storage"],
)
def test_what_only_looks_large(tmp_path: Path, make: Callable[[], Any]) -> None:
    """A copy of it, an object of each row, or a check of each number takes what the file does not have."""
    torch.save({"w": make()}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 4000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"more of its numbers|makes an empty"):
        dw.load(tmp_path / "a.pt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000


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
