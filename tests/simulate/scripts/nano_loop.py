"""A loop in the manner of nanoGPT's: configuration by globals, accumulation, schedule, evaluation, checkpoint."""

import math
import os
import tempfile
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

max_iters, eval_interval, eval_iters = 6, 3, 2
batch_size, block_size, vocab_size, n_embd = 2, 8, 16, 12
gradient_accumulation_steps = 4
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 2, 1.0
backend = "nccl"
device = "cuda" if torch.cuda.is_available() else "cpu"
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
config = {k: globals()[k] for k in config_keys}

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend if device == "cuda" else "gloo")
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + seed_offset)
device_type = "cuda" if "cuda" in device else "cpu"
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, enabled=False)
torch.set_default_dtype(torch.float64)
data = np.random.RandomState(0).randint(0, vocab_size, 400)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size]) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size]) for i in ix])
    if device_type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.attn = nn.MultiheadAttention(n_embd, 2, batch_first=True)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx)
        mask = torch.triu(torch.ones(idx.size(1), idx.size(1), dtype=torch.bool, device=idx.device), 1)
        x = x + self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        X, Y = get_batch()
        with ctx:
            losses[k] = raw_model(X, Y)[1].item()
    raw_model.train()
    return losses.mean().item()


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])] if device_type == "cuda" else None)
raw_model = model.module if ddp else model
scaler = torch.amp.GradScaler(device_type, enabled=False)
X, Y = get_batch()
for iter_num in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        print(f"RESULT step {iter_num} {estimate_loss():.6f}")
        with tempfile.TemporaryDirectory() as out_dir:
            file = os.path.join(out_dir, "ckpt.pt")
            torch.save({"model": raw_model.state_dict(), "iter_num": iter_num, "config": config}, file)
            checkpoint = torch.load(file, map_location=device)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
if master_process:
    total = sum(value.double().abs().sum().item() for value in raw_model.state_dict().values())
    print(f"RESULT done {checkpoint['iter_num']} {checkpoint['config']['max_iters']} {total:.6f}")
if ddp:
    destroy_process_group()
