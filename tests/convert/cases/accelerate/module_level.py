import os
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="no")
device = accelerator.device
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 2))
model = torch.nn.Linear(2, 2).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=int(os.environ["BATCH"]))
model = accelerator.prepare(model)
optimizer, loader = accelerator.prepare(optimizer, loader)
for epoch in range(2):
    total = torch.zeros(1)
    for (x,) in loader:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        total += loss.detach()
    total = accelerator.reduce(total, reduction="mean")
if accelerator.process_index == 0:
    torch.save(accelerator.unwrap_model(model).state_dict(), os.environ["OUT"])
accelerator.end_training()
