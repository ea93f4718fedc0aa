"""Dropout in divided blocks: that of one process, also where it is computed again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from tests.strategies.blocks import WIDTH

ROWS, WORDS = 8, 16


class Dropping(nn.Module):
    """Block with dropout of attention, within the layers of its MLP, after both, and of whole rows."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.chance = 4, 0.5
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after_attention, self.after_mlp = nn.Dropout(0.5), nn.Dropout(0.5)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.5), nn.Identity(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.rows = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.chance if self.training else 0.0)
        x = x + self.after_attention(self.out(attended.transpose(-2, -3).flatten(-2)))
        x = x + self.after_mlp(self.mlp(x))
        return x * self.rows((torch.rand(len(x), 1, 1) > 0.5).to(x)) if self.training else x


class Layers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        torchs = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.5, batch_first=True) for _ in range(2)]
        self.blocks = nn.ModuleList([Dropping(), Dropping()] if kind == "own" else torchs)
        for value in self.parameters():
            value.data.fill_(0.1)  # heads and columns compute alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _dropped(kind: str) -> tuple[float, float, bool]:
    """Return how far a loss is from one process, how alike two ranks' attention drops, and whether both go on alike."""
    seen: list[torch.Tensor] = []
    net, x = Layers(kind).double(), torch.linspace(-1, 1, WIDTH, dtype=torch.float64).exp().expand(ROWS, WORDS, WIDTH)
    whole = copy.deepcopy(net)
    model = dw.wrap_model(net)
    attention: Any = net.blocks[0].out if kind == "own" else net.blocks[0].self_attn.out_proj  # type: ignore[union-attr]
    if kind == "own":
        handle = attention.register_forward_pre_hook(lambda _, args: seen.append(args[0].to_local().detach().clone()))
        model(x)
        handle.remove()
    for block in (*net.blocks, *whole.blocks):
        block.chance = 0.0
        if kind != "own":
            block.self_attn.dropout = 0.0
    losses = []
    for one in (model, whole):
        torch.manual_seed(7)
        losses.append(one(x).square().mean())
        losses[-1].backward()
    both: list[Any] = [None, None]
    dist.all_gather_object(both, ([each.flatten() for each in seen], torch.get_rng_state()))
    alike = float(torch.stack([both[0][0][0], both[1][0][0]]).corrcoef()[0, 1]) if kind == "own" else 0.0
    return abs(losses[0].item() - losses[1].item()), alike, torch.equal(both[0][1], both[1][1])


def _gradients() -> list[float]:
    """Return how far gradients of what is computed again are from those of what is kept."""
    found = []
    for kind in ("own", "torch's"):
        grads = []
        for checkpointing in (False, True, "selective", "by hand"):
            net = Layers(kind).double()
            if checkpointing == "by hand":
                net = ByHand(net)
            by_us = checkpointing if checkpointing != "by hand" else False
            model = dw.wrap_model(net, checkpointing=by_us)
            x = torch.linspace(-1, 1, ROWS * WORDS * WIDTH, dtype=torch.float64).exp().view(ROWS, WORDS, WIDTH)
            for seed in (7, 8):
                torch.manual_seed(seed)
                model(x).square().sum().backward()
            grads.append([parameter.grad.full_tensor() for parameter in model.parameters()])  # type: ignore[union-attr]
        first, *others = grads
        pairs = [(a, b) for each in others for a, b in zip(first, each, strict=True)]
        found.append(max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs))
    return found


class ByHand(nn.Module):
    """Blocks that the user computes again."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.net.blocks:  # type: ignore[union-attr]
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _plan(name: str, module: nn.Module) -> str | None:
    words = {"qkv": "packed3", "out": "rowwise", "mlp.0": "colwise", "mlp.4": "rowwise", "self_attn": "heads"}
    words |= {"linear1": "colwise", "linear2": "rowwise"}
    return next((word for end, word in words.items() if name.endswith(f".{end}")), None)


def _all() -> Any:
    return _dropped("own"), _dropped("torch's"), _gradients()


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_divided_layers_drop_what_one_process_drops() -> None:
    """But heads of fused attention, which differ between ranks; and what is computed again drops the same."""
    *dropped, again = distributed(nprocs=2, strategy=FSDPStrategy(tensor_parallel=2, plan=_plan))(_all)()
    for distance, alike, goes_on_alike in dropped:
        assert distance < 1e-9
        assert abs(alike) < 0.3
        assert goes_on_alike
    assert max(again) < 1e-10
