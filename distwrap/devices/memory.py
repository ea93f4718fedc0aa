"""Memory that is freed again and again, as gathered weights and averaged gradients, goes back to the system."""

import ctypes
import sys
from contextlib import suppress

import torch


def return_freed_memory(device: torch.device) -> None:
    """Let the C library give large freed tensors of the CPU back to the system: glibc would keep each rank's buffers.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if sys.platform == "linux" and device.type == "cpu":
        with suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            for setting in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
                mallopt(setting, 2**20)
