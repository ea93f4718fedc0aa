"""Blocks of a model in stages on several ranks train as one process does; the user's step is a method with the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.errors import CollectiveError, ModelError, OptionError
from distwrap.strategies.pipeline import PipelineStrategy
from distwrap.strategies.pipeline.absent import Absent, is_here
from distwrap.strategies.pipeline.blocks import find_chain
from tests.limits import slow

WORDS, LENGTH, WIDTH, BATCH = 11, 5, 8, 12


class Block(nn.Module):
    """Block that changes its input in place, and takes a mask beside it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = torch.softmax((x @ x.transpose(1, 2)).masked_fill(~mask, -1e4), -1) @ x
        x = x.clone()
        x += attended
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class GPT(nn.Module):
    """A small language model: embeddings, blocks with something between them, a head that may be the embedding."""

    def __init__(self, *, tied: bool = False, blocks: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for block in self.blocks:
            x = 1.01 * block(x, mask)  # what is between two blocks is computed once, with the second one
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def loss_sum(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction="sum")

    def known_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over words that are known, which no batch has as many of as another."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=0)

    @torch.no_grad()
    def write(self, tokens: torch.Tensor, count: int) -> list[int]:
        """Write the likeliest words."""
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens[:, -LENGTH:])[:, -1:].argmax(-1)], 1)
        return [int(token) for token in tokens[0]]


def data(count: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (count * BATCH, LENGTH + 1), generator=generator)
    return TensorDataset(words[:, :-1], words[:, 1:])


def batches(count: int = 4) -> Any:
    """Return the batches of this rank's share, of which all shares together have as many as one process."""
    return dw.shard_loader(DataLoader(data(count), BATCH), batch_size="global")


def prepared(make: Any = torch.optim.AdamW, *, dtype: torch.dtype = torch.float64, **net: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = dw.wrap_model(GPT(**net).to(dtype))
    return model, dw.wrap_optimizer(make(model.parameters(), lr=0.01))


def full(model: nn.Module) -> dict[str, Any]:
    """Return the full weights as lists, on every rank."""
    state = PipelineStrategy().state(model, everywhere=True)
    return {name: tensor.tolist() for name, tensor in state.items()}


def trained(how: str, make: Any, tied: bool) -> tuple[dict[str, Any], list[float]]:
    """Train an epoch in one of the ways of a hand-written loop; return the weights and the losses."""
    model, optimizer = prepared(make, tied=tied)
    losses: list[float] = []
    if how == "accumulate":
        for (x, y), window in dw.accumulate(batches(), 2, model):
            dw.backward(model.loss(x, y) / window.size)
            if window.last:
                dw.optimizer_step(optimizer)
                optimizer.zero_grad()
    elif how == "scale_loss":
        for (x, y), window in dw.accumulate(batches(), 3, model):
            count = 4 + window.index  # of rows, of which micro-batches have different numbers
            loss = model.loss_sum(x[:count], y[:count])
            dw.backward(dw.scale_loss(loss, count * LENGTH))
            if window.last:
                dw.optimizer_step(optimizer)
                optimizer.zero_grad()
    else:
        method = model.known_loss if how == "neither" else model.loss
        for x, y in batches():
            loss = method(x, y)
            losses.append(dw.mean(loss.item()))
            if how == "plain":
                loss.backward()
                optimizer.step()
            else:
                dw.backward(loss)
                dw.optimizer_step(optimizer, max_norm=0.3 if how == "clip" else None)
            optimizer.zero_grad()
    return full(model) if dw.world_size() > 1 else plain(model), losses


def plain(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


WAYS = ("plain", "accumulate", "scale_loss", "clip", "neither")


def everything() -> dict[str, Any]:
    """Train in all ways by both optimizers."""
    found = {
        f"{how} by {make.__name__}, tied={tied}": trained(how, make, tied)
        for how in WAYS
        for make, tied in ((torch.optim.SGD, True), (torch.optim.AdamW, False))
        if how != "neither" or dw.current_strategy_has_one_share()
    }
    return found


def approximately(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()},
        {name: torch.tensor(value, dtype=torch.float64) for name, value in expected.items()},
        rtol=0,
        atol=tolerance,
    )
