import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import rank_zero_only, save, setup_process_group, shard_loader, wrap_model

setup_process_group()
print = rank_zero_only(print)

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(32, 3)
loader = shard_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=int(os.environ["BATCH"])))
model = nn.Linear(3, 1)
model = wrap_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def train(epoch):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"""epoch {epoch}:
    done""")


if __name__ == "__main__":
    # Two epochs are enough.
    for epoch in range(2):
        train(epoch)
    text = """
  as it is"""
    save(model.state_dict(), os.environ["OUT"])
