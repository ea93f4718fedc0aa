"""Attention of which each rank computes some heads: torch's ``nn.MultiheadAttention`` with its masks.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distwrap.strategies.fsdp.pieces import mark


def why_not(module: nn.MultiheadAttention, ranks: int) -> str:
    """Return why an attention cannot be divided, or an empty text."""
    if module.num_heads % ranks:
        return f"its {module.num_heads} heads are not divisible by {ranks} ranks"
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return "it has kdim=, vdim=, add_bias_kv= or add_zero_attn=, which are not cut"
    return ""


def attend(
    module: Any,
    mesh: DeviceMesh,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention with this rank's heads, and sum the results of the ranks; arguments as of the module."""
    batched = query.dim() == 3
    if not batched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    heads = module.num_heads // mesh.size()
    weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        _by_heads(F.linear(given, weight, bias), heads)
        for given, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mark((q, k, v))
    mask = _mask(q, key_padding_mask, attn_mask, mesh)
    dropout = module.dropout if module.training else 0.0
    chances: torch.Tensor | None = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        chances = (scores if mask is None else scores + mask).softmax(-1)
        attended = F.dropout(chances, dropout, module.training) @ v
        chances = DTensor.from_local(chances, mesh, [Shard(1)], run_check=False).full_tensor()
        chances = chances.mean(1) if average_attn_weights else chances
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    found: torch.Tensor = module.out_proj(attended.transpose(1, 2).flatten(-2))
    if not batched:
        return found.squeeze(0), None if chances is None else chances.squeeze(0)
    return found if module.batch_first else found.transpose(0, 1), chances


def _by_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.view(*tensor.shape[:-1], heads, -1).transpose(1, 2)


def _mask(
    q: torch.Tensor, padding: torch.Tensor | None, mask: torch.Tensor | None, mesh: DeviceMesh
) -> torch.Tensor | None:
    """Return one mask to add to this rank's scores, with dimensions for batch, heads, targets and sources."""
    if mask is not None and mask.dim() == 3:
        heads = q.shape[1]
        mask = mask.view(-1, heads * mesh.size(), *mask.shape[1:]).narrow(1, mesh.get_local_rank() * heads, heads)
    mask = None if mask is None else _to_add(mask, q)
    padding = None if padding is None else _to_add(padding, q)[:, None, None]
    if mask is None or padding is None:
        return padding if mask is None else mask
    return mask + padding


def _to_add(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
