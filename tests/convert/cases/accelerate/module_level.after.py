import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    backward,
    device as distwrap_device,
    distributed,
    rank,
    reduce,
    save,
    shard_loader,
    unwrap_model,
    wrap_model,
)


@distributed
def main():
    device = distwrap_device()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 2))
    model = torch.nn.Linear(2, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=int(os.environ["BATCH"]))
    model = wrap_model(model)
    loader = shard_loader(loader)
    for epoch in range(2):
        total = torch.zeros(1)
        for (x,) in loader:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            backward(loss)
            optimizer.step()
            total += loss.detach()
        total = reduce(total)
    if rank() == 0:
        save(unwrap_model(model).state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
