import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    backward,
    distributed,
    print,
    reduce,
    save,
    seed_everything,
    shard_loader,
    wrap_model,
)


@distributed(strategy="ddp")
def main():
    torch.set_default_dtype(torch.float64)
    seed_everything(0)
    data = TensorDataset(torch.randn(32, 2))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model = wrap_model(model)
    loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"])))
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            backward(loss)
            optimizer.step()
        print(f"{epoch}: {reduce(loss.detach()):.4f}")
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
