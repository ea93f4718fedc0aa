"""A DeepSpeed engine with one model and one optimizer of the user's, which `wrap_optimizer` makes.

The engine gets an optimizer of the same class and options, whose tensors it replaces by its own shares. The loop steps
an `EngineOptimizer`, which has the groups and the hooks of the user's optimizer.

Source: https://deepspeed.readthedocs.io/en/latest/training.html
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap._internals.packages import forget_group, without_compiler
from distwrap._internals.torch import mark_steps_as_watched, version_of, with_step_hooks
from distwrap.environments.variables import variables_set
from distwrap.errors import ModelError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World
from distwrap.model.checks.unwrapped import Unwrapped
from distwrap.model.wrapped_models import parameters_of
from distwrap.strategies.deepspeed.state import full_optimizer_state, load_optimizer_state
from distwrap.strategies.optimizer_scope import refuse_scope


class ModelEngine:
    """DeepSpeed engine for a model and an optimizer; every rank makes it.

    Args:
        net: the user's model.
        optimizer: the user's optimizer, of any class that steps each number by itself.
        config: DeepSpeed's configuration.
        world: the world of the run.
        verbose: whether DeepSpeed may print.

    Attributes:
        net: the user's model.
        user: the user's optimizer.
        optimizer: what the loop steps in its place.
        deepspeed: the ``DeepSpeedEngine``.
        parameters: the parameters that the engine trains, and their names.
        inner: the optimizer that the engine steps.
        taken: whether the last step was taken; an overflow under fp16 skips it.
        has_gradients: whether there was a backward since the last step or ``zero_grad``.
        is_at_work: whether a backward or a step of the engine is running.
        is_on_nvme: whether the stepped copy of the weights is on NVMe.
    """

    def __init__(
        self, net: nn.Module, optimizer: Optimizer, config: dict[str, Any], world: World, *, verbose: bool
    ) -> None:
        refuse_scope(optimizer, ("element",))
        zero = config["zero_optimization"]
        self.net, self.user, self.rank, self.stage = net, optimizer, world.placement.rank, int(zero["stage"])
        self.is_on_nvme = zero.get("offload_optimizer", {}).get("device") == "nvme"
        self.taken, self.has_gradients, self.is_at_work, self._is_used_up = True, False, False, False
        self._is_broken = False
        trained = self._trained()
        self.parameters = {each: name for name, each in net.named_parameters() if id(each) in trained}
        self.inner, self.optimizer = _twin(optimizer), EngineOptimizer(self)
        world.part(Unwrapped).per_rank.add(self.inner)
        deepspeed = world.part(Engines).package(verbose=verbose)
        with quiet(verbose), without_compiler():
            self.deepspeed: Any = deepspeed.initialize(
                model=net, optimizer=self.inner, config=config, dist_init_required=False
            )[0]
        self._clip = float(self.deepspeed.gradient_clipping())
        self._reached: set[nn.Parameter] = set()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._reach)  # type: ignore[no-untyped-call]
        self.note_weights()
        mark_steps_as_watched(optimizer)  # a scheduler of it would warn that it never steps

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, which is scaled under fp16.

        Raises:
            ModelError: the loop has not called ``zero_grad`` since the last step, or a backward has failed before.
        """
        self._refuse_used_up("backward")
        if self._is_broken:
            raise ModelError(
                f"rank {self.rank}: a backward has failed before, in which DeepSpeed's engine has lost a part of "
                "the gradients. Start again from a checkpoint."
            )
        self._is_broken = True
        with self.at_work():
            self.deepspeed.optimizer.clear_backward_seen_flag()
            self.deepspeed.optimizer.backward_prologue()
            self.deepspeed.backward(loss)
        self.has_gradients, self._is_broken = True, False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Note that a backward or a step of the engine is running within a ``with``."""
        self.is_at_work = True
        try:
            yield
        finally:
            self.is_at_work = False

    def _reach(self, parameter: nn.Parameter) -> None:
        """Note that a backward has computed a gradient, which must be the engine's backward."""
        if not self.is_at_work:
            raise ModelError(
                f"rank {self.rank}: loss.backward() of {type(self.net).__name__} under strategy='deepspeed', whose "
                "engine has a backward of its own. Call distwrap.backward(loss) and distwrap.optimizer_step(optimizer)."
            )
        self._reached.add(parameter)

    def step(self) -> None:
        """Step the engine, if there are gradients.

        Raises:
            ModelError: a second step without ``zero_grad``; or parameters were added, frozen or unfrozen since the
                engine was made, or have no gradient.
        """
        if not self.has_gradients:
            self._refuse_used_up("step")
            return
        if self._trained() != set(map(id, self.parameters)) or len(self.user.param_groups) != self._groups():
            raise ModelError(
                f"rank {self.rank}: parameters of {type(self.user).__name__} were added, frozen or unfrozen since "
                "wrap_optimizer(), and DeepSpeed's engine steps those of then. Do that before, or use strategy='zero1'."
            )
        if missing := [name for each, name in self.parameters.items() if each not in self._reached]:
            raise ModelError(
                f"rank {self.rank}: {missing[0]!r} has no gradient, as {len(missing) - 1} others, since"
                " no forward used it. DeepSpeed would step it by a gradient of zeros, so that "
                "weight decay and momentum change it; one process leaves it alone. Freeze it by requires_grad_(False) "
                "before wrap_optimizer(), or use strategy='zero1' or 'fsdp'."
            )
        take_options(self.user, self.inner)
        self.take_over_weights()
        self.deepspeed.step()
        self.taken = not self.deepspeed.optimizer.overflow
        self.deepspeed.optimizer.clip_grad = self._clip
        self._drop()
        self._is_used_up = True
        self.note_weights()

    def zero_grad(self) -> None:
        """Drop the gradients since the last step."""
        self._is_used_up = False
        if self.has_gradients:
            self.deepspeed.optimizer.zero_grad()
            self._drop()

    def _refuse_used_up(self, what: str) -> None:
        if self._is_used_up:
            raise ModelError(
                f"rank {self.rank}: a second {what} without zero_grad() since the last step. One process would still "
                "have its gradients, which DeepSpeed has dropped. Call zero_grad() in each step, of the optimizer that "
                "wrap_optimizer() returned."
            )

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of all gradients in the next step."""
        self.deepspeed.optimizer.clip_grad = max_norm

    def norm(self) -> torch.Tensor | None:
        """Return the norm of all gradients in the last step, in float32 as the weights' copy."""
        norm: torch.Tensor | float | None = self.deepspeed.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm).float()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients accumulated on this rank, to rescale by one factor on all ranks.

        Raises:
            ModelError: DeepSpeed has offloaded them.
        """
        zero = self.deepspeed.optimizer
        if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
            raise ModelError(
                "scale_loss() over a window of accumulate() rescales gradients, which DeepSpeed has offloaded. Divide "
                "the losses by the window's own count, or leave offload out."
            )
        found = [parameter.grad for parameter in self.parameters]
        found += [each for table in self._tables() for row in table.values() for each in row or ()]
        return list(
            {each.data_ptr(): each for each in found if isinstance(each, torch.Tensor) and each.numel()}.values()
        )

    def take_over_weights(self) -> None:
        """Copy changes that the loop has made to the weights, as by a clamp, into the engine's own copy.

        Raises:
            ModelError: a weight was changed while its numbers were divided over the ranks.
        """
        zero = self.deepspeed.optimizer
        if self.stage == 3:
            for parameter, name in self.parameters.items():
                if version_of(parameter) != self._versions[parameter]:
                    raise ModelError(
                        f"rank {self.rank}: {name!r} was changed by hand, but its numbers are divided over the "
                        "ranks, so the change had no effect. Change it inside gathered_weights(model), from "
                        "distwrap.strategies.deepspeed."
                    )
            rows = zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True)
        else:
            shares = [row[self.rank] for row in zero.parallel_partitioned_bit16_groups]
            rows = zip(shares, zero.single_partition_of_fp32_groups, strict=True)
        with torch.no_grad():
            for seen, master in rows:
                if seen is None or seen.device != master.device or not master.numel():  # on NVMe
                    continue
                # Unchanged weights keep the bits that half precision lacks.
                changed = master.to(seen.dtype) != seen
                master.data.copy_(torch.where(changed, seen.float(), master))

    def note_weights(self) -> None:
        """Accept the current weights, whose change was also made in the engine's copy."""
        self._versions = {parameter: version_of(parameter) for parameter in self.parameters}

    def end(self) -> None:
        """Remove the engine's hooks."""
        self.is_at_work = True  # from now on nothing is refused
        with quiet(False):
            self.deepspeed.destroy()

    def make_whole(self) -> None:
        """Give every rank all weights again after the end; every rank calls it."""
        divided: list[Any] = [parameter for parameter in self.net.parameters() if hasattr(parameter, "ds_id")]
        if divided:
            divided[0].all_gather(param_list=divided)

    def _trained(self) -> set[int]:
        return {number for number, each in parameters_of(self.user).items() if each.requires_grad}

    def _groups(self) -> int:
        return len(self.inner.param_groups)

    def _tables(self) -> list[dict[Any, Any]]:
        """Return where the engine keeps gradients until its step, beside ``.grad``."""
        zero = self.deepspeed.optimizer
        return [zero.averaged_gradients, *([zero.all_grad_tensors] if self.stage < 3 else [])]

    def _drop(self) -> None:
        self.has_gradients = False
        self._reached.clear()
        for table in self._tables():
            for key in table:
                table[key] = None
        if self.stage == 3:
            self.deepspeed.optimizer.averaged_gradients.clear()
        for parameter in self.parameters:
            parameter.grad = None


class EngineOptimizer(Optimizer):
    """The user's optimizer, with its groups and hooks, whose steps a `ModelEngine` takes."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["engine"].user, name)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the engine."""
        if closure is not None:
            raise ModelError(
                f"{type(self.engine.user).__name__}.step(closure) is not possible under strategy='deepspeed', whose "
                "engine takes no closure. Compute the loss and its gradients first, and call step()."
            )
        with self.engine.at_work():
            self._step()

    @with_step_hooks
    def _step(self) -> None:
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step."""
        self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in one process; every rank calls it."""
        return full_optimizer_state(self.engine, everywhere=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as of one process; every rank calls it."""
        load_optimizer_state(self.engine, state_dict)


class Engines(RunPart):
    """Engines of one run, which their models and optimizers keep alive; and the package, with what it needs.

    Attributes:
        nets: the models that were wrapped, with an engine or without.
    """

    def __init__(self, world: World) -> None:
        self._world, self._all, self._run = world, WeakSet[ModelEngine](), ExitStack()
        self.nets: WeakSet[nn.Module] = WeakSet()
        # DeepSpeed reads LOCAL_RANK in every step of stage 3; launchers other than torchrun do not set it.
        kind = {"DS_ACCELERATOR": "cpu"} if world.device.type == "cpu" else {}
        self._run.enter_context(variables_set({"LOCAL_RANK": str(world.placement.local_rank), **kind}))
        world.part(OptimizerSteps).listen(Phase.REFUSE, self._refuse_alone)

    def under(self, loss: torch.Tensor) -> list[ModelEngine]:
        """Return the engines that train parameters from which a loss was computed, by its graph."""
        found, seen, nodes = list[ModelEngine](), set[Any](), list[Any]([loss.grad_fn])
        while nodes and len(found) < len(self._all):
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                leaf = getattr(node, "variable", None)
                found += [each for each in self._all if leaf in each.parameters and each not in found]
                nodes += [before for before, _ in node.next_functions]
        return found

    def package(self, *, verbose: bool) -> Any:
        """Import DeepSpeed for the device of this rank, and return it; it is silent unless `verbose`."""
        with quiet(verbose):
            import deepspeed
        deepspeed.utils.logging.set_log_level_from_string("info" if verbose else "error")
        if not verbose:
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
        return deepspeed

    def of(self, thing: nn.Module | Optimizer) -> ModelEngine | None:
        """Return the engine of a user's model, or of an optimizer, the user's or its own."""
        return next((each for each in self._all if thing in (each.net, each.user, each.optimizer)), None)

    def watch(self, net: nn.Module) -> None:
        """Refuse gradients of a wrapped model that has no engine, which nobody would average."""
        self.nets.add(net)

        def require_engine(parameter: nn.Parameter) -> None:
            if net in self.nets and self.of(net) is None:
                raise ModelError(
                    f"rank {self._world.placement.rank}: {type(net).__name__} has no engine, which computes gradients "
                    "under strategy='deepspeed'. Call optimizer = wrap_optimizer(optimizer) before, which makes it."
                )

        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(require_engine)  # type: ignore[no-untyped-call]

    def add(self, engine: ModelEngine) -> None:
        """Add a new engine."""
        self._all.add(engine)

    def remove(self, engine: ModelEngine) -> None:
        """Release an engine whose model goes back to the caller."""
        engine.end()
        self._all.discard(engine)
        self.nets.discard(engine.net)

    def close(self) -> None:
        """Release all engines, and DeepSpeed's references to the process group."""
        for engine in list(self._all):
            engine.end()
        self.nets.clear()
        forget_group()
        self._run.close()

    def _refuse_alone(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer in (each.optimizer, each.inner) for each in self._all):
            return
        held = parameters_of(optimizer).keys()
        if any(not held.isdisjoint(map(id, net.parameters())) for net in self.nets):
            raise ModelError(
                f"rank {self._world.placement.rank}: this step of {type(optimizer).__name__} would not reach "
                "DeepSpeed's engine. Call optimizer = wrap_optimizer(optimizer) before the first forward that trains, "
                "and step what it returns by distwrap.optimizer_step(optimizer)."
            )


@contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Keep DeepSpeed from printing within a ``with``."""
    if verbose:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def take_options(source: Optimizer, target: Optimizer) -> None:
    """Copy the options of an optimizer's groups to another's."""
    for given, taken in zip(source.param_groups, target.param_groups, strict=True):
        taken.update({name: value for name, value in given.items() if name != "params"})


def _twin(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class, options and parameters, which shares nothing else."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler may have replaced it
    for name, value in optimizer.__dict__.items():
        if isinstance(value, OrderedDict):
            made.__dict__[name] = OrderedDict()  # of hooks
    made.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    made.state = defaultdict(dict)
    return made
