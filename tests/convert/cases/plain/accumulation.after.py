import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, save, shard_loader, wrap_model

ACCUMULATION = 2


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(48, 3)
    loader = shard_loader(DataLoader(TensorDataset(x, x.sum(1)), batch_size=int(os.environ["BATCH"])))
    model = torch.nn.Linear(3, 1)
    model = wrap_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        for i, (inputs, targets) in enumerate(loader):
            loss = F.mse_loss(model(inputs).squeeze(1), targets) / ACCUMULATION
            loss.backward()
            if (i + 1) % ACCUMULATION == 0:
                optimizer.step()
                optimizer.zero_grad()
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
