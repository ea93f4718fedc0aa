import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distwrap import distributed, is_rank_zero, mean, shard_loader, wrap_model


class Waves(Dataset):
    def __init__(self, n: int = 240, seed: int = 3) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 6, generator=g) * 2 - 1
        self.y = torch.sin(3 * self.x).mean(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return {"x": self.x[index], "y": self.y[index]}


class Trainer:
    def __init__(self, config: dict) -> None:
        self.config = config
        self.model = wrap_model(
            nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 1))
        )
        self.loader = shard_loader(DataLoader(Waves(), batch_size=config["batch_size"], shuffle=True))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config["lr"])
        total = config["epochs"] * len(self.loader)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=total)
        self.history: list[float] = []

    def training_step(self, batch: dict) -> torch.Tensor:
        return nn.functional.smooth_l1_loss(self.model(batch["x"]), batch["y"])

    def fit(self) -> float:
        for epoch in range(self.config["epochs"]):
            for batch in self.loader:
                self.optimizer.zero_grad(set_to_none=True)
                loss = self.training_step(batch)
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.history.append(mean(loss.item(), len(batch["x"])))
            if is_rank_zero():
                print(f"[{epoch}] {self.history[-1]:.5f}")
        return self.history[-1]


@distributed(seed=42)
def main():
    return Trainer({"batch_size": 16, "lr": 3e-3, "epochs": 2}).fit()


if __name__ == "__main__":
    print("final", round(main(), 6))
