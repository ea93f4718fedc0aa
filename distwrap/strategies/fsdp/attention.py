"""Attention of torch's ``nn.MultiheadAttention`` in terms of functions that divide it by heads.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute what ``F.multi_head_attention_forward`` computes, with its arguments, by a product for all heads."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    its = given.arguments
    is_batched = its["query"].dim() == 3
    inputs = [its[name] if is_batched else its[name].unsqueeze(1) for name in ("query", "key", "value")]
    weights = its["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if its["in_proj_bias"] is None else its["in_proj_bias"].chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).view(*x.shape[:2], its["num_heads"], -1).permute(1, 2, 0, 3)
        for x, weight, bias in zip(inputs, weights, biases, strict=True)
    )
    mask = _mask(q, its["key_padding_mask"], its["attn_mask"])
    dropout = its["dropout_p"] if its["training"] else 0.0
    chances: torch.Tensor | None = None
    if its["need_weights"]:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        chances = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        attended = chances @ v
        chances = chances.mean(1) if its["average_attn_weights"] else chances
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    found = F.linear(attended.permute(2, 0, 1, 3).flatten(-2), its["out_proj_weight"], its["out_proj_bias"])
    if not is_batched:
        found, chances = found.squeeze(1), None if chances is None else chances.squeeze(0)
    return found, chances


def _mask(q: torch.Tensor, padding: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return one mask to add to the scores, with dimensions for batch, heads, targets and sources."""
    if mask is not None:
        mask = _to_add(mask, q)
        mask = mask.view(*q.shape[:2], *mask.shape[1:]) if mask.dim() == 3 else mask[None, None]
    if padding is None:
        return mask
    padding = _to_add(padding, q)
    padding = (padding if padding.dim() == 2 else padding[None])[:, None, None]
    return padding if mask is None else mask + padding


def _to_add(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
