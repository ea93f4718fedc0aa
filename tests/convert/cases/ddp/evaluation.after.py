import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    rank,
    reduce,
    save,
    setup_process_group,
    shard_loader,
    world_size as distwrap_world_size,
    wrap_model,
)


def reduce_tensor(tensor, world_size):
    result = tensor.clone()
    result = reduce(result, op="sum")
    result /= world_size
    return result


def evaluate(model, loader):
    model.eval()
    correct = torch.zeros(1)
    count = torch.zeros(1)
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum()
            count += len(y)
    correct = reduce(correct, op="sum")
    count = reduce(count, op="sum")
    return (correct / count).item()


def main(epochs=2):
    setup_process_group()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = shard_loader(DataLoader(
        data,
        batch_size=int(os.environ["BATCH"]),
        shuffle=True,
    ), seed=5)
    test_loader = shard_loader(DataLoader(data, batch_size=8), mode="pad")
    model = wrap_model(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        model.train()
        loader.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean_loss = reduce_tensor(loss.detach(), distwrap_world_size())
        accuracy = evaluate(model, test_loader)
        if rank() == 0:
            print(f"{epoch}: {mean_loss.item():.3f} {accuracy:.3f}")
    if rank() == 0:
        save(model.state_dict(), os.environ["OUT"], alone=True)


if __name__ == "__main__":
    main()
