"""A tiny GPT on one long row of tokens, everything in one file; alone or under torchrun."""

import math
import os

import torch
import torch.nn as nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# what to train; edit it here
gradient_accumulation_steps = 4  # micro-batches of one iteration, of all ranks together
batch_size, block_size, vocab_size, n_head, n_embd = 4, 12, 17, 2, 16
max_iters, warmup_iters, learning_rate, min_lr, weight_decay, grad_clip = 6, 2, 3e-3, 3e-4, 0.1, 1.0

ddp = int(os.environ.get("RANK", -1)) != -1  # did torchrun start us?
ddp_rank, ddp_local_rank, ddp_world_size = (
    int(os.environ.get(k, d)) for k, d in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)]
)
device = f"cuda:{ddp_local_rank}"
if ddp:
    init_process_group(backend="nccl")
    torch.cuda.set_device(device)
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337)  # the same on all ranks, since the micro-batches are dealt by their numbers

tokens = (torch.arange(700).square() + torch.randint(3, (700,))) % vocab_size
train_data, val_data = tokens[:600], tokens[600:]
starts = torch.randperm(len(train_data) - block_size)


def get_batch(iter_num, micro_step):
    number = (iter_num * gradient_accumulation_steps + micro_step) * ddp_world_size + ddp_rank
    ix = starts[number * batch_size : (number + 1) * batch_size]
    chunk = torch.stack([train_data[i : i + block_size + 1] for i in ix]).to(device)
    return chunk[:, :-1], chunk[:, 1:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.ln_1, self.c_attn, self.c_proj = (
            nn.LayerNorm(n_embd),
            nn.Linear(n_embd, 3 * n_embd),
            nn.Linear(n_embd, n_embd),
        )
        self.mlp = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, 32), nn.GELU(), nn.Linear(32, n_embd))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx, targets):
        B, T = idx.size()
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        q, k, v = (t.view(B, T, n_head, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(n_embd, dim=2))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1))
        return F.cross_entropy(self.lm_head(x + self.mlp(x)).flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay)
raw_model, model = model, DDP(model, device_ids=[ddp_local_rank]) if ddp else model

for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    train_loss = torch.zeros((), device=device)
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch(iter_num, micro_step)
        if ddp:  # exchange the gradients in the last micro-batch only; what no_sync() does, without a context
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(X, Y) / gradient_accumulation_steps
        train_loss += loss.detach()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if ddp:
        all_reduce(train_loss)
    if ddp_rank == 0:
        print(f"iter {iter_num}: loss {train_loss.item() / ddp_world_size:.4f}")
if ddp_rank == 0:
    window = val_data[: 4 * block_size + 1].to(device)
    with torch.no_grad():
        print(f"val loss {raw_model(window[:-1].view(4, -1), window[1:].view(4, -1)).item():.4f}")
if ddp:
    destroy_process_group()
