"""Private names of torch: autograd's backward, DDP's reducer, operators, modules, optimizers.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.errors import ModelError
from distwrap.garbage import collection_paused
from distwrap.versions import TORCH, TORCH_SEEN

DistributedDataParallel = nn.parallel.DistributedDataParallel

# Functions by which torch pickles what is no tensor in a checkpoint's table of contents.
LAYOUT_FUNCTION = ("torch.serialization", "_get_layout")
# What DDP looks up in a module that it is to wrap. Without it: DDP around a wrapped model trains it twice, or raises.
ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
# Classes of which the state of torch elastic's agents consists.
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
RENDEZVOUS_STATE = ((_RENDEZVOUS, "_RendezvousState"), (_RENDEZVOUS, "_NodeDesc"))


def _refuse(name: str, consequence: str) -> NoReturn:
    raise ModelError(f"torch {TORCH} has no {name} any more (seen in torch {TORCH_SEEN}): {consequence}")


# Backward


def current_backward() -> int | None:
    """Return the number of the backward that this thread runs, -1 outside of one, ``None`` where torch has none.

    Relies on ``torch._C:_current_graph_task_id``.
    Without it: a backward without an average is not noticed.
    """
    return getattr(torch._C, "_current_graph_task_id", lambda: None)()


def after_backward(call: Callable[[], object]) -> None:
    """Call a function at the end of the backward that runs, after what was queued before.

    Relies on ``torch.autograd:Variable._execution_engine.queue_callback``.
    Without it: a failure of an exchange is raised within the next backward, before DDP's own end of it.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        call()
    else:
        engine.queue_callback(call)


def version_of(tensor: torch.Tensor) -> int:
    """Return how many times a tensor was changed in place.

    Relies on ``torch:Tensor._version``.
    Without it: a change of scaled gradients is not noticed.
    """
    return getattr(tensor, "_version", 0)


# DistributedDataParallel


def settings_of_ddp(model: DistributedDataParallel) -> dict[str, Any]:
    """Return how DDP exchanges gradients, and the bytes of parameters that had none at the last step.

    Relies on ``torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data``.
    Without it: a report's advice does not say that no parameter is without a gradient.
    """
    logged: dict[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    return {
        "bucket_bytes": getattr(model, "bucket_bytes_cap", None),
        "is_bucket_view": model.gradient_as_bucket_view,
        "finds_unused": model.find_unused_parameters,
        "unused_bytes": logged.get("unused_parameter_size"),
        "is_static": model.static_graph,
    }


def begin_ddp_forward(model: DistributedDataParallel) -> None:
    """Do what DDP does before the module's own forward.

    Relies on ``torch.nn.parallel:DistributedDataParallel._pre_forward``.
    Without it: ModelError where a method other than forward() trains.

    Raises:
        ModelError: this torch has no such step.
    """
    _step_of_ddp(model, "_pre_forward")(None)


def end_ddp_forward(model: DistributedDataParallel, output: Any) -> Any:
    """Do what DDP does after the module's own forward, and return the output.

    Relies on ``torch.nn.parallel:DistributedDataParallel._post_forward``.
    Without it: ModelError where a method other than forward() trains.

    Raises:
        ModelError: this torch has no such step.
    """
    return _step_of_ddp(model, "_post_forward")(output)


def _step_of_ddp(model: DistributedDataParallel, name: str) -> Any:
    step = getattr(model, name, None)
    if step is None:
        _refuse(f"DistributedDataParallel.{name}", "train by calling the model itself, not another method of it.")
    return step


class DDPForwardHook(DistributedDataParallel):
    """A DDP model that runs its module in a way of its own, between DDP's own steps before and after it.

    Relies on ``torch.nn.parallel:DistributedDataParallel._run_ddp_forward``.
    Without it: the module runs on the first device alone.
    """

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and return its output."""
        raise NotImplementedError

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_module(*args, **kwargs)


class DDPOutputs(DistributedDataParallel):
    """A DDP model that finds the tensors of its outputs in any object, where its way through the graph needs them.

    Relies on ``torch.nn.parallel:DistributedDataParallel._post_forward``.
    Without it: outputs in objects that DDP does not know are an error under find_unused_parameters and static_graph.
    """

    def _post_forward(self, output: Any) -> Any:
        end: Any = super()._post_forward
        if not (self.find_unused_parameters or self.static_graph):
            return end(output)
        tensors = tensors_in(output)
        after = dict(zip(map(id, tensors), end(tensors), strict=True))
        return map_tensors(lambda tensor: after[id(tensor)], output)


def prepare_another_average(model: DistributedDataParallel) -> None:
    """Prepare DDP's reducer for a backward to which no forward belongs, as DDP's forward would.

    Relies on ``torch.distributed:Reducer._rebuild_buckets``, ``torch.distributed:Reducer.prepare_for_backward``.
    Without it: ModelError at the second of several forwards before their backwards.

    Raises:
        ModelError: this torch's reducer cannot.
    """
    reducer: Any = model.reducer
    if not hasattr(reducer, "_rebuild_buckets") or not hasattr(reducer, "prepare_for_backward"):
        _refuse("Reducer._rebuild_buckets", "let a backward follow each forward, or add the losses up before one.")
    reducer._rebuild_buckets()
    reducer.prepare_for_backward([])


def is_averaging(model: DistributedDataParallel, *, otherwise: bool) -> bool:
    """Return whether DDP's reducer is in the middle of an average; `otherwise` where this torch does not tell.

    Relies on ``torch.distributed:Reducer._check_reducer_finalized``.
    Without it: a backward within a backward is taken for what the caller expects.
    """
    check = getattr(model.reducer, "_check_reducer_finalized", None)
    if check is None:
        return otherwise
    try:
        check()
    except RuntimeError:
        return True
    return False


def remove_ddp_hooks(model: DistributedDataParallel) -> None:
    """Take DDP's hooks off the parameters.

    Relies on ``torch.distributed:Reducer._remove_autograd_hooks``.
    Without it: the hooks stay until the reducer is freed.
    """
    getattr(model.reducer, "_remove_autograd_hooks", lambda: None)()


def names_ddp_ignores(net: nn.Module) -> Collection[str]:
    """Return the names of the parameters and buffers that the user has told DDP to leave alone.

    Relies on ``torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``.
    Without it: parameters that DDP leaves alone are taken for trained ones.
    """
    return getattr(net, "_ddp_params_and_buffers_to_ignore", ())


# Process groups and operators


def size_of_group(name: str) -> int | None:
    """Return how many ranks a process group has, by the name that functional collectives hold; ``None``: unknown.

    Relies on ``torch._C._distributed_c10d:_resolve_process_group``.
    Without it: a functional collective counts as one of several ranks.
    """
    resolve = getattr(getattr(torch._C, "_distributed_c10d", None), "_resolve_process_group", None)
    return int(resolve(name).size()) if resolve is not None else None


def watch_operators(look: Callable[[Any, tuple[Any, ...]], object]) -> AbstractContextManager[object]:
    """Call `look` with each operator and its arguments, before it runs, within a ``with``.

    Relies on ``torch.utils._python_dispatch:TorchDispatchMode``.
    Without it: torch's own collectives are not refused where only some ranks are.
    """
    watching = _watching_mode()
    return nullcontext() if watching is None else watching(look)


@functools.cache
def _watching_mode() -> Callable[[Any], AbstractContextManager[object]] | None:
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return None

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, look: Callable[[Any, Any], object]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._look = look

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self._look(func, args)
            return func(*args, **(kwargs or {}))

    return Watching


def foreach(operation: str, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Apply an operation to each of several tensors at once.

    Relies on ``torch:_foreach_add``, ``torch:_foreach_add_``, ``torch:_foreach_addcdiv_``,
    ``torch:_foreach_addcmul_``, ``torch:_foreach_copy_``, ``torch:_foreach_div_``, ``torch:_foreach_lerp_``,
    ``torch:_foreach_mul_``, ``torch:_foreach_sqrt``.
    Without it: one tensor after another, which takes longer.

    Args:
        operation: a method of tensors, as ``"mul_"``.
        tensors: of any shapes.
        *args: a number for all of them, or a list with one value for each tensor.
        **kwargs: for each of them.

    Returns:
        The results; nothing where the tensors are changed in place.

    Example:
        >>> foreach("add", [torch.ones(2)], [torch.ones(2)], alpha=2)
        [tensor([3., 3.])]
    """
    together = getattr(torch, f"_foreach_{operation}", None)
    if together is not None:
        results = together(tensors, *args, **kwargs)
    else:
        each = [arg if isinstance(arg, (list, tuple)) else [arg] * len(tensors) for arg in args]
        results = [
            getattr(tensor, operation)(*values, **kwargs) for tensor, *values in zip(tensors, *each, strict=True)
        ]
    return [] if operation.endswith("_") else list(results)


def on_first_use(module: ModuleType, call: Callable[[], object]) -> None:
    """Call a function when the devices of a module of torch are initialised; touch nothing now.

    Relies on ``torch.xpu:_lazy_call``, and on the same in the modules of other types.
    Without it: the refusal of a fork does not say where an accelerator was first used.
    """
    getattr(module, "_lazy_call", lambda call: None)(call)


def default_device() -> torch.device | None:
    """Return what ``torch.set_default_device`` was given last, ``None`` where it was given nothing.

    Relies on ``torch:_GLOBAL_DEVICE_CONTEXT``. torch's public function starts the accelerator's driver.
    Without it: ranks that are no forks of the caller make their tensors on the CPU by default.
    """
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return getattr(context, "device", None)


def import_compiler() -> None:
    """Import torch's compiler, which DDP and the first optimizer do otherwise, with a quarter more time for garbage.

    Relies on ``torch._dynamo:optimize``.
    Without it: ranks of the fork server import the compiler themselves.
    """
    with suppress(ImportError), collection_paused():
        import torch._dynamo  # noqa: F401 - importing it is the point


# Modules and state dicts


def norm_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes whose buffers are running statistics.

    Relies on ``torch.nn.modules.batchnorm:_NormBase``.
    Without it: the public classes of norms are looked for, which the user's own norms may not be derived from.
    """
    base = getattr(nn.modules.batchnorm, "_NormBase", None)
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return (base,) if base is not None else (*batch, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def submodules(model: object) -> dict[str, nn.Module | None]:
    """Return the modules right within a module by name, also where ``named_children`` is overridden.

    Relies on ``torch.nn:Module()._modules``.
    Without it: a wrapped model is no instance of the user's class, and a compiled one is taken for a plain one.
    """
    return getattr(model, "__dict__", {}).get("_modules", {})  # type: ignore[no-any-return]


def compiled_module(model: object) -> nn.Module | None:
    """Return the module that ``torch.compile`` was called with, or ``None`` where the model is not compiled.

    Relies on ``torch:compile(nn.Linear(1, 1))._orig_mod``.
    Without it: a compiled model is taken for one that is not compiled.
    """
    inner = submodules(model).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else None


def metadata_of(state_dict: Any) -> Any:
    """Return the versions of modules that torch hangs on a state dict, or ``None``.

    Relies on ``torch.nn:Linear(1, 1).state_dict()._metadata``.
    Without it: a state dict has no versions of its modules.
    """
    return getattr(state_dict, "_metadata", None)


def set_metadata(state_dict: Any, metadata: Any) -> None:
    """Hang the versions of modules on a state dict; ``None`` changes nothing."""
    if metadata is not None:
        state_dict._metadata = metadata


# Optimizers and scalers


def mark_steps_as_watched(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer's step as a scheduler does when it is made; the scheduler warns where the mark is lost.

    Relies on ``torch:optim.lr_scheduler.ConstantLR(optim.SGD([Tensor()])).optimizer.step._wrapped_by_lr_sched``.
    Without it: the scheduler's first step may warn that the optimizer was changed.
    """
    step: Any = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):
        return

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    watched._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = watched  # type: ignore[method-assign]


def has_overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's gradients, from which the scaler has taken the scale, are not all finite.

    Relies on ``torch.amp:GradScaler._found_inf_per_device``.
    Without it: all gradients are looked at a second time.
    """
    found = getattr(scaler, "_found_inf_per_device", None)
    if found is not None:
        return any(bool(flag.item()) for flag in found(optimizer).values())
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a scaler has scaled a loss yet.

    Relies on ``torch.amp:GradScaler("cpu")._scale``.
    Without it: a scaler counts as used as soon as it exists.
    """
    return getattr(scaler, "_scale", scaler) is not None
