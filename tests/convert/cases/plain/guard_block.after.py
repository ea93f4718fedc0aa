import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import save, setup_process_group, shard_loader, wrap_model


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x).relu()


if __name__ == "__main__":  # the script's beginning
    setup_process_group()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(24, 4))
    model = Net()
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for (x,) in shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"]))):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    save(model.state_dict(), os.environ["OUT"])
