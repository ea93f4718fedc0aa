"""The codecs and the engine on an accelerator, and every algorithm over NCCL where there are two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distwrap import assert_in_sync, consolidate, wrap_model, wrap_optimizer
from distwrap.comm.compressed import Cast, Codec, MinMax8, Sign
from distwrap.comm.exchange import Engine
from distwrap.group.world import device, rank
from distwrap.testing import run_ranks
from tests.accelerator import accelerator
from tests.comm.test_with_ddp import GRADIENT, WEIGHT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 4097, 131072, 1_000_003])
@pytest.mark.parametrize("codec", [Cast(torch.float16), Cast(torch.bfloat16), MinMax8(), Sign()])
def test_codes_of_either_processor_are_good_for_both(codec: Codec, count: int) -> None:
    x = torch.randn(count)
    there, here = (torch.zeros(codec.size(count), dtype=torch.uint8, device=where) for where in (accelerator(), "cpu"))
    assert codec.encode(x.to(accelerator()), there)
    assert codec.encode(x, here)
    first, second = torch.empty(count), torch.empty(count, device=accelerator())
    codec.decode(there.cpu(), first)
    codec.decode(here.to(accelerator()), second)
    step = float(x.max() - x.min()) / 254 if isinstance(codec, MinMax8) else 1e-3
    assert (first - second.cpu()).abs().max() <= 1.01 * step


def test_the_engine_works_behind_what_the_stream_was_given() -> None:
    engine, x = Engine(torch.device(accelerator(), 0)), torch.zeros(1 << 24, device=accelerator())
    for _ in range(20):
        x.add_(1.0)

    def double() -> torch.Tensor:
        return x.mul_(2.0)

    result = engine.submit(double).wait()
    assert bool((result == 40.0).all())
    assert engine.close()


def _train(comms: list[str]) -> dict[str, list[float]]:
    found = {}
    for comm in comms:
        torch.manual_seed(0)
        model = wrap_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), comm=comm)
        optimizer = wrap_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model)
        for step in range(8):
            optimizer.zero_grad()
            torch.manual_seed(100 * step + rank())
            model(torch.randn(32, 64, device=device())).square().mean().backward()
            optimizer.step()
        consolidate(model)
        assert_in_sync(model)
        found[comm] = [parameter.sum().item() for parameter in model.parameters()]
    return found


@pytest.mark.gpu(2)
def test_every_algorithm_over_the_devices_backend(devices: int) -> None:
    first, *others = run_ranks(_train, devices, [*GRADIENT, *WEIGHT], timeout=100)
    assert all(other == first for other in others)
