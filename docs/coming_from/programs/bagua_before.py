"""Train a small network by Bagua, under its launcher."""

import sys

import bagua.torch_api as bagua
import torch
import torch.nn.functional as F
from bagua.torch_api.algorithms import gradient_allreduce
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def main(path):
    torch.cuda.set_device(bagua.get_local_rank())
    bagua.init_process_group()
    torch.manual_seed(0)
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
    dataset = make_data()
    sampler = DistributedSampler(dataset, num_replicas=bagua.get_world_size(), rank=bagua.get_rank())
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.cuda(), y.cuda()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    if bagua.get_rank() == 0:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main(sys.argv[1])
