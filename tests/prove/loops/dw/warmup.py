import argparse

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw


def get_data(n):
    g = torch.Generator().manual_seed(19)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x.roll(1, 1) * x).sum(1, keepdim=True))


@dw.distributed()
def main(args):
    dw.seed_everything(args.seed)
    loader = DataLoader(get_data(240), batch_size=args.batch_size, shuffle=True)
    loader = dw.shard_loader(loader, batch_size="global", order="stream")
    model = dw.wrap_model(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    total = args.epochs * len(loader)
    warmup = total // 5
    scheduler = LambdaLR(optimizer, lambda s: (s + 1) / warmup if s < warmup else (total - s) / (total - warmup))

    model.train()
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), max_norm=args.clip)
            optimizer.step()
            scheduler.step()
        lr = optimizer.param_groups[0]["lr"]
        dw.print(f"epoch {epoch} lr {lr:.4f} norm {norm:.4f}")
    return dw.mean(loss.item(), len(x))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    print(f"loss {main(parser.parse_args()):.6f}")
