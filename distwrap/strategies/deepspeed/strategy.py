"""``strategy="deepspeed"``: DeepSpeed's engine, with ZeRO 1 to 3, behind an unchanged loop.

Source: https://deepspeed.readthedocs.io/en/latest/
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap._internals.torch_tree import map_tensors
from distwrap.errors import ModelError, OptionError
from distwrap.group.setup import require_group
from distwrap.group.world import Layout, World, current_world
from distwrap.model.buffers import Buffers
from distwrap.model.in_sync import Held, tensors_of
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import held_by_all
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.precision import InPrecision, Precision
from distwrap.strategies.base import Strategy, Wrapping, take_rank_zero_weights
from distwrap.strategies.deepspeed import abilities, config as configuration
from distwrap.strategies.optimizer_share import refuse_sparse
from distwrap.strategies.single import local, on_device

if TYPE_CHECKING:
    from distwrap.strategies.deepspeed.engine import ModelEngine

_PRECISIONS = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class HalfWeights(Precision):
    """Precision of an engine with weights and inputs in a half precision, and a master copy in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def inputs(self, value: Any) -> Any:
        return map_tensors(self._in_half, value)

    def _in_half(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


class DeepSpeedStrategy(Strategy):
    """DeepSpeed's engine around a model and its optimizer; needs the extra ``deepspeed``.

    The loop stays: ``loss.backward()`` and ``optimizer.step()`` run the engine's. In half precision DeepSpeed keeps
    weights in this type, and a master copy in float32, of which each rank has a share. Under ``"fp16"`` its own scaler
    scales losses, through `distwrap.backward` and `distwrap.optimizer_step`.

    Args:
        stage: the stage of ZeRO: 1 divides the optimizer's state, 2 also the gradients, 3 also the weights; by default
            the config's, or 2.
        offload: the place of the optimizer's state, and under stage 3 of the weights: ``"cpu"`` or ``"nvme"``.
        nvme_path: a folder on the device for ``"nvme"``.
        config: DeepSpeed's configuration, as a dict or the path of a JSON file, which is used as it is. Entries about
            batches, accumulation, optimizer and scheduler belong to the loop, and are refused or left out.
        checkpointing: whether the activations of the model's blocks are recomputed in the backward; ``"selective"``
            keeps the results of matrix products.
        verbose: whether DeepSpeed may print messages.
        backend: the backend of the process group.

    Raises:
        OptionError: an argument has a wrong value, or contradicts the config.

    Example:
        >>> DeepSpeedStrategy(stage=3, offload="cpu").stage
        3
    """

    steps_parameters = True
    places_model = True

    def __init__(
        self,
        *,
        stage: Literal[1, 2, 3] | None = None,
        offload: Literal["cpu", "nvme"] | None = None,
        nvme_path: str | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        checkpointing: bool | Literal["selective"] = False,
        verbose: bool = False,
        backend: str | None = None,
    ) -> None:
        if offload not in (None, "cpu", "nvme"):
            raise OptionError(f"DeepSpeedStrategy(offload={offload!r}): it is None, 'cpu' or 'nvme'.")
        if (offload == "nvme") != (nvme_path is not None):
            raise OptionError("DeepSpeedStrategy(): offload='nvme' and nvme_path='/folder/on/it' go together.")
        if checkpointing not in (False, True, "selective"):
            raise OptionError(f"DeepSpeedStrategy(checkpointing={checkpointing!r}): it is False, True or 'selective'.")
        self.checkpointing = checkpointing
        self.config = configuration.read(config)
        self.stage = configuration.stage_of(self.config, stage)
        if offload == "nvme" and self.stage < 3:
            raise OptionError("DeepSpeedStrategy(offload='nvme'): only stage=3 does; stages 1 and 2 take 'cpu'.")
        self.offload, self.nvme_path, self.verbose, self.backend = offload, nvme_path, verbose, backend

    @property
    def shards(self) -> bool:  # type: ignore[override]
        """Whether states are put together from several ranks."""
        return current_world().placement.world_size > 1

    @property
    def averages_at_once(self) -> bool:  # type: ignore[override]
        """Whether each micro-batch averages gradients; from stage 2 on no rank keeps all of them."""
        return self.stage > 1

    @property
    def owns_scale(self) -> bool:  # type: ignore[override]
        """Whether the engine scales losses, which it does if there is one."""
        return current_world().placement.world_size > 1

    def check(self, run: Options) -> None:
        require_package("deepspeed", "strategy='deepspeed'", "strategy='zero1' or 'fsdp', which need no extra package")
        if run.comm is not None:
            raise OptionError("comm= does not go with strategy='deepspeed', which exchanges by itself. Leave it out.")
        if run.precision not in _PRECISIONS:
            raise OptionError(
                f"strategy='deepspeed' has the precisions '32', 'bf16' and 'fp16', but not {run.precision!r}: "
                "in half precision it keeps a master copy in float32."
            )
        configuration.refuse(self.config, str(run.precision))

    def setup(self, world: World) -> Layout | None:
        if world.options.precision == "fp16":
            abilities.require_fp16(world)
        if on_nvme := configuration.on_nvme(self._engine_config("32")):
            abilities.require_nvme(world, weights="param" in on_nvme)
        return super().setup(world)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        for name in wrapping.options:
            raise OptionError(
                f"wrap_model({name}=…): strategy='deepspeed' takes its options in DeepSpeedStrategy(config=…)."
            )
        net = unwrap_model(on_device(model, wrapping.device))
        if world.placement.world_size == 1:
            return local(model, wrapping)
        require_group("wrap_model")
        precision = next(name for name in _PRECISIONS if _is_of(wrapping.in_precision, name))
        half = _PRECISIONS[precision]
        inside = wrapping.in_precision
        _refuse(net)
        if half is not None:  # as DeepSpeed does, which makes its master copy from these
            net.to(half)
            inside = InPrecision(HalfWeights(half), wrapping.device, owns_scale=True)
        take_rank_zero_weights(net)
        from distwrap.strategies.deepspeed.engine import Engines
        from distwrap.strategies.deepspeed.model import EngineModel, EngineRouting
        from distwrap.strategies.fsdp.recomputation import recompute
        from distwrap.strategies.fsdp.units import units_of

        world.part(Engines)
        name = str(world.count("model"))
        if self.checkpointing:
            recompute(units_of(net, "auto"), selective=self.checkpointing == "selective")
        buffers = None if world.channel is None else Buffers(net, world.placement.rank, world.channel, name)

        def make() -> ModelEngine | None:
            return self._made(net, precision)

        methods = wrapping.forward_methods
        return EngineModel(EngineRouting(model, inside, methods, buffers, make, divides_weights=self.stage == 3))

    # A step

    def backward(self, loss: torch.Tensor) -> None:
        from distwrap.strategies.deepspeed.engine import Engines

        engines = list(current_world().part(Engines))
        if len(engines) == 1:
            return engines[0].backward(loss)
        if any(engine.scales for engine in engines):
            raise ModelError(
                f"{len(engines)} models under strategy='deepspeed' in fp16, each with a scale of its own: so "
                "it is unknown whose loss this is. Use precision='bf16' or '32'."
            )
        return super().backward(loss)

    def gradients(self, model: nn.Module) -> list[torch.Tensor]:
        engine = _engine_of(model)
        return super().gradients(model) if engine is None else engine.gradients()

    def clip(
        self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], max_norm: float
    ) -> torch.Tensor | float | None:
        engine = _engine_of(optimizer)
        if engine is None:
            return super().clip(optimizer, parameters, max_norm)
        engine.clip(max_norm)
        return None  # only the step knows the norm

    def norm(self, optimizer: Optimizer) -> torch.Tensor | float | None:
        engine = _engine_of(optimizer)
        return None if engine is None else engine.norm()

    def step(self, optimizer: Optimizer) -> bool | None:
        optimizer.step()
        engine = _engine_of(optimizer)
        return engine is None or engine.taken

    # State

    def held(self, model: nn.Module) -> Iterable[Held]:
        return () if self.stage == 3 and _engine_of(model) is not None else tensors_of(model)

    def is_divided(self, thing: nn.Module | Optimizer) -> bool:
        return _engine_of(thing) is not None

    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        engine = _engine_of(thing)
        if engine is None:
            return super().state(thing, everywhere=everywhere)
        from distwrap.strategies.deepspeed import state

        engine.take_over_weights()
        if isinstance(thing, nn.Module):
            return state.full_weights(engine.net, everywhere=everywhere)
        return state.full_optimizer_state(engine, thing, everywhere=everywhere)

    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        engine = _engine_of(thing)
        if engine is None:
            super().load_state(thing, state)
            return
        from distwrap.strategies.deepspeed import state as states

        if isinstance(thing, nn.Module):
            states.load_weights(engine.net, state, engine)
        else:
            states.load_optimizer_state(engine, thing, state)

    def give_back(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        engine = _engine_of(prepared)
        if engine is not None:
            from distwrap.strategies.deepspeed.engine import Engines

            optimizer = engine.optimizer()
            own = held_by_all({} if optimizer is None else {0: optimizer})
            states = [self.state(each, everywhere=True) for each in own]
            current_world().part(Engines).remove(engine)
            engine.make_whole()
            for each, whole in zip(own, states, strict=True):
                each.load_state_dict(whole)
        super().give_back(original, prepared, state)

    def _made(self, net: nn.Module, precision: str) -> ModelEngine | None:
        """Return the engine of a model and its only optimizer, or ``None`` if there is no optimizer."""
        from distwrap.strategies.deepspeed.engine import Engines, ModelEngine, optimizer_of

        world, optimizer = current_world(), optimizer_of(net)
        if optimizer is None:
            return None
        state = optimizer.state_dict()
        engine = ModelEngine(net, optimizer, self._engine_config(precision), world, verbose=self.verbose)
        world.part(Engines).add(engine)
        if state["state"]:
            optimizer.state.clear()
            self.load_state(optimizer, state)
        return engine

    def _engine_config(self, precision: str) -> dict[str, Any]:
        return configuration.engine_config(
            self.config, stage=self.stage, offload=self.offload, nvme_path=self.nvme_path, precision=precision
        )


def _engine_of(thing: nn.Module | Optimizer) -> ModelEngine | None:
    from distwrap.strategies.deepspeed.engine import Engines

    return current_world().part(Engines).of(unwrap_model(thing) if isinstance(thing, nn.Module) else thing)


def _is_of(in_precision: InPrecision, name: str) -> bool:
    return type(in_precision.precision) is type(InPrecision(name, in_precision.device).precision)


def _refuse(net: nn.Module) -> None:
    """Refuse a model that an engine would train differently from one process.

    Raises:
        ModelError: a weight is in float64 or complex, or a gradient is sparse.
    """
    for name, parameter in net.named_parameters():
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"the parameter {name!r} is in {parameter.dtype}, and DeepSpeed trains a copy in float32: it would be "
                f"rounded. Use model.float(), or strategy='zero1' or 'fsdp'."
            )
    refuse_sparse(net, "strategy='deepspeed'")
