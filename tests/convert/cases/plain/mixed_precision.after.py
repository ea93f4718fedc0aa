import os

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, save, shard_loader, wrap_model


@distributed
def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    use_amp = torch.cuda.is_available()
    x = torch.randn(32, 3)
    loader = shard_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=int(os.environ["BATCH"])))
    model = nn.Linear(3, 1)
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cuda", enabled=use_amp)
    for epoch in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            with autocast("cuda", enabled=use_amp):
                loss = nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
