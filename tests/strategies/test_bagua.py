"""Bagua's names and options, as its documentation has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distwrap import assert_in_sync, consolidate, distributed, wrap_model, wrap_optimizer
from distwrap.comm import AllReduce, AsyncAveraging, ByteGrad, Decentralized, LowPrecisionDecentralized, QAdam
from distwrap.errors import OptionError
from distwrap.group.world import rank
from distwrap.model.wrapped_models import handle_of
from distwrap.strategies.bagua import BaguaStrategy, translated
from tests.slow import few

# From Bagua's tutorials and Lightning's: what was written there, and what it is here.
KNOWN: list[tuple[str, dict[str, Any], Any]] = [
    ("gradient_allreduce", {}, AllReduce()),
    ("gradient_allreduce", {"hierarchical": True, "average": True}, AllReduce(hierarchical=True)),
    ("bytegrad", {}, ByteGrad(hierarchical=True)),
    ("bytegrad", {"hierarchical": False}, ByteGrad()),
    ("decentralized", {}, Decentralized(hierarchical=True)),
    (
        "decentralized",
        {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 2},
        Decentralized(peer_selection="shift_one", communication_interval=2),
    ),
    (
        "low_precision_decentralized",
        {"hierarchical": False, "communication_interval": 3},
        LowPrecisionDecentralized(communication_interval=3),
    ),
    ("qadam", {"hierarchical": False, "warmup_steps": 50}, QAdam(warmup_steps=50)),
    ("async", {"peer_selection_mode": "all", "sync_interval_ms": 100, "warmup_steps": 5, "flatten": True},
     AsyncAveraging(sync_interval_ms=100, warmup_steps=5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "ours"), KNOWN)
def test_names_and_options(name: str, options: dict[str, Any], ours: Any) -> None:
    assert translated(name, options) == ours


def test_what_bagua_does_not_have() -> None:
    with pytest.raises(OptionError, match="'gradient_allreduce'"):
        BaguaStrategy(algorithm="allreduce")
    with pytest.raises(OptionError, match="sync_interval_ms"):
        BaguaStrategy(algorithm="bytegrad", sync_interval_ms=3)
    with pytest.raises(OptionError, match="all"):
        BaguaStrategy(algorithm="async", peer_selection_mode="shift_one")
    with pytest.raises(OptionError, match="unknown option"):
        BaguaStrategy(bucket_mb=3)


def _train(**how: Any) -> str:
    torch.manual_seed(0)
    model = wrap_model(nn.Linear(8, 1), **how)
    optimizer = wrap_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2), model)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank() + step))).square().mean().backward()
        optimizer.step()
    consolidate(model)
    assert_in_sync(model)
    exchange: Any = handle_of(model).exchange
    return repr(exchange.algorithm)


@pytest.mark.parametrize("name", few([name for name, options, _ in KNOWN if not options], 2))
def test_one_line_changes(name: str) -> None:
    assert type(translated(name, {})).__name__ in distributed(nprocs=2, strategy=BaguaStrategy(name))(_train)()


@pytest.mark.slow("others of its kind are in make test")
def test_other_ways_to_say_it() -> None:
    run = distributed(nprocs=2, strategy="bagua")(_train)
    assert run() == "AllReduce(hierarchical=False)"
    assert run(algorithm="bytegrad", hierarchical=False).startswith("ByteGrad(hierarchical=False")
    assert run.options(strategy="bagua(algorithm='async', sync_interval_ms=1)")().startswith("AsyncAveraging")
    assert run(comm="local_sgd").startswith("LocalSGD")
    assert distributed(nprocs=2)(_train)(strategy="bagua", algorithm="decentralized").startswith("Decentralized")
