"""The wrapper of a model that DeepSpeed's engine trains, and access to the engine itself.

Source: https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from distwrap._internals.torch_autograd import in_backward
from distwrap.errors import CheckpointError, ModelError
from distwrap.frames import is_ours
from distwrap.model.buffers import Buffers
from distwrap.model.forward_routing import ForwardMethods, MethodCall, Routing
from distwrap.model.wrapped_models import UncopiedModel, routing_of
from distwrap.precision import InPrecision
from distwrap.strategies.deepspeed.engine import ModelEngine, take_options
from distwrap.strategies.deepspeed.state import full_weights, load_weights
from distwrap.strategies.rendezvous import Rendezvous


class EngineRouting(Routing):
    """Forward of a model that DeepSpeed trains.

    Args:
        module: the user's model.
        in_precision: the precision and device of the computation.
        forward_methods: the methods that may run a forward.
        buffers: the buffers that ranks take over from rank 0 when training pauses.
        divides_weights: whether each rank has only a share of the weights.

    Attributes:
        precision: the name of the precision in which the engine is made.
        engine: the engine of the model, once its optimizer is wrapped.
        alignment: the forwards in which all ranks take part, if weights are divided.
    """

    def __init__(
        self,
        module: nn.Module,
        in_precision: InPrecision,
        forward_methods: ForwardMethods,
        buffers: Buffers | None,
        *,
        divides_weights: bool,
    ) -> None:
        super().__init__(module, in_precision, forward_methods)
        self.buffers, self.divides_weights = buffers, divides_weights
        self.engine: ModelEngine | None = None
        self.precision = ""
        self.alignment = Rendezvous(type(self.model).__name__) if divides_weights else None
        self.forward = in_precision(self._with_engine)

    def _with_engine(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        self._count()
        return self.module(*args, **kwargs)

    def _count(self) -> None:
        if in_backward():
            return  # a recomputation
        if self.alignment is not None and self.engine is not None:
            self.alignment.forward()
        if self.buffers is not None and self.model.training:
            self.buffers.count_forward()

    def _begin(self, call: MethodCall) -> bool:
        super()._begin(call)
        self._count()
        return False

    def refuse_to_look(self, frame: Any) -> None:
        """Refuse to look at parameters, which the engine has divided, or whose gradients it has after a backward.

        Args:
            frame: that of a call by the user; we look only at which parameters there are.

        Raises:
            ModelError: it has them now.
        """
        if self.engine is None or self.engine.is_at_work or is_ours(frame.f_back.f_code.co_filename):
            return
        if self.engine.has_gradients:
            raise ModelError(
                f"rank {self.engine.rank}: parameters() between a backward and the step under strategy='deepspeed', "
                "when the engine has the gradients, and each rank only a share of them. Clip by "
                "distwrap.optimizer_step(optimizer, max_norm=…), which takes the norm of all gradients."
            )
        for name, parameter in self.model.named_parameters():
            if parameter.numel() != getattr(parameter, "ds_numel", parameter.numel()):
                raise ModelError(
                    f"rank {self.engine.rank}: parameters() of {type(self.model).__name__} under stage 3 of DeepSpeed, "
                    f"where the numbers of {name!r} are divided over the ranks, and it is empty here. Look at them "
                    "within gathered_weights(model), from distwrap.strategies.deepspeed, or call model.state_dict()."
                )

    def refuse_copy(self) -> NoReturn:
        """Refuse to copy or pickle the model.

        Raises:
            ModelError: always; the message says what to do instead.
        """
        raise ModelError(
            f"{type(self.model).__name__} belongs to an engine of DeepSpeed, and can be neither copied nor "
            f"pickled. distwrap.save({{'model': model}}, path) writes all of it; load that into a plain model."
        )


class EngineModel(UncopiedModel):
    """Model that DeepSpeed trains, which behaves like the user's own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict, with all weights; if they are divided, every rank calls it."""
        routing = self._distwrap_routing
        if routing.divides_weights and routing.engine is not None:
            return full_weights(routing.engine, everywhere=True)
        found: dict[str, Any] = routing.model.state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights saved with or without a wrapper."""
        return load_weights(self._distwrap_routing.model, state_dict, self._distwrap_routing.engine)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step."""
        engine = self._distwrap_routing.engine
        if engine is None:
            self._distwrap_routing.model.zero_grad(set_to_none)
        else:
            engine.zero_grad()

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own.

        Raises:
            ModelError: a loss, or a clip of the loop's own, would find none of their numbers or gradients.
        """
        self._distwrap_routing.refuse_to_look(inspect.currentframe())
        return self._distwrap_routing.model.parameters(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own, as `parameters`."""
        self._distwrap_routing.refuse_to_look(inspect.currentframe())
        return self._distwrap_routing.model.named_parameters(*args, **kwargs)


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
