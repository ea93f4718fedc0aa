"""What ranks exchange, and that a disagreement is everybody's error."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap.errors import CollectiveError, OptionError, WorkerTimeoutError
from distwrap.testing import run_ranks

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def test_gather_joins_uneven_shares_in_rank_order() -> None:
    """The first dimension may differ between ranks and be empty; the result is the same on all of them."""

    def on_rank() -> tuple[list[float], torch.Size]:
        n = (2, 0, 3)[dw.rank()]
        x = torch.full((n, 2), float(dw.rank()), dtype=torch.float64, requires_grad=True)
        gathered = dw.gather(x)
        assert dw.gather(torch.empty(0, 5)).shape == (0, 5)
        assert dw.gather(torch.arange(6).reshape(3, 2).T)[:2].tolist() == [[0, 2, 4], [1, 3, 5]]
        return gathered[:, 0].tolist(), gathered.shape

    assert run_ranks(on_rank, 3) == [([0, 0, 2, 2, 2], (5, 2))] * 3


def test_gather_takes_numbers_and_nestings() -> None:
    """Numbers, booleans and 0-d tensors become one element a rank, and containers keep their form."""

    def on_rank() -> None:
        r = dw.rank()
        result = dw.gather({"n": r, "x": [r + 0.5, (r == 0, torch.tensor(r))], "t": torch.arange(r + 1), "none": []})
        assert result["n"].tolist() == [0, 1]
        assert result["n"].dtype == torch.int64
        assert result["x"][0].tolist() == [0.5, 1.5]
        assert result["x"][0].dtype == torch.float64
        assert isinstance(result["x"][1], tuple)
        assert result["x"][1][0].tolist() == [True, False]
        assert result["x"][1][1].tolist() == [0, 1]
        assert result["t"].tolist() == [0, 0, 1]
        assert result["none"] == []

    run_ranks(on_rank, 2)


def test_every_dtype_comes_through() -> None:
    """Gather and broadcast keep the values and the type of every dtype, those that gloo does not know included."""

    def on_rank() -> None:
        for dtype in DTYPES:
            x = torch.tensor([dw.rank(), 1]).to(dtype)
            gathered, sent = dw.gather(x), dw.broadcast(x, src=1)
            assert gathered.dtype == sent.dtype == dtype
            assert torch.equal(gathered, torch.tensor([0, 1, 1, 1]).to(dtype))
            assert torch.equal(sent, torch.tensor([1, 1]).to(dtype))
            assert dw.broadcast(x[0], src=1).shape == ()

    run_ranks(on_rank, 2)


MISMATCHES: dict[str, Callable[[int], Any]] = {
    "dtype": lambda rank: torch.ones(2, dtype=(torch.float32, torch.float64)[rank]),
    "trailing shape": lambda rank: torch.ones(2, 3 + rank),
    "dimensions": lambda rank: torch.ones((2,) * (rank + 1)),
    "number of items": lambda rank: [1.0] * (rank + 1),
    "names": lambda rank: {"ab"[rank]: 1.0},
    "unknown type": lambda rank: (1.0, "text")[rank],
    "nothing": lambda rank: (1.0, None)[rank],
}


@pytest.mark.parametrize("exchange", [dw.gather, dw.reduce])
def test_a_mismatch_is_an_error_on_every_rank(exchange: Callable[[Any], Any]) -> None:
    """Where ranks hold different things every rank raises, none waits, and the next exchange works."""

    def on_rank() -> int:
        for make in MISMATCHES.values():
            with pytest.raises(CollectiveError, match="rank 1"):
                exchange(make(dw.rank()))
        return dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2, timeout=20) == [2, 2]


def test_a_mismatch_of_trailing_dimensions_shows_whole_shapes() -> None:
    """Where gather() refuses shapes, the message has them with the first dimension, as the user sees them."""

    def on_rank() -> str:
        with pytest.raises(CollectiveError) as refusal:
            dw.gather(torch.ones(2, 3 + dw.rank()))
        return str(refusal.value)

    text = run_ranks(on_rank, 2, timeout=20)[1]
    assert text.endswith("Rank 0 has float32[2, 3], rank 1 has float32[2, 4].")


def test_reduce_combines_in_four_ways() -> None:
    """Mean, sum, min and max, element by element, in any nesting; numbers come back as numbers."""

    def on_rank() -> None:
        r = float(dw.rank())
        value = {"t": torch.tensor([r, -r]), "n": [r, int(r)]}
        assert dw.reduce(value)["t"].tolist() == [1, -1]
        assert dw.reduce(value)["n"] == [1.0, 1.0]
        assert dw.reduce(value, "sum")["n"] == [3.0, 3]
        assert type(dw.reduce(value, "sum")["n"][1]) is int
        assert dw.reduce(value, "min")["t"].tolist() == [0, -2]
        assert dw.reduce(value, "max")["t"].tolist() == [2, 0]
        assert value["t"].tolist() == [r, -r]
        transposed = torch.arange(6.0).reshape(2, 3).T
        assert torch.equal(dw.reduce(transposed), transposed)

    run_ranks(on_rank, 3)


def test_reduce_of_whole_numbers_and_booleans() -> None:
    """A mean of them is a float64 and a sum an int64 that does not wrap around; min and max keep the type."""

    def on_rank() -> None:
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
            x = torch.tensor([100, dw.rank()]).to(dtype)
            total, average = dw.reduce(x, "sum"), dw.reduce(x)
            assert (total.tolist(), total.dtype) == ([300, 3], torch.int64)
            assert (average.tolist(), average.dtype) == ([100, 1], torch.float64)
            assert (dw.reduce(x, "max").tolist(), dw.reduce(x, "max").dtype) == ([100, 2], dtype)
        flags = torch.tensor([True, dw.rank() == 0])
        assert dw.reduce(flags, "sum").tolist() == [3, 1]
        assert dw.reduce(flags, "max").tolist() == [True, True]
        assert dw.reduce(flags, "min").tolist() == [True, False]
        assert dw.reduce(dw.rank() == 0) == pytest.approx(1 / 3)
        assert dw.reduce(dw.rank() == 0, "max") is True
        assert dw.reduce(flags).dtype == torch.float64

    run_ranks(on_rank, 3)


VALUES = {
    "float32": torch.tensor([[1.5, -2.0, 0.0], [2.0, 3.0, torch.nan], [-4.0, torch.inf, 1.0]]),
    "bfloat16": torch.tensor([[1.5, -2.0], [2.0, 3.0], [-4.0, 0.5]], dtype=torch.bfloat16),
    "float64": torch.tensor([[1 / 3, 1e100], [7.0, 1e100], [0.1, 1e-100]], dtype=torch.float64),
    "complex64": torch.tensor([[1 + 2j, 1j], [3 - 1j, 1j], [2j, 1j]]),
    "uint8": torch.tensor([[200, 3], [200, 5], [200, 0]], dtype=torch.uint8),
    "int64": torch.tensor([[2**40, -3], [2**20, 5], [-4, 7]]),
    "bool": torch.tensor([[True, True], [True, False], [True, True]]),
    "empty": torch.empty(3, 0),
}


def test_a_product_is_that_of_one_process() -> None:
    """Of each type, element by element, in float32 or wider, and whole numbers in int64; NaN stays NaN."""

    def on_rank() -> dict[str, torch.Tensor]:
        mine = {name: values[dw.rank()] for name, values in VALUES.items()}
        assert dw.reduce([2.0, dw.rank() + 1], "product") == [8.0, 6]
        with pytest.raises(CollectiveError, match=r"a product of torch\.int64 is too large"):
            dw.reduce(2**31 * (1 + dw.rank()), "product")
        return dw.reduce(mine, "product")

    for found in run_ranks(on_rank, 3):
        for name, values in VALUES.items():
            wide = values.float() if name == "bfloat16" else values
            expected = wide.prod(0).to(torch.bfloat16) if name == "bfloat16" else wide.prod(0)
            assert found[name].dtype == expected.dtype, name
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=0, equal_nan=True, msg=name)


def test_gather_pads_sequences_to_the_longest_of_all_ranks() -> None:
    """With a number to pad by, all dimensions but the first may differ, in any nesting; gradients go back."""

    def on_rank() -> None:
        r = dw.rank()
        tokens = torch.full((r + 1, 2 + r), r + 1)
        scores = torch.ones(1, 2 - r, 1 + r, requires_grad=True)
        got = dw.gather({"tokens": tokens, "scores": scores, "hits": torch.ones(1, 2 - r, dtype=torch.bool)}, pad=0)
        assert got["tokens"].tolist() == [[1, 1, 0], [2, 2, 2], [2, 2, 2]]
        assert got["scores"].shape == (2, 2, 2)
        assert got["scores"].sum() == 4
        assert got["hits"].tolist() == [[True, True], [True, False]]
        (got["scores"] * 3).sum().backward()
        assert scores.grad is not None
        assert scores.grad.tolist() == torch.full_like(scores, 6).tolist()
        assert dw.gather(tokens, pad=-100, interleave=True).tolist() == [[1, 1, -100], [2, 2, 2], [2, 2, 2]]
        assert dw.gather(torch.empty(0, 3 * r), pad=0).shape == (0, 3)
        assert dw.gather(torch.ones(1, 1 + r).half(), pad=-math.inf).tolist() == [[1, -math.inf], [1, 1]]
        assert dw.gather(float(r), pad=0).tolist() == [0, 1]
        same = torch.ones(2, 3)
        assert torch.equal(dw.gather(same, pad=7.0), torch.ones(4, 3))

    run_ranks(on_rank, 2)


def test_what_cannot_be_padded_is_an_error_on_every_rank() -> None:
    """Another number of dimensions, a number that the type lacks, a rank that does not pad: nobody waits."""

    def on_rank() -> int:
        r = dw.rank()
        for value, pad in (
            (torch.ones((2,) * (r + 1)), 0),
            (torch.ones(2, 3 + r), (0, None)[r]),
            (torch.ones(2, 3 + r), (0, 1)[r]),
            (torch.ones(2, 3), (0, float("nan"))[r]),
        ):
            with pytest.raises(CollectiveError, match="the ranks hold different things"):
                dw.gather(value, pad=pad)
        lacking: list[tuple[torch.dtype, float]] = [(torch.int64, 0.5), (torch.uint8, -100), (torch.bool, 2)]
        lacking += [(torch.int16, float("inf")), (torch.float16, 70000), (torch.int64, 10**20)]
        for dtype, pad in lacking:
            with pytest.raises(CollectiveError, match=rf"gather\(pad={pad}\): {str(dtype)[6:]} does not hold"):
                dw.gather(torch.ones(1, dtype=(torch.float32, dtype)[r]), pad=pad)
        return dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2, timeout=20) == [2, 2]
    with pytest.raises(OptionError, match=r"gather\(pad='0'\): it must be a number"):
        dw.gather(torch.ones(1), pad="0")  # type: ignore[arg-type]


def test_mean_weighs_by_count() -> None:
    """Each rank's mean counts as often as it has items; with none its value, NaN perhaps, does not count at all."""

    def on_rank() -> None:
        r = dw.rank()
        assert dw.mean((1.0, 4.0, float("nan"))[r], (1, 2, 0)[r]) == 3.0
        assert dw.mean((1.0, 4.0, 4.0)[r]) == 3.0
        assert dw.mean((1, 4, 4)[r]) == 3.0
        batch = torch.tensor([1.0, 2.0]) * r
        assert dw.mean(batch, r).tolist() == pytest.approx([5 / 3, 10 / 3])
        assert dw.mean(batch, r).dtype == torch.float32
        with pytest.raises(CollectiveError, match="count is 0 on every rank"):
            dw.mean(float("nan"), 0)

    run_ranks(on_rank, 3)


def test_mean_is_exact_where_float32_is_not() -> None:
    """The sum is taken in float64: large counts of float32 means lose nothing."""

    def on_rank() -> float:
        return dw.mean(torch.tensor((1.0, 0.0)[dw.rank()]).double(), (1, 2**25)[dw.rank()]).item()

    assert run_ranks(on_rank, 2) == [1 / (2**25 + 1)] * 2


def test_broadcast_sends_one_ranks_value() -> None:
    """Tensors and other values in any nesting come from the rank that is named; the others' are ignored."""

    def on_rank() -> None:
        r = dw.rank()
        value = {"t": torch.full((2, 1), float(r)), "list": [r, "text", None, torch.tensor(r)], "e": torch.empty(0, 3)}
        for src in (0, 1):
            got = dw.broadcast(value if r == src else None, src=src)
            assert got["t"].tolist() == [[src], [src]]
            assert got["list"] == [src, "text", None, torch.tensor(src)]
            assert got["e"].shape == (0, 3)
        assert value["t"][0].item() == r
        with pytest.raises(OptionError, match="ranks are 0 to 1"):
            dw.broadcast(1, src=2)

    run_ranks(on_rank, 2)


def test_gather_object_agree_and_barrier() -> None:
    """Any object of every rank in rank order, one decision for all, and a meeting point."""

    def on_rank() -> None:
        r = dw.rank()
        assert dw.gather_object({"rank": r}) == [{"rank": 0}, {"rank": 1}]
        assert [dw.agree(flag) for flag in (False, r == 1, True)] == [False, True, True]
        assert [dw.agree(flag, "all") for flag in (False, r == 1, True)] == [False, False, True]
        dw.barrier()

    run_ranks(on_rank, 2)


def test_a_single_process_gets_back_what_it_gave() -> None:
    """Alone every collective is the identity, down to the object."""
    value = {"t": torch.ones(2, requires_grad=True), "s": "text"}
    assert dw.gather(value) is value
    assert dw.gather(value, pad=0) is value
    assert dw.reduce(value, "max") is value
    assert dw.mean(value["t"], 0) is value["t"]
    assert dw.broadcast(value) is value
    assert dw.gather_object(value) == [value]
    assert dw.agree(True, "all") is True
    assert dw.agree(False) is False
    assert dw.barrier() is None


def test_wrong_names_are_refused_also_in_a_single_process() -> None:
    """An unknown op, way to agree or source rank is an error before anything is exchanged."""
    with pytest.raises(OptionError, match=r"'avg'\. Did you mean 'mean'\? Known: max, mean, min, product, sum"):
        dw.reduce(1.0, "avg")
    with pytest.raises(OptionError, match=r"'some'.*Known: all, any"):
        dw.agree(True, "some")
    with pytest.raises(OptionError, match="ranks are 0 to 0"):
        dw.broadcast(1, src=1)


def test_mean_takes_nestings() -> None:
    """Numbers and tensors in any nesting are averaged by the same count; whole numbers and booleans as float64."""

    def on_rank() -> None:
        r = dw.rank()
        found = dw.mean(
            {"loss": 1.0 + r, "hits": [torch.tensor([r, 1]), torch.tensor(r == 0)], "n": r}, count=1 + 2 * r
        )
        assert found["loss"] == pytest.approx(1.75)
        assert found["hits"][0].tolist() == [0.75, 1.0]
        assert found["hits"][1].item() == 0.25
        assert found["hits"][1].dtype == torch.float64
        assert found["n"] == 0.75
        with pytest.raises(CollectiveError, match=r"rank 1: mean\(\) takes tensors and numbers"):
            dw.mean({"loss": 1.0 if r == 0 else "no"})

    run_ranks(on_rank, 2)


def test_empty_tensors_are_reduced() -> None:
    """A reduction over tensors without elements gives the same back."""

    def on_rank() -> None:
        for op in ("mean", "sum", "min", "max"):
            assert dw.reduce([torch.empty(0, 3), torch.empty(0, dtype=torch.int64)], op)[0].shape == (0, 3)
        assert dw.mean(torch.empty(0), 2).shape == (0,)
        assert dw.gather(torch.empty(0, dtype=torch.bool)).shape == (0,)

    run_ranks(on_rank, 2)


def contrastive(whole: bool) -> Callable[[], list[list[float]]]:
    """The gradients of InfoNCE over the joint batch, of uneven shares; the loss of all rows, or of a rank's own."""

    def on_rank() -> list[list[float]]:
        torch.manual_seed(0)
        encoder: Any = torch.nn.Linear(3, 2).double()
        model = dw.wrap_model(encoder)
        x = torch.randn(8, 3, dtype=torch.float64)
        share = x if dw.world_size() == 1 else x[:4] if dw.rank() == 0 else x[4:]
        if whole and dw.world_size() == 2:
            share = x[:3] if dw.rank() == 0 else x[3:]
        own = model(share)
        keys = dw.gather({"k": own}, differentiable=True)["k"]
        rows = keys if whole else own
        first = 0 if whole or dw.rank() == 0 else 4
        logits = rows @ keys.T
        labels = (torch.arange(len(rows)) + first + 1) % len(keys)
        torch.nn.functional.cross_entropy(logits, labels).backward()
        return [p.grad.flatten().tolist() for p in encoder.parameters()]

    return on_rank


@pytest.mark.parametrize("whole", [True, False])
def test_a_differentiable_gather_gives_the_gradients_of_one_process(whole: bool) -> None:
    """A contrastive loss over the joint batch, computed whole on every rank or by each for its rows, to 1e-12."""
    [expected] = run_ranks(contrastive(whole), 1)
    for gradients in run_ranks(contrastive(whole), 2):
        for ours, theirs in zip(gradients, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


def test_a_gradient_that_only_some_ranks_want_is_refused() -> None:
    """Where a tensor requires a gradient on some ranks only, the differentiable gather is an error on all of them."""

    def on_rank() -> None:
        with pytest.raises(CollectiveError, match="requires a gradient on rank"):
            dw.gather(torch.ones(1, requires_grad=dw.rank() == 0), differentiable=True)
        assert not dw.gather(torch.ones(1, requires_grad=True), differentiable=False).requires_grad

    run_ranks(on_rank, 2)


def test_gather_keeps_the_gradient_as_one_process_does(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the gradient flows where all ranks' tensors require one; where only some do, a line says so."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")

    def on_rank() -> None:
        x = torch.ones(1, requires_grad=True)
        (dw.gather([x, torch.ones(1)])[0] * torch.tensor([2.0, 3.0])).sum().backward()
        assert x.grad is not None
        assert x.grad.item() == (4.0, 6.0)[dw.rank()]
        with torch.no_grad():
            assert not dw.gather(x).requires_grad
        assert not dw.gather(x if dw.rank() == 0 else x.detach()).requires_grad

    run_ranks(on_rank, 2)
    assert "a tensor requires a gradient on rank 0 but not on rank 1, or the other way round" in capfd.readouterr().err


def test_nan_stays_in_a_minimum_and_a_maximum() -> None:
    """NaN on any rank is NaN in the result, as in one process, whichever rank has it."""

    def on_rank() -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = torch.full((4,), float(dw.rank()), dtype=dtype)
            x[dw.rank()] = torch.nan
            for op, last in (("max", 2.0), ("min", 0.0)):
                found = dw.reduce(x, op)  # type: ignore[arg-type]
                assert found.dtype == dtype
                assert found[:3].isnan().all()
                assert found[3] == last
        assert dw.reduce(-torch.inf if dw.rank() else 1.0, "min") == -torch.inf

    run_ranks(on_rank, 3)


def test_small_floats_do_not_overflow_on_the_way() -> None:
    """A mean of float16 is finite where the sum is not, and types that gloo does not know are reduced too."""

    def on_rank() -> None:
        assert dw.reduce(torch.tensor([60000.0], dtype=torch.float16)).tolist() == [60000]
        assert dw.reduce(torch.tensor([0.1], dtype=torch.bfloat16)).dtype == torch.bfloat16
        for op in ("mean", "sum", "min", "max"):
            found = dw.reduce(torch.tensor([2.0 * dw.rank()]).to(torch.float8_e5m2), op)
            assert found.float().tolist() == [{"mean": 1.0, "min": 0.0}.get(op, 2.0)]

    run_ranks(on_rank, 2)


def test_whole_numbers_do_not_wrap_around() -> None:
    """A sum too large for 64 bits is an error on every rank; uint64 is in its own order; a huge int is refused."""

    def on_rank() -> int:
        r = dw.rank()
        large = torch.tensor([2**63 + r, 5 - r], dtype=torch.uint64)
        assert dw.reduce(large, "max").tolist() == [2**63 + 1, 5]
        assert dw.reduce(large, "min").tolist() == [2**63, 4]
        assert dw.reduce(large)[0] == 2.0**63
        assert dw.reduce(2**62 - 1, "sum") == 2**63 - 2
        assert dw.reduce(-(2**62), "sum") == -(2**63)
        for too_large in (2**62, -(2**62) - 1, large):
            with pytest.raises(CollectiveError, match="too large for an int64"):
                dw.reduce(too_large, "sum")
        with pytest.raises(CollectiveError, match=r"rank 1: .* does not fit into 64 bits"):
            dw.gather(2 ** (63 * r))
        return dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2, timeout=30) == [2, 2]


def test_complex_numbers_have_no_order() -> None:
    """A maximum of complex numbers is refused on every rank, with what to write, also where one rank alone has them."""

    def on_rank() -> list[complex]:
        z = torch.tensor([1 + 2j]) * (dw.rank() + 1)
        for op in ("max", "min"):
            with pytest.raises(CollectiveError, match=rf"rank 0: reduce\(op='{op}'\) takes no complex .* \.abs\(\)"):
                dw.reduce({"a": 1.0, "b": z}, op)
            with pytest.raises(CollectiveError, match=rf"rank 1: reduce\(op='{op}'\) takes no complex"):
                dw.reduce(z if dw.rank() == 1 else z.real, op)
        assert dw.reduce(torch.view_as_real(z), "max").tolist() == [[2, 4]]
        return [dw.reduce(z, op).item() for op in ("sum", "mean", "product")]

    assert run_ranks(on_rank, 2, timeout=30) == [[3 + 6j, 1.5 + 3j, 2 * (1 + 2j) ** 2]] * 2


class Slotted:
    """Something with a tensor inside that no nesting shows."""

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_broadcast_takes_tensors_of_every_kind() -> None:
    """Conjugate and negative views, packed sequences, sparse tensors, and tensors inside of objects come whole."""

    def on_rank() -> None:
        c = torch.tensor([1 + 2j]) if dw.rank() == 0 else torch.zeros(1, dtype=torch.complex64)
        assert dw.broadcast(c.conj()).tolist() == [1 - 2j]
        assert dw.broadcast(c.conj().imag).tolist() == [-2]
        assert dw.gather(c.conj()).tolist() == [1 - 2j, 0]
        packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3.0) + dw.rank(), torch.ones(2)])
        got = dw.broadcast(packed)
        assert got.data.tolist() == [0, 1, 1, 1, 2]
        assert got.batch_sizes.tolist() == [2, 2, 1]
        for layout in (torch.sparse_coo, torch.sparse_csr):
            sparse = dw.broadcast((torch.eye(2) + dw.rank()).to_sparse(layout=layout))
            assert sparse.layout == layout
            assert torch.equal(sparse.to_dense(), torch.eye(2))
        shared = torch.ones(1) * dw.rank()
        first, second = dw.broadcast([Slotted(shared), shared], src=1)
        assert first.inside is second
        assert second.tolist() == [1]

    run_ranks(on_rank, 2)


def test_what_one_rank_cannot_send_is_an_error_on_every_rank() -> None:
    """An object that cannot be pickled, or read, or has no numbers in rows, leaves nobody waiting."""

    def on_rank() -> int:
        own = dw.rank() == 1
        with pytest.raises(CollectiveError, match="rank 1: its function cannot be sent"):
            dw.gather_object((lambda: 0) if own else 0)
        with pytest.raises(CollectiveError, match="rank 1: its generator cannot be sent"):
            dw.broadcast((i for i in range(3)) if own else None, src=1)
        with pytest.raises(CollectiveError, match="rank 1's object cannot be unpickled"):
            dw.gather_object(Odd(why="lost") if own else None)
        for exchange in (dw.gather, dw.reduce, dw.mean):
            with pytest.raises(CollectiveError, match=r"rank 1: .* not sparse"):
                exchange(torch.eye(2).to_sparse() if own else torch.eye(2))
        with pytest.raises(CollectiveError, match="not a PackedSequence"):
            dw.gather(torch.nn.utils.rnn.pack_sequence([torch.ones(1)]))
        return dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2, timeout=30) == [2, 2]


class Odd(Exception):
    """An exception that pickle cannot rebuild."""

    def __init__(self, *, why: str) -> None:
        super().__init__(why)


CALLS: dict[str, Callable[[], Any]] = {
    "gather_object()": lambda: dw.gather_object(1),
    "reduce(op='sum')": lambda: dw.reduce(torch.ones(2), "sum"),
    "reduce(op='mean')": lambda: dw.reduce(torch.ones(2)),
    "mean()": lambda: dw.mean(torch.ones(2)),
    "gather()": lambda: dw.gather(torch.ones(2)),
    "gather(interleave=True)": lambda: dw.gather(torch.ones(2), interleave=True),
    "agree(how='any')": lambda: dw.agree(True),
    "agree(how='all')": lambda: dw.agree(True, "all"),
}


def test_different_calls_are_told_at_once() -> None:
    """Ranks that are in different calls, or in one that they ask for different things, get an error that names both."""
    pairs = [(a, b) for a, b in combinations(CALLS, 2) if ("agree" in a) is ("agree" in b)]

    def body() -> list[str]:
        said = []
        for pair in pairs:
            with pytest.raises(CollectiveError) as caught:
                CALLS[pair[dw.rank()]]()
            said.append(str(caught.value))
        return said

    for said in run_ranks(body, 2):
        for (first, second), words in zip(pairs, said, strict=True):
            assert words.startswith(
                (f"rank 0 calls {first} where rank 1 calls {second}. ", "some ranks call agree(how=")
            )
            assert "All ranks must make the same calls in the same order" in words


def test_ranks_that_are_all_a_source_are_told() -> None:
    """Each rank that broadcasts its own value waits for the other: both are named, with what they asked for."""
    with pytest.raises(WorkerTimeoutError, match=r"rank 0 waits in broadcast\(src=0\) .* rank 1 in broadcast\(src=1\)"):
        run_ranks(lambda: dw.broadcast([1], src=dw.rank()), 2, timeout=100)
