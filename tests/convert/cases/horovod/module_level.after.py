import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, gather, rank, reduce, save, shard_loader, wrap_model


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 2))
    loader = shard_loader(DataLoader(
        data,
        batch_size=int(os.environ["BATCH"]),
    ), mode="pad")
    model = wrap_model(torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        count = torch.zeros(1)
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            count += len(x)
        count = reduce(count, op="sum")
        print(rank(), gather(count).tolist())
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
