"""Private names of torch: autograd's backward, DDP's reducer, operators, modules, optimizers.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.errors import ModelError
from distwrap.garbage import collection_paused
from distwrap.versions import KEEPS_COUNTS_OF_MANY, TORCH, TORCH_SEEN

DistributedDataParallel = nn.parallel.DistributedDataParallel

# The function by which torch pickles a layout in a checkpoint's table of contents.
LAYOUT_FUNCTION = ("torch.serialization", "_get_layout")
# The attribute that DDP reads from a module to wrap. Without it: DDP around a wrapped model trains it twice, or raises.
ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
# Classes in the state of torch elastic's agents.
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
RENDEZVOUS_STATE = ((_RENDEZVOUS, "_RendezvousState"), (_RENDEZVOUS, "_NodeDesc"))


def _refuse(name: str, consequence: str) -> NoReturn:
    raise ModelError(f"torch {TORCH} has no {name} any more (seen in torch {TORCH_SEEN}): {consequence}")


# Backward


def current_backward() -> int | None:
    """Return the id of the backward in this thread, -1 outside of one, ``None`` if torch has no ids.

    Relies on ``torch._C:_current_graph_task_id``.
    Without it: a backward without an average is not noticed.
    """
    return getattr(torch._C, "_current_graph_task_id", lambda: None)()


def after_backward(call: Callable[[], object]) -> None:
    """Call a function at the end of the current backward, after all functions queued before.

    Relies on ``torch.autograd:Variable._execution_engine.queue_callback``.
    Without it: a failure of an exchange is raised within the next backward, before DDP finishes.
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


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be divided, whose version FSDP's additions change.

    Relies on ``torch.distributed.tensor:DTensor._local_tensor``.
    Without it: a change of a divided gradient is not noticed.
    """
    return getattr(tensor, "_local_tensor", tensor)


def unchanged_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context that restores the version counters of tensors at its end.

    Relies on ``torch.autograd:_unsafe_preserve_version_counter``.
    Without it: ranks with different version counters are not compared when training pauses or ends.
    """
    keep: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    if keep is None or not tensors:
        return nullcontext()
    if KEEPS_COUNTS_OF_MANY:
        return keep(tuple(tensors))  # type: ignore[no-any-return]
    each = ExitStack()
    for tensor in tensors:
        each.enter_context(keep(tensor))
    return each


def profiler_runs() -> bool:
    """Return whether a profiler of torch is running in this thread.

    Relies on ``torch.autograd:_profiler_enabled``.
    Without it: a trace within a profiler's run crashes.
    """
    return bool(getattr(torch.autograd, "_profiler_enabled", lambda: False)())


# DistributedDataParallel


def step_of_ddp(name: str) -> Any:
    """Return a step of DDP's by its name.

    Relies on ``torch.nn.parallel:DistributedDataParallel._pre_forward``.
    Without it: ModelError as the step is taken.
    """
    missing = "train with strategy='single', or with an older torch."
    return getattr(DistributedDataParallel, name, lambda *_: _refuse(f"DistributedDataParallel.{name}", missing))


class DDPSteps(DistributedDataParallel):
    """DDP model whose steps around the forward of the module can be taken one by one.

    Relies on ``torch.nn.parallel:DistributedDataParallel._pre_forward``,
    ``torch.nn.parallel:DistributedDataParallel._run_ddp_forward``,
    ``torch.nn.parallel:DistributedDataParallel._post_forward``.
    Without it: ModelError at the first forward with gradients.

    Attributes:
        begin_forward: takes the arguments of the module's forward, and returns them.
        run_module: runs the module with them, as DDP does.
        end_forward: takes the forward's output, and returns it.
    """

    begin_forward, run_module, end_forward = map(step_of_ddp, ("_pre_forward", "_run_ddp_forward", "_post_forward"))

    def end_with(self, output: Any) -> Any:
        """Take `end_forward` with output tensors in any object, for DDP's search through the graph."""
        tensors = tensors_in(output)
        after = dict(zip(map(id, tensors), self.end_forward(tensors), strict=True))
        return map_tensors(lambda tensor: after[id(tensor)], output)


def prepare_another_average(model: DistributedDataParallel) -> None:
    """Prepare DDP's reducer for a backward without a forward of its own, as DDP's forward would.

    Relies on ``torch.distributed:Reducer._rebuild_buckets``, ``torch.distributed:Reducer.prepare_for_backward``.
    Without it: ModelError at the second of several forwards before their backwards.

    Raises:
        ModelError: this torch has no such method.
    """
    reducer: Any = model.reducer
    if not hasattr(reducer, "_rebuild_buckets") or not hasattr(reducer, "prepare_for_backward"):
        _refuse("Reducer._rebuild_buckets", "let a backward follow each forward, or add the losses up before one.")
    reducer._rebuild_buckets()
    reducer.prepare_for_backward([])


def is_averaging(model: DistributedDataParallel, *, otherwise: bool) -> bool:
    """Return whether DDP's reducer is in the middle of an average, or `otherwise` if torch does not tell.

    Relies on ``torch.distributed:Reducer._check_reducer_finalized``.
    Without it: a backward within a backward counts as what the caller expects.
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
    """Remove DDP's hooks from the parameters.

    Relies on ``torch.distributed:Reducer._remove_autograd_hooks``.
    Without it: the hooks stay until the reducer is freed.
    """
    getattr(model.reducer, "_remove_autograd_hooks", lambda: None)()


def names_ddp_ignores(net: nn.Module) -> Collection[str]:
    """Return the names of parameters and buffers that the user has told DDP to ignore.

    Relies on ``torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``.
    Without it: parameters that DDP ignores count as trained.
    """
    return getattr(net, "_ddp_params_and_buffers_to_ignore", ())


# Process groups and operators


def size_of_group(name: str) -> int | None:
    """Return the size of a process group by its name in functional collectives; ``None`` if unknown.

    Relies on ``torch._C._distributed_c10d:_resolve_process_group``.
    Without it: each functional collective counts as one with several ranks.
    """
    resolve = getattr(getattr(torch._C, "_distributed_c10d", None), "_resolve_process_group", None)
    return int(resolve(name).size()) if resolve is not None else None


class _Watching(getattr(getattr(torch.utils, "_python_dispatch", None), "TorchDispatchMode", nullcontext)):  # type: ignore[misc]
    def __init__(self, look: Callable[[Any, tuple[Any, ...]], object]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look(func, args)
        return func(*args, **(kwargs or {}))


def watch_operators(look: Callable[[Any, tuple[Any, ...]], object]) -> AbstractContextManager[object]:
    """Call `look` with each operator and its arguments before it runs, within a ``with``.

    Relies on ``torch.utils._python_dispatch:TorchDispatchMode``.
    Without it: torch's own collectives are not refused in functions that only some ranks run.
    """
    return _Watching(look)


def default_store() -> Store | None:
    """Return the store in which the ranks of the process group met, or ``None`` if torch does not tell.

    Relies on ``torch.distributed.distributed_c10d:_get_default_store``.
    Without it: in a group that the user made nobody notices that a rank saves alone without the word.
    """
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if found is None else found()


def collectives_begun(group: dist.ProcessGroup | None = None) -> int | None:
    """Return how many collectives this rank has begun in the group of all ranks, and in another one.

    Relies on ``torch.distributed:ProcessGroup._get_sequence_number_for_group``.
    Without it: fit_batch_size tries again although ranks have begun different numbers of collectives, and gradients
    count as averaged by hand if they are equal on all ranks.

    Returns:
        The number; ``None`` without groups, or if a backend does not tell.
    """
    groups = {id(each): each for each in (dist.group.WORLD, group) if each is not None}
    counts = [getattr(each, "_get_sequence_number_for_group", None) for each in groups.values()]
    with suppress(RuntimeError):  # a backend that does not count
        return sum(int(count()) for count in counts if count is not None) if any(counts) else None
    return None


def waits_for_ranks() -> list[tuple[Any, str]]:
    """Return owners and names of torch's internal functions that wait for other ranks.

    Relies on ``torch.distributed:_broadcast_coalesced``, ``torch.distributed._functional_collectives:wait_tensor``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard``.
    Without it: a report counts such waits as part of the forward or backward.
    """
    found: list[tuple[Any, str]] = [(torch.futures.Future, "wait")]
    if dist.is_available():
        found += [(dist.Work, "wait"), (dist, "_broadcast_coalesced")]
        units = getattr(_module("fsdp._fully_shard._fsdp_param_group"), "FSDPParamGroup", None)
        found += [(_module("_functional_collectives"), "wait_tensor"), (units, "wait_for_unshard")]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def _module(name: str) -> Any:
    try:
        return import_module(f"torch.distributed.{name}")
    except ImportError:
        return None


def foreach(operation: str, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Apply an operation to several tensors at once.

    Relies on ``torch:_foreach_add``, ``torch:_foreach_add_``, ``torch:_foreach_addcdiv_``,
    ``torch:_foreach_addcmul_``, ``torch:_foreach_copy_``, ``torch:_foreach_div_``, ``torch:_foreach_lerp_``,
    ``torch:_foreach_mul_``, ``torch:_foreach_sqrt``.
    Without it: AttributeError where gradients or weights are exchanged or rescaled.

    Args:
        operation: the name of a tensor method, as ``"mul_"``.
        tensors: tensors of any shapes.
        *args: each a number for all tensors, or a list with one value for each tensor.
        **kwargs: keyword arguments for each call.

    Returns:
        The results; empty if the operation changes tensors in place.

    Example:
        >>> foreach("add", [torch.ones(2)], [torch.ones(2)], alpha=2)
        [tensor([3., 3.])]
    """
    results = getattr(torch, f"_foreach_{operation}")(tensors, *args, **kwargs)
    return [] if operation.endswith("_") else list(results)


def on_first_use(module: ModuleType, call: Callable[[], object]) -> None:
    """Call a function when the devices of one of torch's modules are initialised; initialise nothing now.

    Relies on ``torch.xpu:_lazy_call``, and its like in the modules of other device types.
    Without it: the refusal of a fork does not say where an accelerator was first used.
    """
    getattr(module, "_lazy_call", lambda call: None)(call)


def default_device() -> torch.device | None:
    """Return the last device of ``torch.set_default_device``, or ``None``.

    Relies on ``torch:_GLOBAL_DEVICE_CONTEXT``. torch's public function starts the accelerator's driver.
    Without it: ranks that are not forks of the caller make tensors on the CPU by default.
    """
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return getattr(context, "device", None)


def import_compiler() -> None:
    """Import torch's compiler with the garbage collector paused; without that it takes a quarter longer.

    Relies on ``torch._dynamo:optimize``.
    Without it: each rank of the fork server imports the compiler with DDP or its first optimizer.
    """
    with suppress(ImportError), collection_paused():
        import torch._dynamo  # noqa: F401 - importing it is the point

        import_module("tabulate")  # where it is installed, the compiler imports it when each rank ends


# Modules and state dicts


def norm_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes whose buffers are running statistics.

    Relies on ``torch.nn.modules.batchnorm:_NormBase``.
    Without it: buffers of torch's norms are not averaged.
    """
    base = getattr(nn.modules.batchnorm, "_NormBase", None)
    return () if base is None else (base,)


def submodules(model: object) -> dict[str, nn.Module | None]:
    """Return the direct submodules of a module by name, also if ``named_children`` is overridden.

    Relies on ``torch.nn:Module()._modules``.
    Without it: a wrapped model is not an instance of the user's class, and a compiled one counts as plain.
    """
    return getattr(model, "__dict__", {}).get("_modules", {})  # type: ignore[no-any-return]


def compiled_module(model: object) -> nn.Module | None:
    """Return the module that ``torch.compile`` has compiled, or ``None`` if the model is not compiled.

    Relies on ``torch:compile(nn.Linear(1, 1))._orig_mod``.
    Without it: a compiled model counts as not compiled.
    """
    inner = submodules(model).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else None


def metadata_of(state_dict: Any) -> Any:
    """Return the versions of modules that torch attaches to a state dict, or ``None``.

    Relies on ``torch.nn:Linear(1, 1).state_dict()._metadata``.
    Without it: state dicts lose the versions of their modules.
    """
    return getattr(state_dict, "_metadata", None)


def set_metadata(state_dict: Any, metadata: Any) -> None:
    """Attach versions of modules to a state dict; ``None`` changes nothing."""
    if metadata is not None:
        state_dict._metadata = metadata


# Optimizers and scalers


def mark_steps_as_watched(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer's step as a new scheduler does, which warns if the mark is lost.

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


def with_step_hooks(step: Any) -> Any:
    """Return a step of an optimizer around which torch calls its step hooks.

    Relies on ``torch.optim:Optimizer.profile_hook_step``.
    Without it: step hooks of an engine's optimizer are not called.
    """
    return getattr(torch.optim.Optimizer, "profile_hook_step", lambda step: step)(step)


@functools.cache
def _code_around_steps() -> Any:
    return with_step_hooks(lambda: None).__code__


def is_within_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step, which calls this by a hook, runs within another step of the same one.

    Relies on ``torch.optim:Optimizer.profile_hook_step``.
    Without it: a class whose step calls that of its parent has its gradients exchanged and hidden twice.
    """
    if torch.compiler.is_compiling():  # of a step, whose frames are not those of torch's hooks
        return False
    frame, count = sys._getframe(), 0
    while frame is not None and count < 2:
        count += frame.f_code is _code_around_steps() and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return count > 1


def hooks_beside(handle: RemovableHandle) -> OrderedDict[int, Any]:
    """Return the hooks among which a hook was registered, by the ids of their handles, in the order of their calls.

    Relies on ``torch:nn.Linear(1, 1).register_forward_hook(print).hooks_dict_ref``.
    Without it: hooks of the user's that were registered later see hidden gradients.
    """
    hooks: Any = getattr(handle, "hooks_dict_ref", dict)()
    return hooks or OrderedDict({handle.id: None})


def has_overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether some gradients of an optimizer are not finite, after the scaler has unscaled them.

    Relies on ``torch.amp:GradScaler._found_inf_per_device``.
    Without it: all gradients are checked a second time.
    """
    found: dict[Any, torch.Tensor] = getattr(scaler, "_found_inf_per_device", lambda _: {})(optimizer)
    if found:  # an update of the scale forgets it
        return any(bool(flag.item()) for flag in found.values())
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a scaler has scaled a loss yet.

    Relies on ``torch.amp:GradScaler("cpu")._scale``.
    Without it: each scaler counts as used.
    """
    return getattr(scaler, "_scale", scaler) is not None


_NONE = object()  # where an attribute is that of a base class
_CALLS = ("_call_impl", "_compiled_call_impl")


@contextmanager
def replaced(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes of modules and classes other values within a ``with``; what others put there meanwhile stays."""
    own = [vars(owner).get(name, _NONE) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, value), before in zip(reversed(changes), reversed(own), strict=True):
            if vars(owner).get(name) is not value:
                continue
            if before is _NONE:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def replace_calls(module: nn.Module, replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the call of a module, that is its forward with all hooks, or the compiled version of that.

    Relies on ``torch:nn.Module()._call_impl``, ``torch:nn.Module()._compiled_call_impl``.
    Without it: strategy="pipeline" cannot be used.
    """
    for name in _CALLS:
        if (call := getattr(module, name)) is not None:
            vars(module)[name] = replaced(call)


def put_back_calls(module: nn.Module, own: dict[str, Any]) -> None:
    """Restore the call of a module from its attributes before the replacement.

    Relies on ``torch:nn.Module()._call_impl``, ``torch:nn.Module()._compiled_call_impl``.
    Without it: as for replace_calls.
    """
    for name in _CALLS:
        vars(module).pop(name, None)
        if name in own:
            vars(module)[name] = own[name]
