"""Words for why ranks may train apart, by the tensor that differs and by the optimizer that steps it; for an error."""

import inspect
from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap.live_objects import instances
from distwrap.model.unwrapped import model_of

SKIPPED = (
    "Either one of these ranks took a step with this optimizer that the other did not (DW302): every rank must take "
    "each step, so let no branch around optimizer.step() depend on numbers of one rank; decide by distwrap.mean(loss), "
    "or by distwrap.agree(flag). Or the optimizers of these ranks have other groups of parameters."
)
SCHEDULED = (
    "A scheduler that looks at a metric must see the same number on every rank (DW301), as in "
    "scheduler.step(distwrap.mean(loss, count)), and every rank must step its schedulers equally often."
)


def name_of_unwrapped_tensor(number: int, optimizer: Optimizer) -> str:
    """Return the name, alike on all ranks, of an optimizer's tensor that no wrapped model has."""
    return f"tensor {number} of {type(optimizer).__name__}, which no wrapped model has"


def unwrapped_tensors_in_words(unwrapped_tensors: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return for each tensor that no wrapped model has which module it is of, and what to do.

    Args:
        unwrapped_tensors: of one optimizer, by the names that the ranks compare.
    """
    model = model_of({id(tensor): tensor for tensor in unwrapped_tensors.values()}, instances(nn.Module))
    own = {id(tensor): name for name, tensor in model.named_parameters()} if model is not None else {}
    return {
        key: _in_words(own.get(id(tensor), ""), type(model).__name__, tuple(tensor.shape))
        for key, tensor in unwrapped_tensors.items()
    }


def _in_words(name: str, kind: str, shape: tuple[int, ...]) -> str:
    if not name:
        return f"That tensor, of shape {shape}, is in no module: make it a parameter of the model before wrap_model()."
    return (
        f"That tensor is {name!r} of {kind}, of shape {shape}, and wrap_model() has not wrapped this {kind}, so that "
        "its gradients are not averaged (DW104): wrap it too before the loop, as in head = wrap_model(head), and train "
        "what it returns."
    )


def cause_in_closure(optimizers: Iterable[Optimizer]) -> str:
    """Return what to do where an optimizer chooses its steps by what its closure returns; empty where none does."""
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            return (
                f"{type(optimizer).__name__} chooses its steps by the loss that its closure returns, so the closure "
                "must return the same number on every rank: end it by return distwrap.mean(loss), after "
                "loss.backward()."
            )
    return ""
