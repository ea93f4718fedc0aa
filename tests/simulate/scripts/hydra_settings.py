"""Settings by hydra, which begins once in a process."""

import os
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel as DDP

OmegaConf.register_new_resolver("half", lambda number: number / 2)
Path("settings").mkdir(exist_ok=True)
Path("settings/train.yaml").write_text("lr: 0.2\nhalf: ${half:${lr}}\nhydra: {run: {dir: .}, output_subdir: null}\n")


@hydra.main(version_base=None, config_path=os.path.abspath("settings"), config_name="train")
def main(settings):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.half)
    for step in range(3):
        model(torch.full((2, 3), float(dist.get_rank() + step), dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"RESULT {settings.half} {model.module.weight.sum().item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
