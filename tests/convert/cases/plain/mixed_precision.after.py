import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    autocast as distwrap_autocast,
    backward,
    distributed,
    optimizer_step,
    save,
    shard_loader,
    wrap_model,
)


@distributed(precision="fp16" if torch.cuda.is_available() else "32")
def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    use_amp = torch.cuda.is_available()
    x = torch.randn(32, 3)
    loader = shard_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=int(os.environ["BATCH"])))
    model = wrap_model(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            with distwrap_autocast():
                loss = nn.functional.mse_loss(model(inputs), targets)
            backward(loss)
            optimizer_step(optimizer, max_norm=0.5)
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
