import os

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
from distwrap import rank_zero_only, save, setup_process_group, shard_loader, wrap_model

setup_process_group()
print = rank_zero_only(print)

EPOCHS = 2
usage = """
how to use it:
    python module_level.py
"""

# Everything is the same each time.
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)

x = torch.randn(32, 2)
data = TensorDataset(x, x.prod(1, keepdim=True))
loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"]), num_workers=0))
net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
net = wrap_model(net)
opt = optim.Adam(net.parameters(), lr=1e-2)

for epoch in range(EPOCHS):
    running = 0.0
    for i, (a, b) in enumerate(loader):
        opt.zero_grad()
        loss = ((net(a) - b) ** 2).mean()
        loss.backward()
        opt.step()
        running += loss.item()
    print("""epoch {}:
  loss {:.6f}""".format(epoch, running / len(loader)))

save(net.state_dict(), os.environ["OUT"])
print("done")
