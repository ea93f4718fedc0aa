import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=3)
set_seed(0)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(32, 2), torch.randn(32, 2))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // accelerator.num_processes))
model, optimizer, loader, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=int(os.environ["BATCH"])), scheduler
)
steps = 0
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            # one of three batches
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            if not loss.isnan():
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
accelerator.wait_for_everyone()
accelerator.print(f"{steps} steps")
accelerator.save(accelerator.get_state_dict(model), os.environ["OUT"])
