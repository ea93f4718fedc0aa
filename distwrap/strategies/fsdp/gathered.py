"""Hooks for the backward of a divided model's gathered weights, and checks that nothing changes these weights.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap._internals.torch_fsdp import GatheredUnits
from distwrap._internals.torch_sharding import (
    base_of,
    changed_parameters,
    fsdp_groups,
    gathered,
    gathered_copies,
    hook_fsdp_backward,
    unreduced_parameters,
)
from distwrap._internals.torch_tree import tensors_in
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.model.checks.in_sync import is_power_of_two
from distwrap.model.wrapped_models import parameters_of
from distwrap.strategies.divided_tensors import refuse_gradient_hooks
from distwrap.strategies.parameter_swap import OptimizerSync
from distwrap.strategies.windows import Windows
from distwrap.wording import first_names

_MODULES_OWN = frozenset(vars(nn.Module()))  # attributes of every module


class Gathered:
    """Gathered weights of one divided model.

    Args:
        net: the user's model before it is divided.

    Attributes:
        units: the units of the divided model.
    """

    units: GatheredUnits

    def __init__(self, net: nn.Module) -> None:
        self._net, self._name = net, type(net).__name__
        self._groups, self._own = list[Any](), set[int]()
        self._forwards = self._steps = 0

    def divided(self, sync: OptimizerSync) -> None:
        """Note that the model is divided, and check each step of its optimizers from now on."""
        self._groups, self._own = fsdp_groups(self._net), set(map(id, self._net.parameters()))
        refuse_gradient_hooks(param.sharded_param for group in self._groups for param in group.fsdp_params)
        sync.models.add(self)

    def begin(self) -> None:
        """Count a forward that begins."""
        self._forwards += 1

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Let FSDP act in a backward through any output tensor of a unit or of the whole model.

        FSDP itself looks into lists, tuples, dicts and dataclasses. It would lose its hook on a view that is changed in
        place, so the base of a view gets a hook too.

        Raises:
            ModelError: the forward has changed a weight; only some forwards are checked.
        """
        if is_power_of_two(self._forwards):
            self._refuse_changed(module)
        if not torch.is_grad_enabled():
            return
        found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if module is self._net:
            found = found or _left_in_attributes(module)
        bases = [base for tensor in found if (base := base_of(tensor)) is not None and not base.is_leaf]
        hook_fsdp_backward(module, bases if isinstance(output, torch.Tensor) else found + bases)

    def are_leaves_of(self, nodes: Iterable[Any]) -> bool:
        """Return whether any of these graph nodes accumulates the gradient of a gathered parameter."""
        copies = gathered_copies(self._groups)
        leaves = (getattr(node, "variable", None) for node in nodes)
        return any(leaf is not None and id(leaf) in copies for leaf in leaves)

    def refuse_graph(self) -> None:
        """Refuse a backward that itself needs a backward.

        Raises:
            ModelError: always; the message names strategies that allow it.
        """
        raise ModelError(
            f"a backward with create_graph=True through {self._name}, which is divided: its gathered weights "
            "are freed in the first backward, and the second one needs them. Use strategy='ddp' or 'zero1' "
            "for a gradient penalty."
        )

    def _refuse_changed(self, module: nn.Module) -> None:
        changed = changed_parameters(module)
        if changed:
            raise ModelError(
                f"rank {current_world().placement.rank}: a forward of {self._name} has changed the numbers of "
                f"{first_names(changed)}, which are a copy that exists only during the forward, so the change "
                "would be lost. Change weights outside of the forward, under torch.no_grad(), or keep the "
                "changing numbers in a buffer."
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Check for gradients that a backward has left on this rank.

        Raises:
            ModelError: some gradients were not averaged.
        """
        self._steps += 1
        if not (gathered(self._groups) or self.units.has_left_window() or is_power_of_two(self._steps)):
            return
        held = parameters_of(optimizer).keys()
        left = [name for name, parameter in unreduced_parameters(self._groups) if id(parameter) in held]
        if left:
            world = current_world()
            world.part(Windows).refuse_half(optimizer)
            raise ModelError(
                f"rank {world.placement.rank}: {type(optimizer).__name__} is about to step with gradients of "
                f"{self._name} that were not averaged over the ranks (DW104), as that of {first_names(left)}. Either a "
                "loop over accumulate() was left in the middle of a window: call zero_grad() then. Or the loss "
                "was not computed from what forward() returned: let forward(), or a method of the model, "
                "return the loss."
            )

    def refuse_newcomers(self, held: set[int]) -> None:
        """Refuse to train a parameter added to a divided model, since its gradient is not averaged.

        Args:
            held: the ids of the tensors that an optimizer holds.

        Raises:
            ModelError: there is such a parameter, which the message names.
        """
        for name, parameter in self._net.named_parameters():
            if id(parameter) in held and id(parameter) not in self._own:
                raise ModelError(
                    f"rank {current_world().placement.rank}: the parameter {name!r} was added to {self._name} "
                    "after wrap_model(), so that its gradient is not averaged, and it would differ between the "
                    "ranks (DW104). Change the model before wrap_model()."
                )


def _left_in_attributes(net: nn.Module) -> list[torch.Tensor]:
    """Return tensors with a graph that a forward has stored in attributes of the model's modules."""
    own = [[value for name, value in vars(part).items() if name not in _MODULES_OWN] for part in net.modules()]
    return [tensor for tensor in tensors_in(own) if tensor.grad_fn is not None]
