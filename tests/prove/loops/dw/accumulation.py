import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

STEPS = 4


class Classifier(nn.Module):
    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.stem = nn.Linear(10, width)
        self.block = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + F.relu(self.block(x))
        return self.head(x)


@dw.distributed(seed=5)
def main():
    g = torch.Generator().manual_seed(11)
    inputs = torch.randn(240, 10, generator=g)
    labels = inputs[:, :4].argmax(1)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
    loader = dw.shard_loader(loader, batch_size="global", order="stream")

    model = dw.wrap_model(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for _ in range(2):
        total = 0.0
        for (x, y), window in dw.accumulate(loader, STEPS, model):
            loss = F.cross_entropy(model(x), y)
            dw.backward(loss / window.size)
            total += loss.item()
            if window.last:
                dw.optimizer_step(optimizer, max_norm=5.0)
                optimizer.zero_grad()
    return dw.reduce(total / len(loader), "mean")


if __name__ == "__main__":
    print(f"mean loss of the last epoch: {main():.6f}")
