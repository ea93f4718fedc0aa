"""Access to DeepSpeed's own engine of a wrapped model, and checkpoints in DeepSpeed's format for ``zero_to_fp32``.

Source: https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from distwrap.errors import CheckpointError, ModelError
from distwrap.model.wrapped_models import routing_of
from distwrap.strategies.deepspeed.engine import ModelEngine, take_options


def engine_of(model: nn.Module) -> Any:
    """Return the ``DeepSpeedEngine`` of a wrapped model, for DeepSpeed's own functions.

    Args:
        model: the model that `wrap_model` returned.

    Raises:
        ModelError: the model is not under DeepSpeed, or has no optimizer yet, with which its engine is made.
    """
    return _engine(model).deepspeed


def save_engine(model: nn.Module, folder: str | os.PathLike[str], tag: str | None = None) -> None:
    """Write a checkpoint in DeepSpeed's format to a folder, each rank its shares; every rank calls it.

    ``python zero_to_fp32.py folder weights.pt``, a script that DeepSpeed puts there, makes plain weights of it.
    `distwrap.save` writes a file that every strategy can load.

    Args:
        model: the model that `wrap_model` returned; its optimizer's state is saved too.
        folder: the folder, the same on all ranks.
        tag: the name of this checkpoint in the folder; by default the number of steps.

    Raises:
        ModelError: as for `engine_of`.
    """
    engine = _engine(model)
    engine.take_over_weights()
    engine.deepspeed.save_checkpoint(os.fspath(folder), tag=tag)


def load_engine(model: nn.Module, folder: str | os.PathLike[str], tag: str | None = None) -> None:
    """Load a checkpoint of `save_engine` with the same number of ranks; every rank calls it.

    Args:
        model: the model that `wrap_model` returned; its optimizer's state and options are loaded too.
        folder: the folder, the same on all ranks.
        tag: the name of the checkpoint; by default the latest.

    Raises:
        ModelError: as for `engine_of`.
        CheckpointError: there is no such checkpoint.
    """
    engine = _engine(model)
    place = Path(folder)
    is_there = (place / tag).is_dir() if tag is not None else (place / "latest").exists()
    if not is_there or engine.deepspeed.load_checkpoint(os.fspath(place), tag=tag)[0] is None:
        named = "" if tag is None else f" named {tag!r}"
        raise CheckpointError(f"there is no checkpoint of DeepSpeed{named} in {place}.")
    take_options(engine.inner, engine.user)
    engine.note_weights()


@contextmanager
def gathered_weights(model: nn.Module, rank: int = 0) -> Iterator[nn.Module]:
    """Give every rank all weights within a ``with``, to read or change them; every rank enters it.

    Args:
        model: the model that `wrap_model` returned.
        rank: the rank whose changes are kept.

    Yields:
        The user's own model.

    Raises:
        ModelError: as for `engine_of`; or the stepped copy of the weights is on NVMe.
    """
    import deepspeed

    engine = _engine(model)
    if engine.is_on_nvme:
        raise ModelError(
            f"gathered_weights({type(engine.net).__name__}): DeepSpeed keeps the engine's own copy of the "
            "weights on NVMe, which changes by hand would not reach. Use offload='cpu', or save() and load()."
        )
    parameters = list(engine.net.parameters())
    engine.take_over_weights()
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=rank, enabled=engine.stage == 3):
        yield engine.net
    engine.note_weights()


def _engine(model: nn.Module) -> ModelEngine:
    engine = getattr(routing_of(model), "engine", None)
    if not isinstance(engine, ModelEngine):
        raise ModelError(
            f"{type(model).__name__} has no engine of DeepSpeed: it was not wrapped under strategy='deepspeed' on "
            "several ranks, or its optimizer was not given to wrap_optimizer() yet."
        )
    return engine
