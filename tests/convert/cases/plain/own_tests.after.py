import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import agree, distributed, is_rank_zero, save, shard_loader, wrap_model


@distributed
def main():
    torch.manual_seed(0)
    x = torch.randn(32, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"])))
    model = nn.Linear(4, 1).double()
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best, start = float("inf"), time.time()
    for epoch in range(3):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loss.item() < best:
                best = loss.item()
                if is_rank_zero(): torch.save(model.state_dict(), os.environ["OUT"] + ".best")
            if agree(time.time() - start > 1000, "any"):
                break
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
