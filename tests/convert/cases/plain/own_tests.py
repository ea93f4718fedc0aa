import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    x = torch.randn(32, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=int(os.environ["BATCH"]))
    model = nn.Linear(4, 1).double()
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
                torch.save(model.state_dict(), os.environ["OUT"] + ".best")
            if time.time() - start > 1000:
                break
    torch.save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
