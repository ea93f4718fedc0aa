import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, save, shard_loader, wrap_model

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    model.to(device)
    criterion = torch.nn.MSELoss()
    if torch.cuda.is_available():
        criterion = criterion.cuda()
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"])))
    for epoch in range(2):
        for (x,) in loader:
            x = x.to(device, non_blocking=True)
            loss = criterion(model(x), torch.ones(len(x), 1, device=device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
