"""Dropout in blocks that are cut: other masks on each rank for what is cut, the same for what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from distwrap.errors import ModelError
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


def _dropped(kind: str) -> tuple[dict[str, float], bool]:
    """Return how far what each dropout has let through goes together on two ranks, and whether all go on alike."""
    seen: dict[str, torch.Tensor] = {}
    net = Layers(kind).double()
    # Alike in all rows and words, so that attention finds the same everywhere.
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64).exp().expand(ROWS, WORDS, WIDTH)
    model = dw.wrap_model(net)
    block = net.blocks[0]
    for name, part in block.named_modules():
        if isinstance(part, nn.Dropout) or name == "rows":
            part.register_forward_hook(lambda _, args, found, name=name: seen.update({name: (found == 0).double()}))
    attention: Any = block.out if kind == "own" else block.self_attn.out_proj
    attention.register_forward_pre_hook(lambda _, args: seen.update(attention=args[0].detach().clone()))
    torch.manual_seed(7)
    model(x).sum().backward()
    mine = {**seen, "the state": torch.get_rng_state()}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, mine)
    found = {}
    for name in seen:
        pair = torch.stack([each[name].flatten() for each in both])
        assert pair.std(1).min() > 0, name
        found[name] = float(pair.corrcoef()[0, 1])
    return found, torch.equal(both[0]["the state"], both[1]["the state"])


def _gradients() -> list[float]:
    """Return how far gradients of what is computed again are from those of what is kept."""
    found = []
    for kind in ("own", "torch's"):
        grads = []
        for checkpointing in (False, True):
            model = dw.wrap_model(Layers(kind).double(), checkpointing=checkpointing)
            x = torch.linspace(-1, 1, ROWS * WORDS * WIDTH, dtype=torch.float64).exp().view(ROWS, WORDS, WIDTH)
            for seed in (7, 8):
                torch.manual_seed(seed)
                model(x).square().sum().backward()
            grads.append([parameter.grad.full_tensor() for parameter in model.parameters()])  # type: ignore[union-attr]
        found.append(max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*grads, strict=True)))
    return found


def _refused() -> None:
    x = torch.linspace(-1, 1, ROWS * WORDS * WIDTH, dtype=torch.float64).view(ROWS, WORDS, WIDTH)
    model = dw.wrap_model(Layers("own").double())
    torch.manual_seed(dw.rank())
    with pytest.raises(ModelError, match="draw different"):
        model(x)


def _all() -> Any:
    found = _dropped("own"), _dropped("torch's"), _gradients()
    _refused()
    return found


@pytest.mark.parametrize(
    ("strategy", "alike"),
    [
        ("tp", {"after_attention", "after_mlp", "rows", "dropout1", "dropout2"}),
        (FSDPStrategy(tensor_parallel=2, sequence_parallel=True), {"rows"}),
    ],
    ids=["tp", "by sequence"],
)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_masks_are_apart_where_ranks_have_pieces(strategy: Any, alike: set[str]) -> None:
    """Ranks drop other heads, columns and words, and the same of what all have; what is computed again drops alike."""
    *dropped, again = distributed(nprocs=2, strategy=strategy)(_all)()
    for found, goes_on_alike in dropped:
        assert goes_on_alike
        assert len(found) == (5 if "rows" in found else 4)
        for name, together in found.items():
            assert together == pytest.approx(1.0) if name in alike else abs(together) < 0.3, (name, found)
    assert max(again) < 1e-10
