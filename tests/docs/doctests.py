"""Run the examples in all of distwrap's docstrings: `python -m tests.docs.doctests`.

In a process of their own, because they import what torch imports late, and that leaves marks on a process.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import distwrap

NAMES = {
    "torch": torch,
    "nn": nn,
    "DataLoader": DataLoader,
    **{name: getattr(distwrap, name) for name in distwrap.__all__},
}


def main() -> int:
    """Run them, print how many there were, and return how many failed."""
    tried = failed = 0
    for found in pkgutil.walk_packages(distwrap.__path__, "distwrap."):
        if not found.name.endswith("__main__"):
            result = doctest.testmod(importlib.import_module(found.name), extraglobs=NAMES)
            tried, failed = tried + result.attempted, failed + result.failed
    print(f"{tried} examples, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
