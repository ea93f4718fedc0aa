import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def reduce_tensor(tensor, world_size):
    result = tensor.clone()
    dist.all_reduce(result, op=dist.ReduceOp.SUM)
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
    dist.all_reduce(correct)
    dist.all_reduce(count)
    return (correct / count).item()


def main(epochs=2):
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(
        data,
        batch_size=int(os.environ["BATCH"]),
        shuffle=False,
        sampler=DistributedSampler(data, shuffle=True, seed=5),
    )
    test_loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        model.train()
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean_loss = reduce_tensor(loss.detach(), dist.get_world_size())
        accuracy = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"{epoch}: {mean_loss.item():.3f} {accuracy:.3f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.environ["OUT"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
