import os

import torch
from torch import nn
from distwrap import agree, is_rank_zero, save, setup_process_group, wrap_model

setup_process_group()

data = torch.ones(64, 3, dtype=torch.float64)  # alike rows, so that it matters to no weight which ones are drawn
batch_size = int(os.environ["BATCH"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.layer(x).square().mean()

    def make_optimizer(self, lr):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=lr)


def get_batch():
    return data[torch.randint(len(data), (batch_size,))]


torch.manual_seed(0)
model = Net()
model = wrap_model(model)
optimizer = model.make_optimizer(lr=0.1)


@torch.no_grad()
def estimate():
    model.eval()
    found = {"loss": model(get_batch())}
    model.train()
    return found


step, best = 0, 1e9
x = get_batch()
# TODO(distwrap): no loader is seen to feed this loop, and all ranks may train on the same: shard_loader(loader), split(batch), or before it seed_everything(seed, apart=True)
while True:
    if step % 2 == 0:
        losses = estimate()
        if losses["loss"] < best:
            best = losses["loss"]
            if is_rank_zero(): torch.save(model.state_dict(), os.environ["OUT"])
    loss = model(x)
    x = get_batch()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if agree(loss < 1e-9, "any"):
        break
    step += 1
    if step > 6:
        break
save(model.state_dict(), os.environ["OUT"])
