import os

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader, TensorDataset


def step(batch, model, optimizer, *, fabric):
    optimizer.zero_grad()
    loss = (model(batch) - batch).square().mean()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, clip_val=0.05)
    optimizer.step()
    return loss.detach()


def fit(fabric: Fabric, model, optimizer, loader):
    for epoch in range(2):
        for batch_number, (batch,) in enumerate(loader):
            loss = step(batch, model, optimizer, fabric=fabric)
        fabric.print(epoch, fabric.all_gather(loss).mean().item())


def main():
    fabric = Fabric()
    fabric.launch()
    seed_everything(0)
    torch.set_default_dtype(torch.float64)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=int(os.environ["BATCH"])))
    model = torch.nn.Linear(2, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = {"model": model, "epochs": 1}
    fit(fabric, model, optimizer, loader)
    fabric.save(os.environ["OUT"] + ".state", state)
    fabric.load(os.environ["OUT"] + ".state", state)
    if fabric.is_global_zero:
        torch.save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
