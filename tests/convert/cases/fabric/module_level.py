import os

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", strategy="ddp")
fabric.launch()
torch.set_default_dtype(torch.float64)
fabric.seed_everything(0)
data = TensorDataset(torch.randn(32, 2))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=int(os.environ["BATCH"])))
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        fabric.backward(loss)
        optimizer.step()
    fabric.print(f"{epoch}: {fabric.all_reduce(loss.detach()):.4f}")
fabric.save(os.environ["OUT"], model.state_dict())
