"""DeepSpeed's engine behind a hand-written loop; the package is imported when a model is wrapped."""

from typing import Any

from distwrap.strategies.deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy

_NATIVE = ("engine_of", "gathered_weights", "load_engine", "save_engine")

__all__ = ["DeepSpeedStrategy", *_NATIVE]


def __getattr__(name: str) -> Any:
    if name in _NATIVE:
        from distwrap.strategies.deepspeed import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
