"""A meter that knows the settings."""

import torch
import torch.distributed as dist

from parts import settings

ALL = {}


class Meter:
    def __init__(self, name):
        self.name, self.total, self.count = f"{name}@{settings.rank}", 0.0, 0
        ALL[self.name] = self

    def add(self, value, n):
        self.total += value * n
        self.count += n

    def synchronize(self):
        both = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(both)
        self.total, self.count = both[0].item(), int(both[1])

    @property
    def mean(self):
        return self.total / max(self.count, 1)
