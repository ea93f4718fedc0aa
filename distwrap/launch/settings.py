"""Settings of Python and torch that a program makes at its top level, brought to ranks that are no forks of it.

Without them a rank would compute in another precision, or log nowhere, wherever it does not run the top level again.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from distwrap._internals.torch import default_device
from distwrap.launch import pickling

# Names in torch: what tells a setting, and what makes it.
_FUNCTIONS = {
    "get_default_dtype": "set_default_dtype",
    "get_deterministic_debug_mode": "set_deterministic_debug_mode",
    "get_float32_matmul_precision": "set_float32_matmul_precision",
    "is_anomaly_enabled": "set_anomaly_enabled",
    "is_grad_enabled": "set_grad_enabled",
    "multiprocessing.get_sharing_strategy": "multiprocessing.set_sharing_strategy",
    "backends.cuda.cudnn_sdp_enabled": "backends.cuda.enable_cudnn_sdp",
    "backends.cuda.flash_sdp_enabled": "backends.cuda.enable_flash_sdp",
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed": "backends.cuda.allow_fp16_bf16_reduction_math_sdp",
    "backends.cuda.math_sdp_enabled": "backends.cuda.enable_math_sdp",
    "backends.cuda.mem_efficient_sdp_enabled": "backends.cuda.enable_mem_efficient_sdp",
}
# Names in torch of settings that are told and made as attributes; the older ones first, which make some of the newer.
_ATTRIBUTES = {
    "backends.cuda.matmul": (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "backends.cudnn": ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32"),
    "backends.mkldnn": ("enabled", "deterministic", "allow_tf32"),
    "backends.opt_einsum": ("enabled", "strategy"),
    "backends.quantized": ("engine",),
    "utils.deterministic": ("fill_uninitialized_memory",),
    "backends": ("fp32_precision", "cudnn.fp32_precision", "cuda.matmul.fp32_precision", "mkldnn.fp32_precision"),
    "backends.cudnn.conv": ("fp32_precision",),
    "backends.cudnn.rnn": ("fp32_precision",),
    "backends.mkldnn.conv": ("fp32_precision",),
    "backends.mkldnn.matmul": ("fp32_precision",),
    "backends.mkldnn.rnn": ("fp32_precision",),
}
_STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Settings:
    """Settings of a process.

    Attributes:
        recursion_limit: Python's.
        device: torch's default device; ``None`` where nobody has set one.
        torch: torch's other settings by their names; without those that this version lacks, or cannot tell.
        loggers: levels and handlers of the loggers; a handler that is tied to this process stays here.
        disabled: up to which level all logging is off.
    """

    recursion_limit: int
    device: torch.device | None
    torch: dict[str, Any]
    loggers: list[_Logger]
    disabled: int

    @classmethod
    def capture(cls) -> Settings:
        """Read the settings of this process."""
        with _without_warnings():
            torch_settings = {name: value for name in _names() if (value := _read(name)) is not None}
        known = logging.root.manager.loggerDict
        loggers = [each for each in (logging.root, *known.values()) if isinstance(each, logging.Logger)]
        return cls(
            sys.getrecursionlimit(),
            default_device(),
            torch_settings,
            [_Logger.of(logger) for logger in loggers],
            logging.root.manager.disable,
        )

    def restore(self) -> None:
        """Apply the settings in this process, where they differ."""
        sys.setrecursionlimit(self.recursion_limit)
        if self.device != default_device():
            torch.set_default_device(self.device)
        with _without_warnings():
            for name, value in self.torch.items():
                if _read(name) != value:
                    _write(name, value)
        for logger in self.loggers:
            logger.restore()
        if logging.root.manager.disable != self.disabled:
            logging.disable(self.disabled)


def _names() -> Iterator[str]:
    yield from _FUNCTIONS
    for owner, names in _ATTRIBUTES.items():
        yield from (f"{owner}.{name}" for name in names)


def _read(name: str) -> Any:
    with suppress(AttributeError, RuntimeError):  # torch refuses to tell in older words what newer ones have set
        value = attrgetter(name)(torch)
        return value() if name in _FUNCTIONS else value
    return None


def _write(name: str, value: Any) -> None:
    if name in _FUNCTIONS:
        attrgetter(_FUNCTIONS[name])(torch)(value)
    else:
        owner, _, attribute = name.rpartition(".")
        setattr(attrgetter(owner)(torch), attribute, value)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress torch's warnings: torch 2.9 for CUDA warns of each older setting that is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class _Logger:
    name: str
    level: int
    propagate: bool
    disabled: bool
    handlers: list[bytes]

    @classmethod
    def of(cls, logger: logging.Logger) -> _Logger:
        packed = [_pack(handler) for handler in logger.handlers]
        handlers = [data for data in packed if data is not None]
        return cls(logger.name, logger.level, logger.propagate, logger.disabled, handlers)

    def restore(self) -> None:
        logger = logging.root if self.name == "root" else logging.getLogger(self.name)
        if logger.level != self.level:  # else Python would empty the caches of all loggers
            logger.setLevel(self.level)
        logger.propagate, logger.disabled = self.propagate, self.disabled
        if not logger.handlers:  # else the rank has run what adds them
            for data in self.handlers:
                with suppress(Exception):
                    logger.addHandler(_unpack(data))


def _pack(handler: logging.Handler) -> bytes | None:
    """Return a logging handler that writes to the console or to a file of its own, pickled; ``None`` of any other."""
    stream = getattr(handler, "stream", None)
    names = [name for name in _STREAMS if stream in (getattr(sys, name), getattr(sys, f"__{name}__"))]
    if stream is not None and not names and not isinstance(handler, logging.FileHandler):
        return None
    state = {name: value for name, value in vars(handler).items() if name not in ("lock", "stream")}
    with suppress(Exception):
        return pickling.dumps((type(handler), state, *names[:1]))
    return None


def _unpack(data: bytes) -> logging.Handler:
    cls, state, *names = pickling.loads(data)
    handler: logging.Handler = cls.__new__(cls)
    vars(handler).update(state)
    handler.createLock()
    if names and isinstance(handler, logging.StreamHandler):
        handler.stream = getattr(sys, names[0])
    elif isinstance(handler, logging.FileHandler):
        handler.stream, handler.mode = None, "a"  # opened at the first record; what is there stays
    return handler
