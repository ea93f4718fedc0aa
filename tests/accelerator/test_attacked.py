"""What programs on devices got wrong without an error, or ended in torch's words, before it was mended."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.comm import AsyncAveraging
from distwrap.devices.kinds import kind_of_torch
from distwrap.errors import ModelError, OptionError
from distwrap.testing import run_ranks
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly

pytestmark = pytest.mark.gpu


def own_stream(asked: bool) -> AbstractContextManager[Any]:
    """Return the context of a stream of the program's own."""
    return torch.Stream(device=dw.device()) if asked else nullcontext()


def _averaged(in_own_stream: bool) -> tuple[float, list[float]]:
    torch.manual_seed(3)
    with own_stream(in_own_stream):
        model = dw.wrap_model(nn.Linear(8, 8), comm=AsyncAveraging(sync_interval_ms=0))
        optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        expected = [parameter.detach().double().sum().item() for parameter in model.parameters()]
        for _ in range(40):
            loss = model(torch.ones(4, 8, device=dw.device())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = float(dw.reduce(loss.detach()))
        dw.consolidate(model)
        found = [parameter.detach().double().sum().item() for parameter in model.parameters()]
    assert found == pytest.approx(expected, abs=1e-5)
    return mean, found


@in_nightly
@pytest.mark.gpu(2)
@pytest.mark.parametrize("in_own_stream", [False, True])
def test_asynchronous_averages_beside_collectives_of_the_loop(in_own_stream: bool) -> None:
    """They neither wait for each other, nor read what the other's stream has not computed."""
    first, second = run_ranks(_averaged, 2, in_own_stream, timeout=60)
    assert first == second


def _evaluated() -> float:
    torch.manual_seed(0)
    with own_stream(True):
        model = dw.wrap_model(nn.BatchNorm1d(4).double())
        for step in range(5):
            model(torch.full((8, 4), float(step), device=dw.device(), dtype=torch.float64)).sum().backward()
        if dw.rank() == 0:
            time.sleep(1)  # at work, and not yet at eval()
        model.eval()
        return float(model.running_mean.sum())


@pytest.mark.gpu(2)
def test_statistics_are_taken_over_once_they_are_computed() -> None:
    """Also of a rank 0 that computes in a stream of its own, and comes later."""
    first, second = run_ranks(_evaluated, 2, timeout=60)
    assert first == second


class Warmup:
    """A schedule written by hand, which holds the groups of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.group = optimizer.param_groups[0]

    def step(self, rate: float) -> None:
        self.group["lr"] = rate


def _train_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, warmup: Warmup) -> None:
    for step in range(3):
        warmup.step(0.1 * step)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@in_nightly
@pytest.mark.gpu(1, 2)
def test_a_schedule_that_holds_the_groups(devices: int) -> None:
    """A retrofitted loop's own schedule goes on setting the rates of the optimizer that steps."""
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    run = dw.distributed(nprocs=devices, retrofit=True, launcher="forkserver", timeout=60)(_train_by_hand)
    run(model, optimizer, Warmup(optimizer))
    assert model.weight[0].tolist() == pytest.approx([-0.6] * 3)


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


def _moved() -> None:
    net = nn.Linear(3, 3)
    net.weight.no_decay = True  # type: ignore[attr-defined]
    net.bias = Marked(torch.zeros(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()  # before it is wrapped, on the CPU
    optimizer.zero_grad()
    model = dw.wrap_model(net)
    assert net.weight.no_decay is True  # type: ignore[attr-defined]
    assert type(net.bias) is Marked
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert {parameter.device for parameter in optimizer.state} == {dw.device()}
    assert {state["exp_avg"].device for state in optimizer.state.values()} == {dw.device()}


@in_nightly
@pytest.mark.gpu(1, 2)
def test_moved_parameters_are_what_they_were(devices: int) -> None:
    """They keep their attributes and class, and an optimizer that has stepped goes on with its momenta."""
    run_ranks(_moved, devices, timeout=60)


def test_a_lazy_module_says_so() -> None:
    """A layer without a shape cannot be moved where parameters are swapped."""

    def body() -> str:
        try:
            dw.wrap_model(nn.LazyLinear(3))
        except ModelError as error:
            return str(error)
        return "let the model run once"  # where it can be moved

    assert "let the model run once" in run_ranks(body, 1, timeout=60)[0]


def _dropped(folder: str, at: int | None) -> list[float]:
    torch.manual_seed(1)
    model = dw.wrap_model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "run": dw.run_state()}
    if at is not None:
        dw.load(Path(folder) / "state.pt", into=state)
    for step in range(at or 0, 4):
        if at is None and step == 2:
            dw.save(state, Path(folder) / "state.pt")
        model(torch.ones(8, 4, device=dw.device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


@in_nightly
@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL")
@pytest.mark.gpu(2, separate=True)
def test_random_numbers_of_all_devices_of_one_process(tmp_path: Path) -> None:
    """Under ``strategy="dp"`` dropout goes on on each device where it was."""
    run = dw.distributed(strategy="dp", launcher="forkserver", timeout=60)(_dropped)
    first = run(str(tmp_path), None)
    assert run(str(tmp_path), 2) == pytest.approx(first, abs=1e-6)


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.gpu(2, separate=True)
def test_objects_of_other_classes_are_on_no_other_ranks_device() -> None:
    """They come out on the CPU."""

    def body() -> list[tuple[str, str, float]]:
        own = torch.full((1,), float(dw.rank()), device=dw.device()).as_subclass(Tagged)
        plain = [(type(each).__name__, each.as_subclass(torch.Tensor)) for each in dw.gather_object(own)]
        return [(name, each.device.type, each.item()) for name, each in plain]

    assert run_ranks(body, 2, timeout=60) == [[("Tagged", "cpu", 0.0), ("Tagged", "cpu", 1.0)]] * 2


class OneBuffer:
    """A collate function that fills the same pinned memory for each batch."""

    buffer: torch.Tensor | None = None

    def __call__(self, rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
        batch = torch.stack([row for (row,) in rows])
        if self.buffer is None:
            self.buffer = torch.empty_like(batch).pin_memory()
        return self.buffer.copy_(batch)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_buffer_that_is_filled_again(ahead: bool) -> None:
    """A batch that was copied ahead is not the next one."""
    rows = TensorDataset(torch.arange(16.0).reshape(8, 2))
    loader: Any = DataLoader(rows, batch_size=2, collate_fn=OneBuffer())
    found = [batch.cpu() for batch in dw.shard_loader(loader, device=f"{accelerator()}:0", copy_ahead=ahead)]
    assert torch.equal(torch.cat(found), torch.arange(16.0).reshape(8, 2))


def _exchanged() -> list[Any]:
    own, plain = torch.full((2,), float(dw.rank()), device=dw.device()), torch.full((2,), float(dw.rank()))
    mixed = own if dw.rank() == 0 else plain
    model = dw.wrap_model(nn.BatchNorm1d(2))
    dw.sync_buffers(model)
    found = [dw.broadcast(own), dw.broadcast(plain), dw.gather(mixed), dw.reduce(own, "sum"), dw.reduce(plain, "sum")]
    return [each.tolist() for each in found] + [str(found[0].device) == str(dw.device()), found[1].device.type]


@in_nightly
@pytest.mark.gpu(2)
@pytest.mark.parametrize("backend", ["auto", "both"])
def test_tensors_of_either_memory_under_any_backend(backend: str) -> None:
    """Also where the CPU has a backend beside that of the devices, and where a rank's tensor is the CPU's."""
    chosen = f"cpu:gloo,{accelerator()}:{kind_of_torch().backend()}" if backend == "both" else backend
    run = dw.distributed(nprocs=2, backend=chosen, returns="all", launcher="forkserver", timeout=40)(_exchanged)
    zero, one = [0.0, 0.0], [1.0, 1.0]
    assert run() == [[zero, zero, zero + one, one, one, True, "cpu"]] * 2


@pytest.mark.gpu(2, separate=True)
def test_a_tensor_on_another_ranks_device() -> None:
    """A collective takes it by way of the rank's own, and gives back what is on its device."""

    def body() -> tuple[float, str]:
        other = torch.full((1,), float(dw.rank()), device=f"{accelerator()}:{1 - dw.rank()}")
        total = dw.reduce(other, "sum")
        return total.item(), str(total.device)

    assert run_ranks(body, 2, timeout=60) == [(1.0, f"{accelerator()}:1"), (1.0, f"{accelerator()}:0")]


def _by_default(folder: str) -> None:
    torch.set_default_device(dw.device())
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = dw.wrap_optimizer(torch.optim.AdamW(model.parameters()), model)
    loader = dw.shard_loader(DataLoader(TensorDataset(torch.ones(32, 4, device="cpu")), batch_size=4))
    for (x,) in dw.lockstep(loader):
        dw.backward(model(x).square().mean())
        dw.optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    dw.assert_in_sync(model)
    state = {"model": model, "optimizer": optimizer, "run": dw.run_state(), "loader": loader}
    for name, how in (("a.pt", {}), ("b.pt", {"background": True}), ("parts", {"io": "sharded"})):
        dw.save(state, f"{folder}/{name}", **how)
        dw.wait_for_saves()
        dw.load(f"{folder}/{name}", into=state)


@in_nightly
@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "pipeline"])
def test_a_default_device(strategy: str, tmp_path: Path) -> None:
    """``torch.set_default_device`` changes what the program makes, and nothing of ours."""
    dw.distributed(nprocs=2, strategy=strategy, launcher="forkserver", timeout=40)(_by_default)(str(tmp_path))


@in_nightly
@pytest.mark.gpu(2, separate=True)
def test_gloo_for_devices_that_it_does_not_know() -> None:
    """It is refused by name."""
    if accelerator() == "cuda":
        pytest.skip("gloo takes CUDA's tensors")
    with pytest.raises(OptionError, match=r"gloo takes no tensors of '\w+' devices: leave backend at 'auto'"):
        dw.distributed(nprocs=2, backend="gloo", launcher="forkserver", timeout=40)(dw.rank)()
