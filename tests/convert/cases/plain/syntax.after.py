#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""Syntax that must stay: größer, 数."""
from __future__ import annotations

import functools
import os

import torch
from torch import nn
from torch.utils.data import DataLoader as Loader, TensorDataset
from distwrap import distributed, rank_zero_only, save, shard_loader, wrap_model

print = rank_zero_only(print)


def cached(function):
    return functools.lru_cache(maxsize=None)(function)


def announced(name):
    def decorate(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            print("begin", name)
            return function(*args, **kwargs)

        return inner

    return decorate


@cached
def width(name):  # type: (str) -> int
    match name:
        case "small" | "tiny":
            return 2
        case str(other) if (size := len(other)) > 3:
            return size
        case _:
            return 4


@announced(
    "main",
)
@distributed
def main(
    *names: str,
    epochs: int = 2,  # how often
) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, rate = nn.Sequential(
        nn.Linear(3, width("small")),
        # a comment in the middle
        nn.Linear(width("small"), 1),
    ), 0.1
    model = wrap_model(model)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=rate,
    )
    loader = (
        shard_loader(Loader(
            TensorDataset(torch.randn(32, 3)),
            batch_size=int(os.environ["BATCH"]),  # of one rank
        ))
    )
    for epoch in range(epochs):
        losses = []  # type: list[float]
        for (x,) in loader:
            loss = model(x).square().mean(); loss.backward()
            optimizer.step(); optimizer.zero_grad()
            if (value := loss.item()) > 0: losses.append(value)
        print(f"{epoch=} {max(losses):>{10}.3f} {'quoted'!r} {{braces}}")
    save(
        model.state_dict(),
        os.environ["OUT"],
    )


if __name__ == '__main__':
    main("a", "b")
