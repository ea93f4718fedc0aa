"""Print the norm of each tensor in the files here."""

from pathlib import Path

import torch


def norms(name, found):
    if isinstance(found, torch.Tensor):
        print(name, f"{found.double().norm():.6g}")
    elif isinstance(found, dict):
        for key in found:
            norms(f"{name} {key}", found[key])


for path in sorted(Path().glob("*.pt")):
    norms(path.name, torch.load(path, weights_only=True))
