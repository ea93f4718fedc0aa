"""Behaviours in half precision: bfloat16 and float16 under autocast, the scaling of losses."""

from typing import Any

import torch

from distwrap.testing.behaviours import FP16_SCALE, FP16_TOLERANCE
from distwrap.testing.nets import small
from distwrap.testing.sides import OneProcess, Trial, compare, fit, sgd
from tests.conformance.base import behaviour

BF16_TOLERANCE = 1e-2  # as FP16_TOLERANCE, of rows that were rounded to 8 bits


@behaviour()
def bf16(trial: Trial) -> None:
    """Train in bfloat16 under autocast; weights and outputs are in float32."""
    trial.same(lambda side: fit(side, dtype=torch.float32), precision="bf16", tolerance=BF16_TOLERANCE)


@behaviour()
def bf16_outputs(trial: Trial) -> None:
    """Compute in bfloat16, and hand out float32."""
    half = Trial(trial.world, trial.folder, "bf16")
    model = half.wrap(small(dtype=torch.float32))
    x, _ = next(half.batches(dtype=torch.float32))
    with torch.no_grad():
        found = model(x)
        exact = small(dtype=torch.float32)(x.cpu())
    assert found.dtype == torch.float32, f"the outputs are in {found.dtype}"
    assert not torch.equal(found.cpu(), exact), "the forward was computed in float32"
    compare(found, exact, tolerance=0.05)


@behaviour()
def fp16(trial: Trial) -> None:
    """Train in float16 with scaled losses."""

    def loop(side: OneProcess) -> Any:
        return fit(side, model=side.wrap(small(dtype=torch.float32, scale=FP16_SCALE)), dtype=torch.float32)

    trial.same(loop, precision="fp16", tolerance=FP16_TOLERANCE)


@behaviour()
def fp16_clip(trial: Trial) -> None:
    """Clip gradients in float16 after their scale is off."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small(dtype=torch.float32, scale=FP16_SCALE))
        optimizer = side.prepare(sgd(model.parameters()))
        for x, y in side.batches(dtype=torch.float32):
            with side.autocast():
                loss = model.loss(x, y)
            side.backward(loss)
            side.step(optimizer, max_norm=0.05)
            optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop, precision="fp16", tolerance=FP16_TOLERANCE)


@behaviour()
def float64(trial: Trial) -> None:
    """Leave the type of a float64 model as it is, in its outputs and gradients."""
    model = trial.wrap(small())
    x, y = next(trial.batches())
    trial.backward(model.loss(x, y))
    kinds = {gradient.dtype for gradient in trial.strategy.gradients(model)}
    with torch.no_grad():
        kinds.add(model(x).dtype)
    assert kinds == {torch.float64}, f"the outputs and gradients of a float64 model are in {kinds}"
