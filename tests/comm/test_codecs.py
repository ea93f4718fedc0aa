"""What is left of numbers after they were encoded and decoded; no processes."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distwrap.comm.compressed import Cast, Codec, MinMax8, Sign
from tests.comm import references

SIZES = [0, 1, 7, 8, 9, 4095, 4096, 4097, 131072, 131073, 300_001]


def round_trip(codec: Codec, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    codes = torch.full((codec.size(len(x)),), 171, dtype=torch.uint8)
    finite = codec.encode(x, codes)
    out = torch.full_like(x, 99.0)
    codec.decode(codes, out)
    return out, finite


def numbers(count: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(count)) + shift) * scale


@pytest.mark.parametrize(
    ("codec", "reference"),
    [
        (Cast(torch.float16), references.as_float16),
        (Cast(torch.bfloat16), references.as_bfloat16),
        (MinMax8(), references.as_minmax8),
        (Sign(), references.as_sign),
    ],
    ids=["fp16", "bf16", "minmax8", "sign"],
)
def test_like_the_reference(codec: Codec, reference: references.Coded) -> None:
    """For none, one, and as many numbers as end before, at and after a block."""
    for count in SIZES:
        x = numbers(count, 0.01)
        out, finite = round_trip(codec, x)
        assert finite, count
        expected = reference(x.double().numpy())
        # Where a number lies on the middle between two codes, a last bit decides.
        off = np.abs(out.double().numpy() - expected) > 1e-6 * (np.abs(expected) + 0.01)
        assert off.mean() < 1e-3 if count else not len(expected), count


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-7, 1.0, 1e12, 1e30])
def test_minmax8_errs_by_half_a_step_of_the_range_at_any_scale(scale: float) -> None:
    """Also where all numbers are far from zero beside their range."""
    for count, shift in product([1, 9, 5000, 131073], [0.0, 3.0, -5.0, 1e4]):
        x = numbers(count, scale, shift)
        out, finite = round_trip(MinMax8(), x)
        assert finite, (count, shift)
        for start in range(0, count, references.BLOCK):
            block, got = x[start : start + references.BLOCK].double(), out[start : start + references.BLOCK].double()
            extent, rounding = block.max() - block.min(), block.abs().max() * 2**-22
            assert (got - block).abs().max() <= extent / 508 * 1.01 + rounding, (count, shift)


def test_minmax8_of_equal_numbers_is_exact() -> None:
    for value in (0.0, 1.0, -3.25, 1e-20, 1e38):
        out, finite = round_trip(MinMax8(), torch.full((1000,), value))
        assert finite
        assert bool((out == value).all())


def test_minmax8_over_the_whole_range_of_float32() -> None:
    x = torch.tensor([-3e38, 0.0, 1e38, 3e38])
    out, finite = round_trip(MinMax8(), x)
    assert finite
    assert torch.allclose(out, x, atol=6e38 / 500)


@pytest.mark.parametrize("codec", [Cast(torch.float16), Cast(torch.bfloat16), MinMax8(), Sign()])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_and_stays_so(codec: Codec, bad: float) -> None:
    x = numbers(3 * 131072 + 5)
    x[140_000] = bad
    out, finite = round_trip(codec, x)
    assert not finite
    assert not math.isfinite(out[140_000])
    assert torch.isfinite(out[:131072]).all()  # another block's numbers are what they were
    assert torch.isfinite(out[2 * 131072 :]).all()


def test_float16_says_where_it_overflows() -> None:
    out, finite = round_trip(Cast(torch.float16), torch.tensor([1.0, 70000.0]))
    assert not finite
    assert math.isinf(out[1])


@pytest.mark.parametrize("count", SIZES)
def test_all_rows_at_once_decode_like_piece_by_piece(count: int) -> None:
    """What an accelerator does, on the CPU: either way's bytes are good for either way's decoder."""
    codec, x = MinMax8(), numbers(count, 3.0, 0.5)
    rows, pieces = (torch.zeros(codec.size(count), dtype=torch.uint8) for _ in range(2))
    assert codec._encode_by_row(x, rows)
    assert codec._encode_by_piece(x, pieces)
    for codes in (rows, pieces):
        for decode in (codec.decode, codec._decode_by_row):
            out = torch.empty(count)
            decode(codes, out)
            extent = float(x.max() - x.min()) if count else 0.0
            assert not count or (out - x).abs().max() <= extent / 508 * 1.01 + 1e-6
    x = torch.tensor([1.0, math.nan, 2.0])
    assert not codec._encode_by_row(x, rows[:12] if count else torch.zeros(12, dtype=torch.uint8))


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False), max_size=60))
@settings(max_examples=200, deadline=None)
def test_sign_keeps_the_mean_size_and_every_sign(values: list[float]) -> None:
    x = torch.tensor(values)
    out, finite = round_trip(Sign(), x)
    assert finite
    assert all((a >= 0) == (b >= 0) or b == 0 for a, b in zip(values, out.tolist(), strict=True))
    if values:
        assert torch.allclose(out.abs(), x.abs().mean().expand_as(out), rtol=1e-4)


def test_sizes() -> None:
    """Bytes a number: 2, 1 and an eighth, with headers of less than a percent."""
    count = 10_000_000
    assert Cast(torch.float16).size(count) == 2 * count
    assert count <= MinMax8().size(count) <= count * 1.001
    assert count / 8 <= Sign().size(count) <= count / 8 * 1.01
    assert all(codec.size(n) % 4 == 0 for codec in (Cast(torch.float16), MinMax8(), Sign()) for n in range(100))
