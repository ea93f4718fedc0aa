"""Train, save on rank 0, begin again from nothing, load on every rank, and go on."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH_SIZE = 8


def is_main_process():
    return dist.get_rank() == 0


def prepare(device, train_set):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, 18), nn.ELU(), nn.Linear(18, 3)).to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=BATCH_SIZE, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=2 * len(loader))
    return ddp_model, optimizer, scheduler, loader


def save_checkpoint(path, model, optimizer, scheduler, epoch):
    if is_main_process():
        checkpoint = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
        }
        torch.save(checkpoint, path)
    dist.barrier()  # nobody reads before it is written


def load_checkpoint(path, model, optimizer, scheduler, device):
    if not os.path.exists(path):
        return 0
    checkpoint = torch.load(path, map_location=device)
    model.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    return checkpoint["epoch"] + 1


def run(path, train_set, device, last_epoch):
    model, optimizer, scheduler, loader = prepare(device, train_set)
    start_epoch = load_checkpoint(path, model, optimizer, scheduler, device)
    loss_fn = nn.HuberLoss()
    for epoch in range(start_epoch, last_epoch + 1):
        loader.sampler.set_epoch(epoch)
        running_loss = torch.zeros((), device=device)
        for x, y in loader:
            loss = loss_fn(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            running_loss += loss.detach()
        dist.all_reduce(running_loss)
        if is_main_process():
            print(f"epoch {epoch}: loss {running_loss.item() / len(loader) / dist.get_world_size():.4f}")
        save_checkpoint(path, model, optimizer, scheduler, epoch)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    g = torch.Generator().manual_seed(6)
    x = torch.randn(128, 9, generator=g)
    train_set = TensorDataset(x, torch.sin(x[:, :3]) + x[:, 3:6])
    folder = [tempfile.mkdtemp() if is_main_process() else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "checkpoint.pt")
    run(path, train_set, device, last_epoch=0)
    run(path, train_set, device, last_epoch=1)  # as after a restart
    if is_main_process():
        os.remove(path)
        os.rmdir(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
