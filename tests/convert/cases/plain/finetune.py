import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Net()
    for parameter in model.body.parameters():
        parameter.requires_grad = False
    model.head = nn.Linear(4, 2)
    optimizer = torch.optim.SGD([{"params": model.head.parameters(), "lr": 0.1}], lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"]))
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
