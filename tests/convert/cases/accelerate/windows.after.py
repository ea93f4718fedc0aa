import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    accumulate,
    backward,
    barrier,
    distributed,
    print,
    save,
    seed_everything,
    shard_loader,
    world_size,
    wrap_model,
)


@distributed
def main():
    seed_everything(0)
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(torch.randn(32, 2), torch.randn(32, 2))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // world_size()))
    model = wrap_model(model)
    loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"])))
    steps = 0
    for epoch in range(2):
        for (x, y), window in accumulate(loader, 3, model):
            # one of three batches
            loss = (model(x) - y).square().mean()
            backward(loss / 3)
            if not loss.isnan():
                if window.last:
                    optimizer.step()
            if window.last:
                for _ in range(world_size()): scheduler.step()
                optimizer.zero_grad()
            if window.last:
                steps += 1
    barrier()
    print(f"{steps} steps")
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
