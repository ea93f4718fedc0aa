"""One rank of a way to train a model of 100 million parameters, which `asked_ranks.py` starts and asks for steps.

Every way trains the same model on the same batches with AdamW; only what divides it differs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

SIZES = {"full": (768, 12, 16_384), "quick": (64, 2, 512)}  # width, blocks, words: 97.9 million parameters
BATCH = (4, 16)  # sequences and their lengths, a step, of a rank, or of ranks that train one batch together
HEAD = 32  # width of a head of attention


def plain_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """Take a step as a hand-written loop does."""
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


def nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Prepared:
    """What a way has made of the model.

    Attributes:
        model: that is called.
        optimizer: that steps.
        state: returns the tensors that are held between steps.
        step: takes a step of a batch.
        meet: waits for the other ranks.
    """

    model: Any
    optimizer: Any
    state: Callable[[], dict[str, Any]] = nothing
    step: Callable[[Any, Any, torch.Tensor], None] = plain_step
    meet: Callable[[], object] = dist.barrier


Ways = Mapping[str, Callable[[Any], Prepared]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // HEAD
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, HEAD)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, width: int, blocks: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def own_state(model: nn.Module, optimizer: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": model.state_dict(), "optimizer": list(optimizer.state.values())}


def torch_ddp(model: nn.Module) -> Prepared:
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(wrapped)
    return Prepared(wrapped, optimizer, own_state(model, optimizer))


def torch_zero(model: nn.Module) -> Prepared:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-4)
    return Prepared(wrapped, optimizer, own_state(model, optimizer.optim))


def torch_fsdp2(model: Any) -> Prepared:
    import ctypes

    from torch.distributed.fsdp import fully_shard

    for setting in (-1, -3):  # as ours does: glibc would keep what is gathered
        ctypes.CDLL(None).mallopt(setting, 2**20)
    fully_shard(model.embedding)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model)
    return Prepared(model, optimizer, own_state(model, optimizer))


def accelerate_fsdp2(model: nn.Module) -> Prepared:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block", "Embedding"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    return Prepared(prepared, optimizer, own_state(prepared, optimizer))


def distwrap_way(model: nn.Module) -> Prepared:
    import distwrap

    wrapped = distwrap.wrap_model(model)
    optimizer = distwrap.wrap_optimizer(adamw(wrapped), wrapped)
    return Prepared(wrapped, optimizer, own_state(model, optimizer))


STRATEGIES = {word: word for word in ("ddp", "zero1", "fsdp", "tp")}
STRATEGIES |= {"pipeline": "pipeline(loss='forward')", "hsdp": "fsdp(shard=2)"}
WAYS: Ways = {
    "torch ddp": torch_ddp,
    "torch zero": torch_zero,
    "torch fsdp2": torch_fsdp2,
    "accelerate fsdp2": accelerate_fsdp2,
    **{f"distwrap {word}": distwrap_way for word in STRATEGIES},
}
ONE_BATCH = ("distwrap tp", "distwrap pipeline")


def rank_main(ways: Ways, strategies: Mapping[str, str], way: str, size: str, conn: Connection) -> None:
    """Join the other ranks as the way does, and take steps.

    Args:
        ways: by name; each prepares the model.
        strategies: of the ways named "distwrap ...", by the rest of the name.
        way: of this rank.
        size: of the model.
        conn: over which the rank is asked.
    """
    torch.set_num_threads(1)
    if way.startswith("distwrap"):
        import distwrap

        strategy = strategies[way.removeprefix("distwrap ")]
        distwrap.distributed(strategy=strategy, backend="gloo")(serve)(ways, way, size, conn)
        return
    if way.startswith("torch"):
        dist.init_process_group("gloo")
    serve(ways, way, size, conn)
    if dist.is_initialized():
        dist.destroy_process_group()


def serve(ways: Ways, way: str, size: str, conn: Connection) -> None:
    """Prepare the model, and take steps as asked for."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    idle = memory("VmRSS")
    torch.manual_seed(0)
    prepared = ways[way](Model(*SIZES[size]))
    model, optimizer = prepared.model, prepared.optimizer
    seed = 0 if way in ONE_BATCH else rank
    x = torch.randint(SIZES[size][2], BATCH, generator=torch.Generator().manual_seed(seed))

    def step() -> float:
        prepared.meet()
        began = time.perf_counter()
        prepared.step(model, optimizer, x)
        return time.perf_counter() - began

    step()  # makes the optimizer's state
    reset_peak()
    conn.send({"ready": True, "ranks": ranks})
    while (asked := conn.recv()) != "end":
        if asked == "step":
            conn.send(step())
        elif asked == "memory":
            parts = prepared.state()
            held = sum(local(tensor).nbytes for tensor in tensors_in(parts))
            held += sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None)
            conn.send({"steady": memory("VmRSS") - idle, "peak": memory("VmHWM") - idle, "held": held})
        else:  # a full checkpoint
            import distwrap

            before = memory("VmRSS")
            reset_peak()
            with tempfile.TemporaryDirectory() as folder:
                distwrap.save({"model": model, "optimizer": optimizer}, shared(folder) / "full.pt")
            conn.send(memory("VmHWM") - before)


def shared(folder: str) -> Path:
    names: list[Any] = [folder]
    dist.broadcast_object_list(names)
    return Path(names[0])


def tensors_in(parts: Any) -> list[torch.Tensor]:
    if isinstance(parts, torch.Tensor):
        return [parts]
    values = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def local(tensor: Any) -> torch.Tensor:
    if type(tensor).__name__ == "Absent":  # of another stage
        return torch.empty(0)
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def memory(name: str) -> int:
    """Return a line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    with Connection(int(sys.argv[3])) as conn:
        rank_main(WAYS, STRATEGIES, sys.argv[1], sys.argv[2], conn)
