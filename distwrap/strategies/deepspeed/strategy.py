"""``strategy="deepspeed"``: DeepSpeed's engine, with ZeRO 1 to 3, behind an unchanged loop.

Source: https://deepspeed.readthedocs.io/en/latest/
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap._internals.torch_tree import map_tensors
from distwrap.errors import ModelError, OptionError, PrecisionError
from distwrap.group.setup import require_group
from distwrap.group.world import Layout, World, current_world
from distwrap.model.buffers import Buffers
from distwrap.model.checks.in_sync import ComparedTensor, tensors_of
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, parameters_of, routing_of
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.precision import InPrecision, Precision
from distwrap.strategies.base import Strategy, Wrapping, take_rank_zero_weights
from distwrap.strategies.deepspeed import config as configuration
from distwrap.strategies.deepspeed.engine import Engines, ModelEngine, quiet
from distwrap.strategies.deepspeed.model import EngineModel, EngineRouting
from distwrap.strategies.deepspeed.state import full_optimizer_state, full_weights, load_weights
from distwrap.strategies.optimizer_scope import refuse_sparse
from distwrap.strategies.single import local, on_device

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

    `wrap_optimizer` makes the engine, `distwrap.backward` and `distwrap.optimizer_step` run it. In half precision
    DeepSpeed keeps weights in this type, and a master copy in float32, of which each rank has a share. Under ``"fp16"``
    its own scaler scales losses.

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
    is_simulated = False
    exchanges = "its engine exchanges by itself"

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
        super().check(run)
        if run.precision not in _PRECISIONS:
            raise OptionError(
                f"strategy='deepspeed' has the precisions '32', 'bf16' and 'fp16', but not {run.precision!r}: "
                "in half precision it keeps a master copy in float32."
            )
        configuration.refuse(self.config, str(run.precision))

    def setup(self, world: World) -> Layout | None:
        self._refuse_what_is_missing(str(world.options.precision), world)
        return super().setup(world)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        self.refuse_options(wrapping)
        net = unwrap_model(on_device(model, wrapping.device))
        if world.placement.world_size == 1:
            return local(model, wrapping)
        require_group("wrap_model")
        precision, inside = self._precision(wrapping.in_precision), wrapping.in_precision
        half = _PRECISIONS[precision]
        self._refuse_what_is_missing(precision, world)
        _refuse(net)
        if half is not None:  # as DeepSpeed does, which makes its master copy from these
            net.to(half)
            inside = InPrecision(HalfWeights(half), wrapping.device, owns_scale=True)
        take_rank_zero_weights(net)
        from distwrap.strategies.fsdp.recomputation import recompute
        from distwrap.strategies.fsdp.units import units_of

        world.part(Engines).watch(net)
        name = str(world.count("model"))
        if self.checkpointing:
            recompute(units_of(net, "auto"), selective=self.checkpointing == "selective")
        buffers = None if world.channel is None else Buffers(net, world.placement.rank, world.channel, name)
        routing = EngineRouting(model, inside, wrapping.forward_methods, buffers, divides_weights=self.stage == 3)
        routing.precision = precision
        return EngineModel(routing)

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        """Make the engine of the optimizer's model, and return what steps it."""
        world = current_world()
        if world.placement.world_size == 1:
            return optimizer
        engines = world.part(Engines)
        if (engine := engines.of(optimizer)) is not None:
            return engine.optimizer
        found = [
            each for each in world.part(WrappedModels).of_optimizer(optimizer) if routing_of(each).model in engines.nets
        ]
        if not found:
            return optimizer  # of a model that is not wrapped; one that will be refuses its step
        net, name = routing_of(found[0]).model, type(optimizer).__name__
        if not set(map(id, net.parameters())).issuperset(parameters_of(optimizer)):
            raise ModelError(
                f"this {name} holds parameters that are not those of {type(net).__name__}, and an engine of DeepSpeed "
                "has one model. Wrap one module that has all of them, or give each model its own optimizer."
            )
        if engines.of(net) is not None:
            raise ModelError(
                f"{type(net).__name__} has another optimizer, and an engine of DeepSpeed has one. Make one optimizer "
                "with a group of parameters for each rate, or use strategy='zero1'."
            )
        state, config = optimizer.state_dict(), self._engine_config(routing_of(found[0]).precision)
        engine = ModelEngine(net, optimizer, config, world, verbose=self.verbose)
        engines.add(engine)
        routing_of(found[0]).engine = engine
        if state["state"]:
            optimizer.state.clear()
            engine.optimizer.load_state_dict(state)
        return engine.optimizer

    # A step

    def backward(self, loss: torch.Tensor) -> None:
        engines = current_world().part(Engines).under(loss)
        if len(engines) > 1:
            kinds = " and ".join(sorted(type(each.net).__name__ for each in engines))
            raise ModelError(
                f"backward(loss): the loss is one of {kinds}, which have an engine of DeepSpeed each, and an engine "
                "computes the gradients of its own model. Freeze one by requires_grad_(False) for this loss, detach "
                "its outputs, or wrap one module that has both."
            )
        if engines:
            engines[0].backward(loss)
        else:
            super().backward(loss)

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

    def held(self, model: nn.Module) -> Iterable[ComparedTensor]:
        return () if self.stage == 3 and _engine_of(model) is not None else tensors_of(model)

    def is_divided(self, thing: nn.Module | Optimizer) -> bool:
        return _engine_of(thing) is not None

    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        engine = _engine_of(thing)
        if engine is None:
            return super().state(thing, everywhere=everywhere)
        full = full_weights if isinstance(thing, nn.Module) else full_optimizer_state
        return full(engine, everywhere=everywhere)

    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        engine = _engine_of(thing)
        if engine is None:
            super().load_state(thing, state)
        elif isinstance(thing, nn.Module):
            load_weights(engine.net, state, engine)
        else:
            engine.optimizer.load_state_dict(state)

    def restore_original(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        engine = _engine_of(prepared)
        if engine is not None:
            whole = engine.optimizer.state_dict()
            current_world().part(Engines).remove(engine)
            engine.make_whole()
            engine.user.load_state_dict(whole)
        super().restore_original(original, prepared, state)

    def _engine_config(self, precision: str) -> dict[str, Any]:
        return configuration.engine_config(
            self.config, stage=self.stage, offload=self.offload, nvme_path=self.nvme_path, precision=precision
        )

    def _refuse_what_is_missing(self, precision: str, world: World) -> None:
        """Refuse what DeepSpeed cannot do on this node: fp16, offload to NVMe, or weights that it would round there.

        Raises:
            PrecisionError: the device has no float16, or weights in float32 would be rounded.
            OptionError: DeepSpeed's operator for NVMe cannot be built.
        """
        on_nvme = configuration.on_nvme(self._engine_config(precision))
        if precision != "fp16" and not on_nvme:
            return
        world.part(Engines).package(verbose=False)
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder import AsyncIOBuilder

        rank, has_fp16, device = world.placement.rank, get_accelerator().is_fp16_supported(), world.device.type
        if precision == "fp16" and not has_fp16:
            what = "processor: that needs AVX512-FP16 or AMX-FP16" if device == "cpu" else "device"
            raise PrecisionError(
                f"rank {rank}: precision='fp16' under strategy='deepspeed', which has no float16 on this {what}. Use "
                "precision='bf16' or '32'."
            )
        with quiet(False):
            builder = AsyncIOBuilder()
            if on_nvme and find_spec(builder.absolute_name()) is None and not builder.is_compatible():
                raise OptionError(
                    f"rank {rank}: offload='nvme' under strategy='deepspeed', whose operator async_io cannot be "
                    "built on this node: it needs a C compiler, and libaio with its header (apt-get install g++ "
                    "libaio-dev). Install them, or use offload='cpu'."
                )
        # There its zero.Init uses bfloat16, whatever type it is given (0.19.8, Init._set_dtype).
        if "param" in on_nvme and precision == "32" and not has_fp16:
            raise PrecisionError(
                f"rank {rank}: offload='nvme' with precision='32' under strategy='deepspeed', which keeps weights on "
                f"NVMe in bfloat16 on a device without float16, as this {device}: they would be rounded. Use "
                f"precision='bf16', or keep the weights in memory: "
                f"config={{'zero_optimization': {{'offload_param': {{'device': 'none'}}}}}}."
            )

    def _precision(self, given: InPrecision) -> str:
        return next(n for n in _PRECISIONS if type(given.precision) is type(InPrecision(n, given.device).precision))


def _engine_of(thing: nn.Module | Optimizer) -> ModelEngine | None:
    return current_world().part(Engines).of(unwrap_model(thing) if isinstance(thing, nn.Module) else thing)


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
