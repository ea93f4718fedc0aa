import os

import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = L.Fabric(devices="auto", precision="32-true")
    fabric.launch()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=int(os.environ["BATCH"]))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(loader)
    for epoch in range(2):
        for (x,) in loader:
            x = x.to(fabric.device)
            optimizer.zero_grad()
            fabric.backward((model(x) - x).square().mean())
            optimizer.step()
    fabric.barrier()
    if fabric.is_global_zero:
        torch.save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
