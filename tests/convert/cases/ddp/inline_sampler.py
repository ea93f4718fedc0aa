import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def prepare_dataloader(dataset, batch_size):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        pin_memory=False,
        shuffle=False,
        sampler=DistributedSampler(dataset, shuffle=False)
    )


def main():
    init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(32, 4, dtype=torch.float64)
    loader = prepare_dataloader(TensorDataset(x, x.sum(1, keepdim=True)), int(os.environ["BATCH"]))
    model = DDP(nn.Linear(4, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if int(os.environ["RANK"]) == 0:
        torch.save(model.module.state_dict(), os.environ["OUT"])
    destroy_process_group()


if __name__ == "__main__":
    main()
