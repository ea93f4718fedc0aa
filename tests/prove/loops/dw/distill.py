import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 16), nn.GELU(), nn.Linear(16, n_out))


def two_views(n=160):
    g = torch.Generator().manual_seed(23)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(*(x + 0.2 * torch.randn(n, 10, generator=g) for _ in range(2)))


@torch.no_grad()
def follow(teacher, student, momentum=0.95):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s, 1 - momentum)


@dw.distributed(seed=1)
def main():
    loader = dw.shard_loader(DataLoader(two_views(), batch_size=16), batch_size="global")
    backbone, projector = mlp(10, 8), mlp(8, 6)
    teacher = copy.deepcopy(nn.Sequential(backbone, projector)).requires_grad_(False)
    backbone = dw.wrap_model(backbone)
    projector = dw.wrap_model(projector)
    params = [*backbone.parameters(), *projector.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    center = torch.zeros(6)

    for _ in range(2):
        for one, two in loader:
            with torch.no_grad():
                target = teacher(one)
                soft = F.softmax((target - center) / 0.5, dim=1)
            log_probs = F.log_softmax(projector(backbone(two)), dim=1)
            loss = -(soft * log_probs).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(teacher, nn.Sequential(dw.unwrap_model(backbone), dw.unwrap_model(projector)))
            center = 0.8 * center + 0.2 * dw.mean(target.mean(0), len(target))
    return dw.mean(loss.item(), len(one))


if __name__ == "__main__":
    print(f"loss {main():.6f}")
