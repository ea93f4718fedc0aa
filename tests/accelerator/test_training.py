"""On an accelerator: precision, methods, accumulation and checkpoints of one process; DDP where there are two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.testing import run_ranks
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly
from tests.model.test_forward_routing import Net

pytestmark = pytest.mark.gpu


@in_nightly
@pytest.mark.parametrize("precision", ["32", "bf16", "fp16", "bf16-true"])
def test_a_method_trains_in_each_precision(precision: str) -> None:
    """Inputs from the CPU come to the device, outputs are float32, and the loss goes down."""

    def body() -> list[float]:
        model: Any = dw.wrap_model(Net().float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = model.loss(torch.linspace(0, 1, 24).reshape(8, 3))
            assert loss.device == dw.device() != torch.device("cpu")
            dw.backward(loss)
            dw.optimizer_step(optimizer, max_norm=1.0, scheduler=scheduler)
            losses.append(loss.item())
        return losses

    losses = dw.distributed(nprocs=1, precision=precision, launcher="forkserver")(body)()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.gpu(1, 2)
def test_an_optimizer_made_before_the_model_was_moved(devices: int) -> None:
    """It trains the model, or is refused where torch has exchanged the parameters: in one process too."""

    def body() -> list[float]:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = dw.wrap_model(net.to(dw.device()))
        before = model.weight.detach().clone()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        return (model.weight.detach() - before).flatten().tolist()

    train = dw.distributed(nprocs=devices, launcher="forkserver", timeout=60)(body)
    if accelerator() == "pretend":
        with pytest.raises(ModelError, match=r"this SGD holds none of the parameters of Linear.* before a \.to\(\)"):
            train()
    else:
        assert all(train())


@in_nightly
def test_tokens_in_windows_are_one_big_batch() -> None:
    """``accumulate`` and ``scale_loss`` on the device: the gradient of all tokens together."""

    def body() -> None:
        torch.manual_seed(0)
        model, twin = (nn.Linear(4, 5).to(accelerator()) for _ in range(2))
        twin.load_state_dict(model.state_dict())
        batches = [
            (torch.randn(n, 4, device=accelerator()), torch.randint(5, (n,), device=accelerator())) for n in (3, 1, 6)
        ]
        wrapped = dw.wrap_model(model)
        for (x, y), _ in dw.accumulate(batches, 3, wrapped):
            loss_sum = nn.functional.cross_entropy(wrapped(x), y, reduction="sum")
            dw.backward(dw.scale_loss(loss_sum, torch.tensor(len(y), device=accelerator())))
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        nn.functional.cross_entropy(twin(x), y).backward()
        torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=1e-5, atol=1e-6)

    dw.distributed(nprocs=1, launcher="forkserver")(body)()


def test_a_checkpoint_in_the_background_and_the_devices_random_numbers(tmp_path: Path) -> None:
    """What was on the device at the call is written, comes back to the CPU, and dropout goes on as it was."""

    def body() -> None:
        weights = torch.zeros(1_000_000, device=accelerator())
        for step in range(3):
            weights.fill_(step)
            state = {"w": weights, "run": dw.run_state()}
            dw.save(state, tmp_path / f"s-{step}.pt", background=True, keep=2)
            weights.fill_(-1)
        expected = torch.rand(3, device=accelerator())
        dw.wait_for_saves()
        loaded = dw.load(tmp_path / "s-latest.pt", into={"run": dw.run_state()})
        assert loaded["w"].device.type == "cpu"
        assert (loaded["w"] == 2).all()
        assert torch.equal(torch.rand(3, device=accelerator()), expected)

    dw.distributed(nprocs=1, launcher="forkserver")(body)()


@pytest.mark.gpu(2, 4)
@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
def test_some_devices_train_as_one(precision: str, devices: int) -> None:
    """Ranks under the devices' own backend, with SyncBatchNorm, are in sync and near one process."""

    def on_rank() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model = dw.wrap_model(net, sync_batchnorm=True, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * 64)
        x = torch.linspace(0, 1, 48).reshape(16, 3)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x[dw.rank() :: dw.world_size()]).pow(2).mean()
            dw.backward(loss / 64)  # so that float16 overflows nowhere
            dw.optimizer_step(optimizer)
        dw.assert_in_sync(model)
        return torch.cat([p.detach().flatten().cpu() for p in net.parameters()]).tolist()

    one, *others = run_ranks(on_rank, devices, timeout=100)
    assert all(other == one for other in others)
    [alone] = run_ranks(on_rank, 1, timeout=100)
    assert one == pytest.approx(alone, abs=1e-4 if precision == "32" else 3e-2)
