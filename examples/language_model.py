"""Train a small GPT, byte by byte, on the source of Python's own standard library, and let it write some.

It shows mixed precision, gradient clipping and a cosine schedule on two ranks. `backward` and `optimizer_step` do the
right thing in bf16, fp16 and float32 alike. It takes about a minute on two CPU cores; use `--steps 20` for a first
look. One option divides the model: `--strategy fsdp`, `"tp(plan='gpt')"`, `"pipeline(loss='loss')"`, or, on four
ranks, `"fsdp(tensor_parallel=2, plan='gpt')"`.

    python examples/language_model.py --steps 300 --nprocs 2 --precision bf16
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from distwrap import backward, distributed, mean, optimizer_step, rank_zero_only, shard_loader, world_size, wrap_model

BYTES = 128  # ASCII
say = rank_zero_only(print)


def read_library(megabytes: float) -> torch.Tensor:
    """Read the standard library's top-level modules, in the order of their names."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) > megabytes * 1e6:
            break
    return torch.tensor([byte for byte in text if byte < BYTES])


class Windows(Dataset):
    """Every half-overlapping window of the text: inputs, and the same one byte further on."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return 2 * (len(self.text) - 1) // self.length - 1

    def __getitem__(self, index: int):
        start = index * self.length // 2
        piece = self.text[start : start + self.length + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.token, self.position = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: nn.Module, prompt: str, count: int) -> str:
    """Continue the prompt, byte by byte, alike on all ranks: a divided model computes on all of them."""
    tokens = torch.tensor([list(prompt.encode())])
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        chances = model(tokens[:, -model.length :])[:, -1].float().cpu().div(0.8).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    return bytes(tokens[0].tolist()).decode()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Average the loss over all ranks' windows, each counted once."""
    model.eval()
    total, count = 0.0, 0
    for batch in loader:
        total, count = total + model.loss(*batch).item() * len(batch[0]), count + len(batch[0])
    model.train()
    return mean(total / max(count, 1), count)


def endlessly(loader: DataLoader):
    while True:
        yield from loader


@distributed(nprocs=2, precision="bf16", seed=0)
def main(args: argparse.Namespace) -> tuple[float, float]:
    text = read_library(args.megabytes)
    cut = len(text) * 19 // 20
    train_loader = shard_loader(
        DataLoader(Windows(text[:cut], args.length), args.batch_size, shuffle=True, drop_last=True), batch_size="global"
    )
    test_loader = shard_loader(DataLoader(Subset(Windows(text[cut:], args.length), range(args.test)), args.batch_size))
    model = wrap_model(GPT(args.width, args.depth, args.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warm = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1, step / args.steps)))
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    first = evaluate(model, test_loader)
    say(f"{len(text):,} bytes, {size:,} parameters, {world_size()} rank(s); loss before training {first:.3f}")
    for step, batch in zip(range(1, args.steps + 1), endlessly(train_loader), strict=False):
        loss = model.loss(*batch)
        backward(loss)
        if optimizer_step(optimizer, max_norm=1.0):
            schedule.step()
        optimizer.zero_grad()
        if step % max(1, args.steps // 10) == 0:
            average = mean(loss.item())
            say(f"step {step:4d}  loss {average:.3f}  lr {schedule.get_last_lr()[0]:.1e}", flush=True)
    last = evaluate(model, test_loader)
    say(f"test loss {last:.3f}, that is {last / math.log(2):.2f} bits a byte; it writes:\n")
    say(write(model.eval(), "def ", args.write))
    return first, last


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT on the standard library.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--strategy", default="ddp", help="fsdp, tp(plan='gpt'), pipeline(loss='loss'), zero1, ...")
    parser.add_argument("--precision", default="bf16", choices=["32", "bf16", "fp16"])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--length", type=int, default=128, help="bytes the model sees at a time")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=3.0, help="of text to read")
    parser.add_argument("--test", type=int, default=128, help="windows of text kept for the test")
    parser.add_argument("--write", type=int, default=300, help="bytes to write at the end")
    args = parser.parse_args()
    main.options(nprocs=args.nprocs, strategy=args.strategy, precision=args.precision)(args)
