"""Train a small network by Ray Train."""

import shutil
import sys
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def train_func():
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    for epoch in range(3):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(model.module.state_dict(), Path(folder) / "model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


if __name__ == "__main__":
    scaling_config = ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    trainer = ray.train.torch.TorchTrainer(train_func, scaling_config=scaling_config)
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        shutil.copy(Path(folder) / "model.pt", sys.argv[1])
