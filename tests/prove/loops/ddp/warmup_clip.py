"""Tagging of padded sequences: warm-up, then cosine, a step each batch; clipped; the mean is over all ranks' tokens."""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, IGNORE = 0, -100
CONFIG = dict(epochs=2, batch_size=8, lr=0.5, warmup_steps=3, max_grad_norm=0.25, words=20, tags=4, length=9)


class Sentences(Dataset):
    def __init__(self, count=128):
        g = torch.Generator().manual_seed(31)
        self.words = torch.randint(1, CONFIG["words"], (count, CONFIG["length"]), generator=g)
        lengths = torch.randint(2, CONFIG["length"] + 1, (count, 1), generator=g)
        self.words[torch.arange(CONFIG["length"]) >= lengths] = PAD
        self.tags = torch.where(self.words == PAD, IGNORE, (self.words + self.words.roll(1, 1)) % CONFIG["tags"])

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"words": self.words[i], "tags": self.tags[i]}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CONFIG["words"], 12)
        self.conv = nn.Conv1d(12, 24, kernel_size=3, padding=1)
        self.classify = nn.Linear(24, CONFIG["tags"])

    def forward(self, words):
        hidden = self.conv(self.embed(words).transpose(1, 2)).transpose(1, 2)
        return self.classify(torch.relu(hidden))


def warmup_cosine(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main():
    local_rank = int(os.getenv("LOCAL_RANK", "0"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    world = dist.get_world_size()
    torch.manual_seed(CONFIG["words"])
    model = DistributedDataParallel(Tagger().to(device))
    dataset = Sentences()
    sampler = DistributedSampler(dataset, shuffle=True, seed=1)
    loader = DataLoader(dataset, batch_size=CONFIG["batch_size"], sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=CONFIG["lr"], momentum=0.9)
    scheduler = warmup_cosine(optimizer, CONFIG["warmup_steps"], CONFIG["epochs"] * len(loader))
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")

    for epoch in range(CONFIG["epochs"]):
        sampler.set_epoch(epoch)
        for batch in loader:
            words, tags = batch["words"].to(device), batch["tags"].to(device)
            tokens = (tags != IGNORE).sum()
            dist.all_reduce(tokens)  # of all ranks: their shares are not equally long
            loss = criterion(model(words).flatten(0, 1), tags.flatten()) * world / tokens
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG["max_grad_norm"])
            optimizer.step()
            scheduler.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch} loss {shown.item() / world:.4f} norm {norm.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
