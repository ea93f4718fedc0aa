import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    backward,
    barrier,
    device,
    distributed,
    is_rank_zero,
    save,
    shard_loader,
    wrap_model,
)


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=int(os.environ["BATCH"]))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model = wrap_model(model)
    loader = shard_loader(loader)
    for epoch in range(2):
        for (x,) in loader:
            x = x.to(device())
            optimizer.zero_grad()
            backward((model(x) - x).square().mean())
            optimizer.step()
    barrier()
    if is_rank_zero():
        save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
