import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    backward,
    barrier,
    device,
    distributed,
    gather,
    is_rank_zero,
    print as distwrap_print,
    save,
    shard_loader,
    unwrap_model,
    world_size,
    wrap_model,
)


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    train_loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=int(os.environ["BATCH"]))
    test_loader = DataLoader(TensorDataset(x[:9], x[:9, :1]), batch_size=4)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    model = wrap_model(model)
    train_loader = shard_loader(train_loader)
    test_loader = shard_loader(test_loader)
    for epoch in range(2):
        model.train()
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        errors = []
        for x, y in test_loader:
            with torch.no_grad():
                errors.append(gather((model(x) - y).abs()))
        distwrap_print(f"epoch {epoch}: {torch.cat(errors).mean():.6f}")
    barrier()
    if is_rank_zero():
        print(world_size(), "processes on", device())
    save(unwrap_model(model).state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
