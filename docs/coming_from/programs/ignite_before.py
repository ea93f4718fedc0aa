"""Train a small network by ignite's trainer, on ranks of ignite.distributed."""

import sys

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_trainer
from ignite.utils import manual_seed
from torch import nn
from torch.utils.data import TensorDataset


def make_data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def training(local_rank, path):
    manual_seed(0)
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = idist.auto_dataloader(make_data(), batch_size=32, shuffle=True)
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, device=idist.device())

    @trainer.on(Events.EPOCH_STARTED)
    def set_epoch(engine):
        loader.sampler.set_epoch(engine.state.epoch - 1)

    trainer.run(loader, max_epochs=3)
    if idist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)


if __name__ == "__main__":
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with idist.Parallel(backend=backend) as parallel:
        parallel.run(training, sys.argv[1])
