"""What an optimizer's step of one number looks at: a table of known optimizers, and what the user says of another."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.errors import ModelError, OptionError
from distwrap.versions import MATRIX_OPTIMIZERS

# The number alone, as Adam's; its whole parameter, as a norm of one weight; or all parameters of the optimizer, as a
# norm of all gradients. What draws random numbers is "all", since ranks that step other parameters would draw apart.
Scope = Literal["element", "parameter", "all"]

# By the first part of the module's name, and the class. Sources: each package's code, on 2026-11-28.
_KNOWN: dict[tuple[str, str], Scope] = {
    **{
        ("torch", name): "element"
        for name in (
            "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
            "SparseAdam",
        )
    },
    **{("torch", name): "parameter" for name in ("Adafactor", "Muon")},
    ("torch", "LBFGS"): "all",
    **{("apex", name): "element" for name in ("FusedAdam", "FusedAdagrad")},
    ("apex", "FusedLAMB"): "all",  # clips by the norm of all gradients
    **{
        ("bitsandbytes", name): "parameter"  # of which blocks of numbers have a scale together
        for kind in ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "Adagrad", "AdEMAMix")
        for name in (f"{kind}8bit", f"Paged{kind}8bit", kind, f"Paged{kind}", f"{kind}32bit", f"Paged{kind}32bit")
    },
    **{("dadaptation", name): "all" for name in ("DAdaptAdam", "DAdaptSGD", "DAdaptAdaGrad", "DAdaptLion")},
    **{("deepspeed", name): "element" for name in ("DeepSpeedCPUAdam", "FusedAdam")},
    ("lion_pytorch", "Lion"): "element",
    ("prodigyopt", "Prodigy"): "all",
    **{
        ("schedulefree", f"{name}{kind}"): "all"  # also between train() and eval()
        for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
        for kind in ("", "Reference", "Closure")
    },
    ("timm", "MADGRAD"): "element",
    **{("timm", name): "parameter" for name in ("Lars", "Adafactor", "Lion", "NAdamW")},  # the last two by caution=True
    ("timm", "Lamb"): "all",
    ("transformers", "Adafactor"): "parameter",
}  # fmt: skip

# Whether the state of an optimizer is put together from that of all ranks.
PUTS_TOGETHER: ContextVar[bool] = ContextVar("puts_together", default=False)

# What a subclass may have of its own without stepping otherwise than its parent.
_HARMLESS = {"__init__", "__repr__", "__setstate__", "add_param_group", "load_state_dict", "state_dict", "zero_grad"}

_SAID: WeakKeyDictionary[Optimizer, Scope] = WeakKeyDictionary()


def say_scope(optimizer: Optimizer, scope: Scope) -> None:
    """Note what the user says of an optimizer.

    Raises:
        OptionError: it is none of the three words.
    """
    if scope not in get_args(Scope):
        raise OptionError(
            f"wrap_optimizer(scope={scope!r}): it is 'element' where a step of one number looks at this number alone, "
            f"'parameter' where it looks at its whole parameter, and 'all' where it looks at all of them."
        )
    _SAID[optimizer] = scope


def scope_of(optimizer: Optimizer) -> Scope | None:
    """Return what the user has said of an optimizer, or what is known of its class or the one that it configures.

    Example:
        >>> import torch
        >>> scope_of(torch.optim.AdamW([torch.zeros(1)]))
        'element'
    """
    if optimizer in _SAID:
        return _SAID[optimizer]
    for kind in type(optimizer).__mro__:
        if known := _KNOWN.get((kind.__module__.partition(".")[0], kind.__name__)):
            return known
        if not _HARMLESS.issuperset(name for name, value in vars(kind).items() if callable(value)):
            return None
    return None


def refuse_scope(optimizer: Optimizer, takes: Sequence[Scope] = ("element", "parameter")) -> None:
    """Refuse an optimizer whose step looks at more than what a rank steps, or of which nobody knows it.

    Raises:
        ModelError: it is refused; the message names the word to say, and the strategies that accept it.
    """
    scope, name = scope_of(optimizer), type(optimizer).__name__
    if scope in takes:
        return
    if scope is None:
        raise ModelError(
            f"under this strategy each rank steps only some of the parameters, and what a step of {name} looks at is "
            "not known. Say it once: wrap_optimizer(optimizer, scope='element') if the step of one number looks at "
            "this number alone, as Adam's does; scope='parameter' if it looks at its whole parameter, as a norm of "
            "each weight. If it looks at all of them, as a clip by the norm of all gradients, wraps another "
            "optimizer, or draws random numbers, use strategy='ddp' or 'fsdp'."
        )
    if scope == "all":
        raise ModelError(
            f"{name} steps by all parameters at once, as by a norm over all of them. Under this strategy each rank "
            "steps only some of the parameters, and would look at these alone. If that is gradient clipping, switch "
            "it off in the optimizer, say wrap_optimizer(optimizer, scope='parameter'), and call "
            "distwrap.optimizer_step(optimizer, max_norm=...); or use strategy='ddp' or 'fsdp'."
        )
    raise ModelError(
        f"{name} steps by a weight as a whole. Under this strategy each rank steps a row of numbers, out of one weight "
        "or several. Use strategy='zero1' or 'ddp' for it, or an optimizer that treats each number by itself, as AdamW."
    )


def refuse_whole(optimizer: Optimizer, *, in_pieces: bool = False) -> None:
    """Refuse an optimizer whose step needs all parameters at once, or a whole parameter that is in pieces.

    Raises:
        ModelError: the optimizer is one of these.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            f"{name} steps all parameters together along one direction, so its state cannot be divided over "
            "the ranks. Use strategy='ddp' for it, or an optimizer that treats each parameter by itself, as AdamW."
        )
    if in_pieces and isinstance(optimizer, MATRIX_OPTIMIZERS):
        raise ModelError(
            f"{name} needs each weight as a whole matrix, and under this strategy each rank has a piece of it. "
            "Use strategy='zero1' for it, or an optimizer that treats each number by itself, as AdamW."
        )


def refuse_sparse(model: nn.Module, strategy: str) -> None:
    """Refuse a model with sparse gradients, which cannot be divided.

    Raises:
        ModelError: a module has sparse gradients.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"{strategy} divides gradients, and {name or 'the model itself'!r} makes sparse ones. Leave out "
                f"sparse=True, or use strategy='zero1' or 'ddp'."
            )
