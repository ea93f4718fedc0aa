"""Train a small convolutional net by Lightning Fabric: the loop is one's own, the devices are Fabric's."""

import argparse
from os import path

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from lightning.fabric import Fabric, seed_everything
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, 1)
        self.fc1 = nn.Linear(150, 24)
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def pictures(size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (size,), generator=generator)
    images = torch.randn(size, 1, 12, 12, generator=generator)
    images[torch.arange(size), 0, labels] += 3.0
    return TensorDataset(images, labels)


def train(fabric, hparams, model, optimizer, train_loader, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        # NOTE: no need to call `.to(device)` on the data, target
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        fabric.backward(loss)  # instead of loss.backward()
        fabric.clip_gradients(model, optimizer, max_norm=5.0)
        optimizer.step()
        if (batch_idx == 0) or ((batch_idx + 1) % hparams.log_interval == 0):
            print(
                f"Train Epoch: {epoch} [{(batch_idx * len(data))}/{len(train_loader.dataset)}"
                f" ({100.0 * batch_idx / len(train_loader):.0f}%)]\tLoss: {loss.item():.6f}"
            )
        if hparams.dry_run:
            break


def evaluate(fabric, model, test_loader):
    model.eval()
    loss_sum, hits, count = 0.0, 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            loss_sum += F.nll_loss(output, target, reduction="sum")
            hits += (output.argmax(1) == target).sum()
            count += len(target)
    # all_reduce is used to aggregate the values across processes
    loss_sum = fabric.all_reduce(loss_sum, reduce_op="sum")
    hits = fabric.all_reduce(hits, reduce_op="sum")
    count = fabric.all_reduce(torch.tensor(count), reduce_op="sum")
    return loss_sum / count, hits / count


def run(hparams):
    # Create the Lightning Fabric object. The parameters like accelerator, strategy, devices etc. will be
    # provided by the command line.
    fabric = Fabric(accelerator="auto", devices="auto")
    fabric.launch()

    seed_everything(hparams.seed)
    torch.set_default_dtype(torch.float64)

    # Let rank 0 get the data first
    with fabric.rank_zero_first(local=False):
        train_dataset = pictures(96, 0)
        test_dataset = pictures(33, 1)

    train_loader = DataLoader(train_dataset, batch_size=hparams.batch_size)
    test_loader = DataLoader(test_dataset, batch_size=hparams.batch_size)

    # don't forget to call `setup_dataloaders` to prepare for dataloaders for distributed training.
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=hparams.lr)

    # don't forget to call `setup` to prepare for model / optimizer for distributed training.
    # the model is moved automatically to the right device.
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=hparams.gamma)

    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if hparams.resume and path.exists(hparams.resume):
        remainder = fabric.load(hparams.resume, state)
        fabric.print(f"resumed at epoch {state['epoch']}, {len(remainder)} entries are left")

    # EPOCH LOOP
    for epoch in range(1, hparams.epochs + 1):
        train(fabric, hparams, model, optimizer, train_loader, epoch)
        test_loss, accuracy = evaluate(fabric, model, test_loader)
        fabric.print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: ({100 * accuracy:.0f}%)\n")
        if fabric.global_rank == 0:
            print(f"epoch {epoch} on {fabric.world_size} processes")
        scheduler.step()
        state["epoch"] = epoch
        if hparams.dry_run:
            break

    # When using distributed training, use `fabric.save` to ensure the current process is allowed to save a checkpoint
    fabric.barrier()
    if hparams.save_model:
        fabric.save("digits.pt", state)


def main():
    parser = argparse.ArgumentParser(description="Fabric digits example")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--epochs", type=int, default=3, metavar="N")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M")
    parser.add_argument("--dry-run", action="store_true", default=False, help="quickly check a single pass")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--log-interval", type=int, default=2, metavar="N")
    parser.add_argument("--resume", type=str, default="")
    parser.add_argument("--save-model", action="store_true", default=False, help="For Saving the current Model")
    hparams = parser.parse_args()

    run(hparams)


if __name__ == "__main__":
    main()
