"""A user's script with Hugging Face's Trainer, Accelerate, and distwrap's helpers side by side."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import distwrap as dw
from distwrap import distributed

ROWS, BATCH, EPOCHS = 32, 8, 2


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Inputs and labels, the same everywhere."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._x, self._y = torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[index], "labels": self._y[index]}


class Net(nn.Module):
    """Net that computes its loss, as Trainer wants it; its weights are a seed's."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def weights_of(model: nn.Module) -> list[float]:
    """Return a model's weights in one row."""
    return [float(each) for parameter in model.parameters() for each in parameter.detach().flatten()]


def by_trainer(ranks: int) -> list[float]:
    """Train by Trainer, which divides the data among the ranks itself."""
    net = Net()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH // ranks,
            num_train_epochs=EPOCHS,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        Trainer(net, arguments, train_dataset=Rows(), optimizers=(sgd(net), None)).train()
        dw.barrier()  # it is rank 0's folder too
    return weights_of(net)


def by_accelerate(ranks: int) -> list[float]:
    """Train by Accelerate's loop."""
    accelerator, net = Accelerator(cpu=True), Net()
    loader = DataLoader(Rows(), batch_size=BATCH // ranks)
    model, optimizer, loader = accelerator.prepare(net, sgd(net), loader)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
    return weights_of(net)


def by_distwrap(ranks: int) -> list[float]:
    """Train by distwrap's helpers."""
    net = Net()
    model, optimizer = dw.wrap_model(net), sgd(net)
    loader = dw.shard_loader(DataLoader(Rows(), batch_size=BATCH // ranks))
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    return weights_of(net)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of each."""
    return torch.optim.SGD(net.parameters(), lr=0.1)


WAYS = {"trainer": by_trainer, "accelerate": by_accelerate, "distwrap": by_distwrap}


def main(ways: list[str]) -> dict[str, Any]:
    """Train by each of some ways, one after the other, in the same processes."""
    return {way: WAYS[way](dw.world_size()) for way in ways}


if __name__ == "__main__":
    value = distributed(timeout=100)(main)(["trainer", "distwrap", "accelerate"])
    os.write(1, f"TOLD {json.dumps(value)}\n".encode())
