"""Blocks of transformers in the ways in which people write them, in a small language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

LETTERS, LENGTH, WIDTH = 12, 8, 24


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class LlamaAttention(nn.Module):
    """Fewer heads of keys and values than of queries, whose norm has one weight for all heads."""

    def __init__(self, width: int, n_heads: int = 4, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, width // n_heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, n_kv_heads * self.head_dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.wq(x).view(batch, length, self.n_heads, self.head_dim)).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (each.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = LlamaAttention(width), GatedMLP(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class GPTBlock(nn.Module):
    """Queries, keys and values in one layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.heads = 4
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class NanoBlock(nn.Module):
    """Attention whose shapes come from the width of what it gets: it cannot be cut; its other layers can."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc_1, self.fc_2, self.slope = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = (
            each.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for each in self.c_attn(x).split(self.n_embd, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.fc_2(self.slope(self.fc_1(x)))  # type: ignore[no-any-return]


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)


KINDS = {"llama": LlamaBlock, "gpt": GPTBlock, "torch": encoder_layer, "nano": NanoBlock}


class Language(nn.Module):
    """Two blocks between an embedding, one of positions that another module reads, and a head.

    Args:
        kind: of the blocks.
        letters: of its alphabet.
    """

    def __init__(self, kind: str, letters: int = LETTERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(KINDS[kind]() for _ in range(2))
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def texts(rows: int = 8, letters: int = LETTERS) -> torch.Tensor:
    return torch.randint(letters, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
