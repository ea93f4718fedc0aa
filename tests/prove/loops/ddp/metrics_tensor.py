"""All numbers of an epoch go through one tensor and one all_reduce; validation samples are dealt like cards."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LOSS, CORRECT, SAMPLES = range(3)  # what stands where in the tensor of metrics


def get_datasets():
    g = torch.Generator().manual_seed(123)
    centers = torch.randn(4, 8, generator=g)
    y = torch.randint(4, (141,), generator=g)
    x = centers[y] + 0.8 * torch.randn(141, 8, generator=g)
    return TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])


def compute_metrics(logits, labels):
    metrics = torch.zeros(3, dtype=torch.float64, device=logits.device)
    metrics[LOSS] = nn.functional.cross_entropy(logits, labels, reduction="sum").detach()
    metrics[CORRECT] = (logits.argmax(dim=1) == labels).sum()
    metrics[SAMPLES] = labels.numel()
    return metrics


def report(name, metrics, rank):
    dist.all_reduce(metrics, op=dist.ReduceOp.SUM)
    if rank == 0:
        samples = int(metrics[SAMPLES])
        print(f"{name}: loss {metrics[LOSS] / samples:.4f} accuracy {metrics[CORRECT] / samples:.4f} of {samples}")


def main():
    dist.init_process_group(backend="nccl", init_method="env://")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device(f"cuda:{local_rank}")
    torch.manual_seed(2024)

    train_set, val_set = get_datasets()
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler, num_workers=0, pin_memory=False)
    my_part = Subset(val_set, range(rank, len(val_set), world_size))  # 45 do not divide: no sample comes twice
    val_loader = DataLoader(my_part, batch_size=8, shuffle=False)

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    ddp_model = DDP(model, device_ids=[local_rank], output_device=local_rank)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.RMSprop(ddp_model.parameters(), lr=0.01)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        ddp_model.train()
        train_metrics = torch.zeros(3, dtype=torch.float64, device=device)
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            logits = ddp_model(inputs)
            loss = criterion(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_metrics += compute_metrics(logits, labels)
        report(f"epoch {epoch} train", train_metrics, rank)

        model.eval()  # the module itself: ranks may have unequally many batches
        val_metrics = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad():
            for inputs, labels in val_loader:
                val_metrics += compute_metrics(model(inputs.to(device)), labels.to(device))
        report(f"epoch {epoch} val", val_metrics, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
