"""Training on accelerators gives the weights of the same training on the CPU, in float64 to 1e-9."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.comm import traffic
from distwrap.devices.kinds import kind_of_torch
from distwrap.group.world import current_world
from distwrap.testing import run_ranks
from tests import training
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly
from tests.comm.test_with_ddp import GRADIENT, WEIGHT
from tests.conformance.base import check
from tests.conformance.behaviours import ALL
from tests.conformance.cells import AGAIN, CELLS, HEART, Cell

pytestmark = pytest.mark.gpu

STEPS = 6


def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks see no devices."""
    monkeypatch.setenv(kind_of_torch().visible_by, "")


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def data(step: int, share: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + share)
    rows = torch.randn(8, 9, generator=generator, dtype=torch.float64)
    return rows[:, :6], rows[:, 6:]


def trained(comm: str | None, make: type[torch.optim.Optimizer] = torch.optim.SGD) -> list[list[float]]:
    """Train on this rank's share; return the weights, as plain numbers."""
    model = dw.wrap_model(net(), comm=comm)
    optimizer = dw.wrap_optimizer(make(model.parameters(), lr=0.05), model)
    for step in range(STEPS):
        x, y = (part.to(dw.device()) for part in data(step, dw.rank()))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if dw.world_size() > 1:
        dw.consolidate(model)
        dw.assert_in_sync(model)
        assert dw.device().type == "cpu" or traffic(model) is not None
    return [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


def alone(shares: int) -> list[list[float]]:
    """Train in one process and plain torch on all shares; return the weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        parts = [data(step, share) for share in range(shares)]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def assert_near(found: list[list[float]], expected: list[list[float]], tolerance: float = 1e-9) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance, rel=0)


@in_nightly
@pytest.mark.parametrize(
    ("comm", "devices"),
    [(None, 1), *((comm, count) for comm in (None, "allreduce", "local_sgd(sync_every=1)") for count in (2, 4))],
)
def test_exact_ways_are_one_process(comm: str | None, devices: int) -> None:
    """DDP, and the ways of exchange that round nothing, give the weights of one process on the CPU."""
    for weights in run_ranks(trained, devices, comm, timeout=100):
        assert_near(weights, alone(devices))


def _trained_by(comms: list[str]) -> dict[str, list[list[float]]]:
    return {comm: trained(comm, torch.optim.Adam if "qadam" in comm else torch.optim.SGD) for comm in comms}


@in_nightly
@pytest.mark.gpu(2, 4)
def test_ways_of_exchange_are_those_of_the_cpu(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each algorithm, also one that rounds, computes on devices what it computes on as many ranks on the CPU."""
    comms = [each for each in (*GRADIENT, *WEIGHT) if "async" not in each]  # which goes by the clock
    found = run_ranks(_trained_by, devices, comms, timeout=100)
    hidden(monkeypatch)
    for mine, theirs in zip(found, run_ranks(_trained_by, devices, comms, timeout=100), strict=True):
        for comm in comms:
            assert_near(mine[comm], theirs[comm])


def _resumed(folder: str, at: int | None) -> tuple[list[list[float]], list[float], str]:
    """Train with dropout on the device from the start, or from a checkpoint of another run; return what came of it."""
    path = Path(folder) / "state.pt"
    torch.manual_seed(5)
    model = dw.wrap_model(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "run": dw.run_state()}
    dw.seed_everything(7, apart=True)
    first = 0
    if at is not None:
        torch.rand(13, device=dw.device())  # another run has drawn other numbers by now
        first = dw.load(path, into=state)["step"]
    drawn = []
    for step in range(first, STEPS):
        if at is None and step == STEPS // 2:
            dw.save({**state, "step": step}, path)
        x, y = (part.to(dw.device()) for part in data(step, dw.rank()))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        drawn.append(torch.rand((), device=dw.device()).item())
    weights = [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]
    return weights, drawn[-(STEPS - STEPS // 2) :], str(optimizer.state[next(iter(optimizer.state))]["exp_avg"].device)


@in_nightly
@pytest.mark.gpu(1, 2, 4)
def test_resumed_with_the_random_numbers_of_every_device(devices: int, tmp_path: Path) -> None:
    """A run that is taken up draws on each rank's device what the first run drew there, and ends with its weights."""
    first = run_ranks(_resumed, devices, str(tmp_path), None, timeout=100)
    again = run_ranks(_resumed, devices, str(tmp_path), STEPS // 2, timeout=100)
    assert len({tuple(drawn) for _, drawn, _ in first}) == devices  # each device draws its own
    for rank, ((weights, drawn, _), (weights_again, drawn_again, where)) in enumerate(zip(first, again, strict=True)):
        assert drawn_again == drawn
        assert_near(weights_again, weights, 1e-12)  # a new model's buckets add up in another order
        assert where == f"{accelerator()}:{rank % torch.accelerator.device_count()}"


def _told(folder: str, at: int) -> int:
    _resumed(folder, at)
    return current_world().counts[f"said no random numbers of {accelerator()}"]


@pytest.mark.gpu(2)
def test_resumed_from_the_cpu(tmp_path: Path) -> None:
    """A run of the CPU is taken up on devices, and a line says once that it has no random numbers of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        hidden(patch)
        run_ranks(_resumed, 2, str(tmp_path), None, timeout=100)
    assert run_ranks(_told, 2, str(tmp_path), STEPS // 2, timeout=100) == [1, 1]
    run_ranks(_resumed, 2, str(tmp_path), None, timeout=100)
    assert run_ranks(_told, 2, str(tmp_path), STEPS // 2, timeout=100) == [0, 0]


@pytest.mark.gpu(2)
def test_a_checkpoint_of_devices_is_one_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads where there are no devices, and one of the CPU loads onto a device."""

    def saved(path: str) -> None:
        model = dw.wrap_model(net())
        dw.save({"model": model, "raw": model.state_dict()}, path)

    def loaded(path: str) -> tuple[set[str], list[list[float]]]:
        model = dw.wrap_model(net().requires_grad_())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        raw = dw.load(path, into={"model": model})["raw"]
        kinds = {value.device.type for value in raw.values()}
        return kinds, [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]

    here, there = str(tmp_path / "here.pt"), str(tmp_path / "there.pt")
    run_ranks(saved, 2, here, timeout=100)
    with pytest.MonkeyPatch.context() as patch:
        hidden(patch)
        run_ranks(saved, 2, there, timeout=100)
        on_cpu = run_ranks(loaded, 2, here, timeout=100)
    expected = [parameter.detach().flatten().tolist() for parameter in net().parameters()]
    for kinds, weights in (*on_cpu, *run_ranks(loaded, 2, there, timeout=100)):
        assert kinds == {"cpu"}
        assert weights == expected
    plain = torch.load(here, weights_only=True)
    assert plain["model"]["0.weight"].device.type == "cpu"


READ = """
import sys, torch, distwrap as dw
from safetensors.torch import load_file
print([torch.load(f"{sys.argv[1]}/{name}", weights_only=True) for name in ("state.pt", "background.pt")])
print(load_file(f"{sys.argv[1]}/state.safetensors"), dw.load(f"{sys.argv[1]}/parts"))
"""


@in_nightly
@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_a_file_names_no_device(strategy: str, tmp_path: Path) -> None:
    """Whatever was on a device when it was saved, in any format, is read where there is none, by torch alone."""

    def saved(folder: str) -> None:
        model = dw.wrap_model(net())
        optimizer = dw.wrap_optimizer(torch.optim.AdamW(model.parameters()), model)
        x, y = (part.to(dw.device()) for part in data(0, 0))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        beside = {"tensor": torch.ones(3, device=dw.device()), "several": [torch.zeros(2, device=dw.device())]}
        state = {"model": model, "optimizer": optimizer, "beside": beside}
        dw.save(state, f"{folder}/state.pt")
        dw.save(state, f"{folder}/background.pt", background=True)
        dw.save(state, f"{folder}/parts", io="sharded")
        dw.save(model, f"{folder}/state.safetensors")
        dw.wait_for_saves()

    dw.distributed(nprocs=2, strategy=strategy, launcher="forkserver", timeout=60)(saved)(str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        hidden(patch)
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        command = [sys.executable, "-c", READ, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert accelerator() not in done.stdout


@pytest.mark.gpu(2, 4)
def test_the_shuffled_loop_of_every_launcher(devices: int) -> None:
    """The loop by which launchers are tested, whose loader gives batches on the device."""
    weights = training.main.options(launcher="forkserver", nprocs=devices)()
    training.assert_equal_to_reference(weights, training.reference())


@pytest.mark.gpu(1, 2, 4)
def test_a_scaler_of_the_users_own(devices: int) -> None:
    """``torch.amp.GradScaler`` of the devices' type: a step that overflows on one rank is left out by all."""

    def body() -> tuple[list[float], list[list[float]]]:
        model = dw.wrap_model(net().float(), precision="fp16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler, scales = torch.amp.GradScaler(dw.device().type, init_scale=1024.0), []
        for step in range(STEPS):
            x, y = (part.float().to(dw.device()) for part in data(step, dw.rank()))
            if step == 2 and dw.rank() == dw.world_size() - 1:
                x = x * 1e6
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]

    first, *others = run_ranks(body, devices, timeout=100)
    assert first[0] == [1024.0] * 2 + [512.0] * (STEPS - 2)
    assert all(other == first for other in others)


WHOLE = ("fsdp", "pipeline")  # of the others it is asked what depends on how they divide
# Their devices do what those of other cells do, in another order, or more of it.
OF_THE_CPU = ("ddp on four ranks", "pipeline, interleaved", "two pipelines", "auto")


def cells() -> Iterator[Any]:
    """Yield the matrix of the conformance suite: each cell with its number of devices, its heart, and then the rest.

    Of ddp2 the suite's nodes are pretended, on the CPU alone; a strategy by hand leaves the inputs to the loop.
    """
    left_out = ("ddp2", "by hand", "by hand, two pairs", *OF_THE_CPU)
    for cell in CELLS:
        if cell.name in left_out or cell.nprocs not in (1, 2, 4):
            continue
        whole = ALL if cell.name in WHOLE else HEART if cell.nprocs == 4 else cell.only or AGAIN
        asked = set(whole) - {*cell.lacks, *cell.fails}
        yield pytest.param(cell, cell.nprocs, HEART & asked, id=f"{cell.name}, the heart")
        if asked - HEART:
            yield pytest.param(cell, cell.nprocs, asked - HEART, id=cell.name)


@in_nightly
@pytest.mark.timeout(400)  # a guard, of what takes some ten seconds
@pytest.mark.parametrize(("cell", "devices", "asked"), list(cells()))
def test_it_conforms(cell: Cell, devices: int, asked: Collection[str]) -> None:
    """Each strategy behaves on devices as on the CPU, with which its numbers are compared."""
    check(cell.strategy, devices, asked, cell.refuses)
