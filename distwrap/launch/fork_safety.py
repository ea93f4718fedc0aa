"""Whether this process may be forked into ranks, and why not."""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback

import torch

_first_use: list[str] = []


def refusal() -> str | None:
    """Say why a fork would not be safe now; ``None`` where it is."""
    if not hasattr(threading, "main_thread") or sys.platform == "win32":
        return "this system has no fork"
    if sys.platform == "darwin":
        return "Apple's system libraries do not survive a fork"
    if _accelerator_initialised():
        where = f", first used at:\n{_first_use[0]}" if _first_use else ""
        return f"this process has initialised an accelerator, which a forked process cannot use{where}"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others:
        return (
            f"other threads are at work ({', '.join(others)}), and a lock that one of them holds would stay "
            f"locked in the ranks forever"
        )
    return None


def watch_first_use() -> None:
    """Remember where CUDA is initialised, so that a refusal can say it. Touches nothing."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        torch.cuda._lazy_call(_remember)  # type: ignore[no-untyped-call]


def _remember() -> None:
    if not _first_use:
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        _first_use.append("".join(traceback.format_list(frames[-3:])))


def _cuda_driver_initialised() -> bool:
    """Ask CUDA's driver itself: a mere ``torch.cuda.is_available()`` starts it, and a fork cannot use it then.

    Source: CUDA driver API, error 3 (CUDA_ERROR_NOT_INITIALIZED) of any call before cuInit.
    """
    if torch.version.cuda is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)


def _accelerator_initialised() -> bool:
    if torch.cuda.is_initialized() or _cuda_driver_initialised():  # type: ignore[no-untyped-call]
        return True
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, built for an accelerator that is not there
        return False
    if accelerator is None or accelerator.type in ("cpu", "cuda", "mps"):
        return False
    module = torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", lambda: False)())
