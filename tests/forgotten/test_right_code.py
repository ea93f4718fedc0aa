"""Right programs of all kinds, in which nothing was forgotten, end with the numbers of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Subset, TensorDataset

import distwrap as dw
from distwrap.testing import run_ranks

STEPS, BATCH = 5, 8


def net(inputs: int = 6, outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)).double()


def numbers(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loader(batch: int = BATCH, samples: int = STEPS * BATCH) -> DataLoader[Any]:
    x = numbers(samples, 9)
    return DataLoader(TensorDataset(x[:, :6], x[:, 6:]), batch_size=batch)


def shares(batch: int = BATCH, samples: int = STEPS * BATCH) -> DataLoader[Any]:
    return dw.shard_loader(loader(batch, samples), batch_size="global")


def weights(*models: nn.Module) -> list[float]:
    return [number for model in models for parameter in model.parameters() for number in parameter.flatten().tolist()]


def noise(step: int) -> torch.Tensor:
    """Return this rank's part of the noise that one process draws."""
    whole = numbers(BATCH, 4, seed=100 + step)
    return whole.chunk(dw.world_size())[dw.rank()]


def gan() -> list[float]:
    generator, critic = dw.wrap_model(net(4, 6)), dw.wrap_model(net(6, 1, seed=1))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.05)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.05)
    for step, (real, _) in enumerate(shares()):
        of_critic.zero_grad()
        F.softplus(-critic(real)).mean().backward()
        F.softplus(critic(generator(noise(step)).detach())).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(generator(noise(step)))).mean().backward()
        of_generator.step()
    return weights(generator, critic)


def teacher_and_student() -> list[float]:
    teacher = net(seed=3)
    student = dw.wrap_model(net())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
    for x, _ in shares():
        with torch.no_grad():
            wanted = teacher(x)
        optimizer.zero_grad()
        F.mse_loss(student(x), wanted).backward()
        optimizer.step()
    return weights(student)


def moving_average() -> list[float]:
    model = dw.wrap_model(net())
    averaged = AveragedModel(dw.unwrap_model(model), multi_avg_fn=None)
    copied = copy.deepcopy(dw.unwrap_model(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in shares():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(dw.unwrap_model(model))
        with torch.no_grad():
            for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    return weights(model, averaged, copied)


class Adapted(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False).double(), nn.Linear(2, 3, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) + self.up(self.down(x))
        return found


def low_rank_adapters() -> list[float]:
    torch.manual_seed(0)
    model = dw.wrap_model(Adapted(nn.Linear(6, 3).double()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for x, y in shares():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def several_optimizers() -> list[float]:
    model = dw.wrap_model(net())
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.05), torch.optim.Adam(model[2].parameters(), lr=0.01)]
    for x, y in shares():
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def reinforcement() -> list[float]:
    policy = dw.wrap_model(net(6, 4))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for step in range(STEPS):
        state = numbers(BATCH, 6, seed=step).chunk(dw.world_size())[dw.rank()]
        for _ in range(3):
            logits = policy(state)
            action = logits.argmax(-1)
            reward = (action.double() - state.sum(-1)).tanh()
            loss = (F.cross_entropy(logits, action, reduction="none") * reward).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = (state + F.one_hot(action, 4).sum(-1, keepdim=True) * 0.1).detach()
    return weights(policy)


def evaluation_on_all() -> list[float]:
    model = dw.wrap_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for x, y in shares():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(sum(F.mse_loss(model(x), y).item() for x, y in loader()))
        model.train()
    return [*weights(model), *found]


def frozen_encoder() -> list[float]:
    encoder = net(6, 6, seed=2).requires_grad_(False)
    head = dw.wrap_model(net())
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    table = encoder(numbers(20, 6))  # of all, on all ranks
    for x, y in shares():
        optimizer.zero_grad()
        F.mse_loss(head(encoder(x) + table.mean(0)), y).backward()
        optimizer.step()
    return weights(head)


def folds() -> list[float]:
    found = []
    data = loader().dataset
    for fold in range(3):
        kept = [index for index in range(STEPS * BATCH) if index % 5 != fold]
        model = dw.wrap_model(net(seed=fold))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in dw.shard_loader(DataLoader(Subset(data, kept), batch_size=BATCH), batch_size="global"):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        found += weights(model)
    return found


def warm_up() -> list[float]:
    model = dw.wrap_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = next(iter(loader()))
    for _ in range(5):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    for x, y in shares():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def fitted_input() -> list[float]:
    """Fit an input to a frozen model, alike on all ranks: there is no model to wrap."""
    model = net().requires_grad_(False)
    image = nn.Parameter(torch.zeros(1, 6, dtype=torch.float64))
    optimizer = torch.optim.SGD([image], lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(image).square().sum().backward()
        optimizer.step()
    return image.flatten().tolist()


def whole_batch() -> list[float]:
    """Train on one batch over and over, alike on all ranks: as slow as one process, and as right."""
    model = dw.wrap_model(net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = next(iter(loader()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return weights(model)


PROGRAMS: list[Callable[[], list[float]]] = [
    gan, teacher_and_student, moving_average, low_rank_adapters, several_optimizers, reinforcement, evaluation_on_all,
    frozen_encoder, folds, warm_up, fitted_input, whole_batch,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_is_left_alone(program: Callable[[], list[float]]) -> None:
    """It ends on two ranks with the numbers of one process, to 1e-9."""
    [expected] = run_ranks(program, 1)
    for found in run_ranks(program, 2):
        assert found == pytest.approx(expected, abs=1e-9, rel=0)
