"""A model compiled before or after it is wrapped trains the same, and leaves no mark in what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import distwrap as dw
from distwrap.testing import run_ranks
from tests.model.test_forward_routing import Net, batches, share

# The compiler's own, on a fresh process: it warns of what it leaves out, and imports for seconds.
pytestmark = pytest.mark.filterwarnings("ignore")


def compiled(where: str, net: nn.Module, counter: Any) -> nn.Module:
    if where == "before":
        return dw.wrap_model(torch.compile(net, backend=counter))  # type: ignore[arg-type]
    model = dw.wrap_model(net)
    if where == "after":
        return torch.compile(model, backend=counter)  # type: ignore[return-value]
    if where == "in place":
        model.compile(backend=counter)
    return model


def train(where: str, folder: Path | None = None) -> tuple[list[float], int]:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    counter = CompileCounterWithBackend("aot_eager")
    model = compiled(where, Net(), counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches().repeat(2, 1, 1):
        optimizer.zero_grad()
        model(share(x)).pow(2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        model(batches()[0])
    dw.assert_in_sync(model)
    if folder is not None:
        dw.save({"model": model, "state": model.state_dict() if where != "after" else {}}, folder / f"{where}.pt")
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), counter.frame_count


@pytest.mark.slow("compiles on several ranks")
def test_compiled_models_train_as_plain_ones_and_interchange(tmp_path: Path) -> None:
    """Compiled before, after or in place: the weights of one process, few compilations, clean names in the file."""
    ways = ("plain", "before", "after", "in place")
    [expected] = run_ranks(lambda: train("plain")[0], 1)
    for results in run_ranks(lambda: [train(way, tmp_path) for way in ways], 2, timeout=120):
        for weights, frames in results:
            assert weights == pytest.approx(expected, rel=0, abs=1e-9)
            assert frames <= 3
        assert [frames > 0 for _, frames in results] == [False, True, True, True]
    for way in ways:
        saved = dw.load(tmp_path / f"{way}.pt")
        assert list(saved["model"]) == list(Net().state_dict())
        for model in (Net(), torch.compile(Net()), dw.wrap_model(Net(), precision="bf16")):
            dw.unwrap_model(model).load_state_dict(saved["model"])  # type: ignore[arg-type]
        if way != "after":
            assert list(saved["state"]) == list(Net().state_dict())


def test_a_compiled_model_keeps_its_options() -> None:
    """The backend and the options that the user compiled with are used by the wrapped model."""

    def on_rank() -> int:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        counter = CompileCounterWithBackend("eager")
        model: Any = dw.wrap_model(torch.compile(Net(), backend=counter, dynamic=False))  # type: ignore[arg-type]
        for size in (2, 4, 6):
            model(torch.ones(size, 3, dtype=torch.float64)).sum().backward()
        assert isinstance(model, Net)
        return counter.frame_count

    assert min(run_ranks(on_rank, 2, timeout=60)) >= 3  # a compilation a size, as dynamic=False says


@pytest.mark.slow("compiles on several ranks")
def test_under_mixed_precision() -> None:
    """A compiled model computes in the run's precision, and trains."""

    def on_rank() -> None:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        model = dw.wrap_model(torch.compile(nn.Linear(4, 2), backend="aot_eager"), precision="bf16")  # type: ignore[arg-type]
        y = model(torch.ones(2, 4))
        assert y.dtype == torch.float32
        assert (y == y.bfloat16()).all()
        y.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())

    run_ranks(on_rank, 1, timeout=60)
    run_ranks(on_rank, 2, timeout=60)


@pytest.mark.slow("others of its kind are in make test")
def test_the_unwrapped_model_can_be_traced_and_exported() -> None:
    """FX and ``torch.export`` work on what ``unwrap_model`` gives back, after training."""

    def on_rank() -> None:
        model: Any = dw.wrap_model(Net())
        model.loss(share(batches()[0])).backward()
        net = dw.unwrap_model(model)
        x = batches()[0]
        with torch.no_grad():
            expected = net(x)
            assert torch.equal(torch.fx.symbolic_trace(net)(x), expected)
            assert torch.allclose(torch.export.export(net, (x,)).module()(x), expected)

    run_ranks(on_rank, 2, timeout=60)
