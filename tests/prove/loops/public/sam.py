"""Sharpness-aware minimization, two backwards a step; draws no random numbers in the loop."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, mean, shard_loader, wrap_model


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        """Climb to the worst place near by; the gradients are already those of all ranks."""
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError("SAM takes its step in two halves.")


@distributed()
def main():
    torch.manual_seed(3)
    x = torch.randn(128, 8)
    y = (x @ torch.randn(8, 3) + 0.3 * torch.randn(128, 3)).argmax(1)
    loader = shard_loader(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True), batch_size="global", order="stream")
    model = wrap_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for epoch in range(1):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.first_step()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.second_step()
        distwrap.print(f"epoch {epoch}: loss {mean(loss.item(), len(inputs)):.4f}")


if __name__ == "__main__":
    main()
