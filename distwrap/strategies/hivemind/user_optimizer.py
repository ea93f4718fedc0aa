"""The user's optimizer as passed to hivemind; the object keeps its groups, state and schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class UserOptimizer(Optimizer):
    """View of the user's optimizer for hivemind.

    Args:
        optimizer: the user's optimizer.
        step: its own step, before it was replaced.

    Attributes:
        error: the exception of its step, which hivemind only logs.
        steps: the number of steps taken.
        in_step: whether a step is running.
        loads: the number of loaded states of peers.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        self._optimizer, self._step = optimizer, step
        self.error: BaseException | None = None
        self.steps = self.loads = 0
        self.in_step = self._as_stepped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the user's optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the user's optimizer."""
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the user's optimizer."""
        return self._optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with the gradients that hivemind has stored; runs in a thread of hivemind's."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    parameter.grad = None  # with hivemind's zeros, weight decay would change frozen weights
        self.in_step = True
        try:
            self._step()
            self.steps += 1
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.in_step = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the user's optimizer."""
        if self._as_stepped and not self._optimizer.state:
            return _after_a_step(self._optimizer)
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a peer's state."""
        self._optimizer.load_state_dict(state_dict)
        self.loads += 1

    def taking_over(self, load: Callable[..., Any], **how: Any) -> Any:
        """Load a peer's state, for which hivemind needs the layout of the state: as after a step, or before any."""
        loads, self._as_stepped = self.loads, True
        try:
            found = load(**how)
        finally:
            self._as_stepped = False
        return found if self.loads > loads or self._optimizer.state else load(**how)

    def __repr__(self) -> str:
        return f"UserOptimizer({self._optimizer!r})"


def _after_a_step(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of a copied optimizer after a step, of which only the shapes are used."""
    other = copy.deepcopy(optimizer)
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    type(other).step(other)
    return other.state_dict()
