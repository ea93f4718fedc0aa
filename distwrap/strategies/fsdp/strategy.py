"""``strategy="fsdp"``: each rank holds a share of every weight, gradient and optimizer state; torch's FSDP2.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap._internals.torch_sharding import accumulated_gradients
from distwrap.errors import OptionError
from distwrap.former_names import REMOVED
from distwrap.group.world import Layout, World, current_world
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import handle_of, routing_of, unbind
from distwrap.options import Options
from distwrap.strategies.base import Strategy, Wrapping
from distwrap.strategies.fsdp.plans import Plan, check_plan
from distwrap.strategies.fsdp.units import Wrap, check_wrap
from distwrap.strategies.single import local, on_device
from distwrap.strategies.windows import Windows
from distwrap.versions import MODEL_PARALLEL_SINCE, require_torch
from distwrap.wording import unknown_name


class FSDPStrategy(Strategy):
    """Strategy in which each rank holds a share of a model, and gathers one unit at a time while that computes.

    Args:
        shard: the number of ranks over which a model is divided: ``None`` for all of them; ``"node"`` for those of a
            node; or a number that divides the number of ranks. With more ranks, each group of that size holds a copy,
            and the gradients of the copies are averaged (HSDP).
        wrap: the units that are gathered at a time: ``"auto"`` for the blocks in lists of identical blocks; a list of
            names of classes; a number of parameters from which on a module is a unit; or a function of a module that
            returns whether it is one.
        reshard_after_forward: whether a unit is freed after its forward, and gathered again for its backward, which
            saves memory; otherwise it stays until its backward.
        cpu_offload: whether weights, gradients and optimizer states are kept on the CPU, on accelerators.
        tensor_parallel: the number of consecutive ranks that take the same share of the data, and divide layers as
            `plan` says; ``"node"`` for the ranks of a node. FSDP divides the model over the other ranks.
        plan: how layers are divided: the name of a ready-made plan, ``"transformer"`` for torch's layers, ``"llama"``
            or ``"gpt"``; a word for each pattern of names, as ``{"*.mlp.0": "colwise", "*.mlp.2": "rowwise"}``;
            or a function of a name and a module that returns a word. The words are colwise, rowwise, packed2 and
            packed3 (joined projections), heads, gathered, vocabulary and whole. ``"auto"`` is an error that has a plan
            to paste. `plan_of` shows the division.
        check: whether each divided block is also computed whole, and compared, at its first forward.
        checkpointing: whether the activations of a unit are computed again in its backward; ``"selective"`` keeps those
            of matrix products.
        backend: the backend of the process group.

    Raises:
        OptionError: an option has a wrong value.

    Example:
        >>> FSDPStrategy(shard="node", wrap=["Block"]).shard
        'node'
    """

    shards = True
    steps_parameters = True
    places_model = True
    exchanges = "the gradients of each unit go to the ranks that hold its shares"

    def __init__(
        self,
        *,
        shard: int | Literal["node"] | None = None,
        wrap: Wrap = "auto",
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        checkpointing: bool | Literal["selective"] = False,
        tensor_parallel: int | Literal["node"] | None = None,
        plan: Plan | None = None,
        check: bool = False,
        backend: str | None = None,
    ) -> None:
        if shard not in (None, "node") and (not isinstance(shard, int) or isinstance(shard, bool) or shard < 1):
            raise OptionError(f"FSDPStrategy(shard={shard!r}): it is None, 'node', or a number of ranks.")
        check_wrap(wrap)
        if checkpointing not in (False, True, "selective"):
            raise OptionError(f"FSDPStrategy(checkpointing={checkpointing!r}): it is False, True or 'selective'.")
        ranks = tensor_parallel
        if ranks not in (None, "node") and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2):
            raise OptionError(
                f"FSDPStrategy(tensor_parallel={ranks!r}): it is None, 'node', or a number of ranks from 2."
            )
        if ranks is not None and shard is not None:
            raise OptionError(
                "FSDPStrategy(): with tensor_parallel= the model is sharded over all other ranks; leave shard= out."
            )
        if tensor_parallel is None and (plan is not None or check):
            raise OptionError("FSDPStrategy(): plan= and check= need tensor_parallel=, which is None.")
        check_plan(plan)
        self.tensor_parallel, self.plan, self.checks = tensor_parallel, plan, check
        self.shard, self.wrap, self.reshard_after_forward = shard, wrap, reshard_after_forward
        self.cpu_offload, self.checkpointing, self.backend = cpu_offload, checkpointing, backend

    def check(self, run: Options) -> None:
        self._check_torch()
        super().check(run)

    def _check_torch(self) -> None:
        if self.tensor_parallel is not None:
            why = "states of cut tensors did not come out whole (tried up to 2.8)"
            require_torch("tensor parallelism", MODEL_PARALLEL_SINCE, why, "strategy='zero1'")

    def setup(self, world: World) -> Layout | None:
        if self.tensor_parallel is None:
            return None
        self._check_torch()
        from distwrap.strategies.fsdp import sharded

        return sharded.arranged(world, self)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        chosen = self._with(wrapping.options)
        if world.placement.world_size == 1:
            plain = wrapping.in_precision.precision.weights(on_device(model, wrapping.device))
            return local(plain, replace(wrapping, options={}))
        from distwrap.strategies.fsdp import sharded

        return sharded.divided(model, world, wrapping, chosen)

    def _with(self, options: dict[str, Any]) -> FSDPStrategy:
        """Return the strategy with the options of one call of `wrap_model`."""
        own = [name for name in inspect.signature(FSDPStrategy.__init__).parameters if name != "self"]
        known = [name for name in own if name != "backend"]  # the backend is that of the whole run
        for name in options:
            if name not in known:
                raise OptionError(unknown_name("option of wrap_model() under fsdp", name, known, REMOVED["option"]))
        own_values = {name: self.checks if name == "check" else getattr(self, name) for name in own}
        return FSDPStrategy(**{**own_values, **options}) if options else self

    # A step

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        net: Any = unwrap_model(model)
        if hasattr(net, "set_requires_gradient_sync"):
            net.set_requires_gradient_sync(on)
            windows = current_world().part(Windows).under_way.values()
            if on and not any(window.is_of(model) for window in windows):
                routing_of(model).units.leave_window()

    def gradients(self, model: nn.Module) -> list[torch.Tensor]:
        from distwrap.strategies import shards

        found = [*super().gradients(model), *accumulated_gradients(unwrap_model(model))]
        own = [shards.local(grad) for grad in found]
        return list({grad.data_ptr(): grad for grad in own if grad.numel()}.values())  # a gathered unit has both

    def clip(
        self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], max_norm: float
    ) -> torch.Tensor | float | None:
        from distwrap.strategies import shards

        return shards.whole(nn.utils.clip_grad_norm_(parameters, max_norm))

    # State

    def holders(self, thing: nn.Module | Optimizer) -> Mapping[int, Collection[int]] | None:
        return {}  # each tensor is a shard, or on all ranks

    def restore_original(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        # Optimizers do not have it, nor do models in one process.
        handle = handle_of(prepared)
        if handle is None or handle.restore_original is None:
            super().restore_original(original, prepared, state)
        else:
            handle.restore_original(state)
            unbind(prepared)  # type: ignore[arg-type]
