import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import local_rank, rank, save, setup_process_group, shard_loader, wrap_model

SNAPSHOT = os.environ["OUT"] + ".snapshot"


class Trainer:
    def __init__(self, model, data, optimizer):
        self.gpu_id = local_rank()
        self.model = model
        self.data = data
        self.optimizer = optimizer
        self.epochs_run = 0
        self.model = wrap_model(self.model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.data.set_epoch(epoch)
        for source, targets in self.data:
            self._run_batch(source, targets)

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.state_dict(), "EPOCHS_RUN": epoch}
        torch.save(snapshot, SNAPSHOT)
        print(f"Epoch {epoch} | Training snapshot saved at {SNAPSHOT}")

    def train(self, max_epochs: int):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % 2 == 0:
                self._save_snapshot(epoch)


def load_train_objs():
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    train_set = TensorDataset(x, x[:, :1])
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_set, model, optimizer


def prepare_dataloader(dataset, batch_size: int):
    return shard_loader(DataLoader(dataset, batch_size=batch_size, pin_memory=False, shuffle=True))


def main(total_epochs: int, batch_size: int):
    setup_process_group()
    torch.set_default_dtype(torch.float64)
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, batch_size)
    trainer = Trainer(model, train_data, optimizer)
    trainer.train(total_epochs)
    if rank() == 0:
        save(trainer.model.state_dict(), os.environ["OUT"], alone=True)


if __name__ == "__main__":
    main(3, int(os.environ["BATCH"]))
