"""What the rooms of the package agree on: the contracts of what can be added, and what they hand to each other.

This file imports torch alone, so that every room can name them. A room's own base class, as `distwrap.Strategy`,
adds the defaults that need the package.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

# Classes of rooms above, which are named here for the reader.
World: TypeAlias = Any
Options: TypeAlias = Any
InPrecision: TypeAlias = Any
Job: TypeAlias = Any


@dataclass(frozen=True)
class Layout:
    """Arrangement of the ranks for the data.

    Ranks that hold parts of one copy, as under tensor or pipeline parallelism, take the same share: they have the same
    `rank` here. Shares of loaders, their seeds, `gather`, `reduce`, `mean` and `scale_loss` go by the layout;
    `barrier`, `broadcast` and `gather_object` are of all ranks.

    Attributes:
        rank: of the share that this process takes.
        size: the number of shares.
        group: the ranks of this process's place in its copy, one of each share, in the order of the shares; ``None``
            for all ranks of the world. `rank` and `size` are those of this process in it.
        mesh: a ``DeviceMesh`` of the devices, where the strategy has made one.
    """

    rank: int
    size: int
    group: ProcessGroup | None = None
    mesh: Any = None


class ComparedTensor(NamedTuple):
    """A tensor of a model on this rank, for the proof that ranks are in sync.

    Attributes:
        name: of the tensor in the plain model.
        part: which part of it is here; equal parts must be equal on all ranks, others are not compared. Empty where
            it is whole on every rank; else it begins with the number of the first rank that has it, as in "2: rows".
        tensor: the numbers, or one, as of a learning rate.
    """

    name: str
    part: str
    tensor: torch.Tensor | float


@runtime_checkable
class CheckpointIO(Protocol):
    """Format of a checkpoint; a class of your own needs these two methods and this attribute.

    Attributes:
        collective: whether every rank writes and reads its own part, in a folder; otherwise rank 0 writes one file for
            all.
    """

    collective: bool

    def save(self, state: Any, path: Path) -> None:
        """Write a plain state to a temporary path, which the caller renames when the file is safely on disk."""

    def load(self, path: Path, map_location: Any) -> Any:
        """Return the state that `save` has written."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Way to exchange gradients or weights. Subclasses are frozen dataclasses of their options.

    Attributes:
        hierarchical: whether ranks of a node exchange in full precision, and the first ranks of all nodes by the
            algorithm.
        same_weights: whether all ranks hold the same weights after each step.
        needs_optimizer_state: whether the algorithm needs the whole state of the optimizer on each rank.
    """

    hierarchical: bool = False
    same_weights: ClassVar[bool] = True
    needs_optimizer_state: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if "check" in each.metadata:
                value = each.metadata["check"](each.name, getattr(self, each.name))
                object.__setattr__(self, each.name, value)

    def check(self, world_size: int) -> None:  # noqa: B027 - most algorithms refuse nothing
        """Refuse options that do not fit the number of ranks, or of nodes if the algorithm is hierarchical.

        Raises:
            OptionError: an option does not fit.
        """

    @abstractmethod
    def attach(self, model: Any, world: World) -> Any:
        """Return the `Exchange` of a model that was just wrapped; every rank calls this."""


class Precision:
    """Full precision, ``"32"``; subclass it, and override what differs in another precision.

    A precision is chosen in the caller and travels to the ranks, so it must be picklable. Its methods are called in
    this order: `weights` once, when a model is wrapped; `inputs`, `context`, `outputs` and `require_scaled` around each
    forward; `after_step` after each step of an optimizer.

    Attributes:
        is_plain: whether a forward is the model's own, with nothing around it.

    Example:
        >>> class Doubled(Precision):
        ...     def outputs(self, value):
        ...         return value.double()
        >>> Doubled().outputs(torch.ones(1)).dtype
        torch.float64
    """

    is_plain = False

    def weights(self, model: nn.Module) -> nn.Module:
        """Return the model with its weights in the type in which they are trained."""
        return model

    def inputs(self, value: Any) -> Any:
        """Return a forward's inputs, in any nesting, in the type that the model takes."""
        return value

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which a forward runs."""
        return nullcontext()

    def outputs(self, value: Any) -> Any:
        """Return a forward's outputs, in any nesting, in the type in which a loss is computed; by default float32."""
        raise NotImplementedError

    def require_scaled(self, outputs: Any) -> None:
        """Refuse a backward from a forward's outputs with a loss that is not scaled, unless the strategy scales."""

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return a scaler of losses, where gradients would be too small without one."""
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Act after a step of an optimizer of models in this precision; only called where a subclass overrides it."""

    def __repr__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Wrapping:
    """Instructions for wrapping a model.

    Attributes:
        device: the device on which the model computes.
        in_precision: the precision in which it computes on that device.
        forward_methods: the methods that may run a forward.
        comm: the algorithm of exchange; ``None`` for DDP's own.
        options: options for the strategy, as ``find_unused_parameters`` for DDP.
    """

    device: torch.device
    in_precision: InPrecision
    forward_methods: Literal["auto"] | Iterable[str]
    comm: Algorithm | None
    options: dict[str, Any]


class StateLayout(ABC):
    """State of models and optimizers under a strategy: who holds which part, the whole state, and parts of it.

    The other methods of `distwrap.Strategy` follow from `holders`.

    Attributes:
        shards: whether the full state of a model or optimizer is put together from several ranks: `state` is then a
            collective, also for a checkpoint that rank 0 writes.
    """

    shards: bool = False

    def holders(self, thing: nn.Module | Optimizer) -> Mapping[int, Collection[int]] | None:
        """Return the ranks that hold each tensor of a model, or the state of each parameter of an optimizer, by its id.

        Tensors that are not among them are each a ``DTensor``, or on every rank.

        Returns:
            ``None`` if every rank has the whole state, or the strategy puts it together by methods of its own.
        """
        return None

    @abstractmethod
    def held(self, model: nn.Module) -> Iterable[ComparedTensor]:
        """Return the tensors that must be equal on all ranks with the same part, for the comparison.

        By default these are all tensors of a model that every rank has as a whole, or by `holders`, and none of another
        model that a strategy divides, since only the strategy knows the parts.
        """

    def is_divided(self, thing: nn.Module | Optimizer) -> bool:
        """Return whether no single rank has the state of a model or optimizer; by default as `shards`."""
        return self.shards

    @abstractmethod
    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        """Return the full state of a model or optimizer, with the plain model's keys, as in one process.

        Args:
            thing: a model that this strategy has prepared, or an optimizer of its parameters, prepared or not.
            everywhere: whether every rank needs a state that is put together from several ranks, or only rank 0.
        """

    @abstractmethod
    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        """Load a `state` of this or any other strategy; every rank calls it with all of it."""

    @abstractmethod
    def parts(self, thing: nn.Module | Optimizer) -> dict[str, Any] | None:
        """Return the `state` with this rank's piece of each divided tensor, for a checkpoint in parts.

        Every rank calls it, and returns the same names. A tensor of which each rank has another piece is a ``DTensor``;
        torch's distributed checkpoint puts its pieces together, or rank 0 does so tensor by tensor for a single file.
        Any other tensor must be equal on all ranks, and other values are saved from rank 0. `load_state` gets whole
        tensors, at any number of ranks, unless `parts_to_load` asks for pieces.

        Returns:
            ``None`` if this rank has everything, so that `state` is used.
        """

    @abstractmethod
    def parts_to_load(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return a stored state reduced to what this rank needs, so that no rank reads all of a large one.

        A tensor of which this rank needs a piece is replaced by an empty ``DTensor``, and one that it does not need by
        ``None``; other tensors are read whole. The checkpoint fills them, and passes the result to `load_state`.

        Args:
            thing: as for `state`.
            state: the saved state, from any strategy; its tensors may have no numbers yet. Its keys must stay.

        Returns:
            ``None`` if `load_state` needs whole tensors.
        """

    def restore_original(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        """Restore the caller's own model or optimizer with a full state; for ``retrofit``."""
        original.load_state_dict(state)


class Strategy(StateLayout):
    """Way to replicate or divide a model; subclass it, or a strategy of distwrap, and override what should differ.

    A strategy is made in the caller and travels to the ranks, so it must be picklable. `wrap_model` and
    `wrap_optimizer` bind the objects that they prepare to it: `backward`, `optimizer_step`, `accumulate`, the
    comparison of weights and checkpoints then use the strategy of the model or optimizer at hand.
    ``examples/custom_strategy.py`` has one with a group set-up, a wrapping and a file format of its own.

    Attributes:
        launches: the number of processes: one for each ``"device"``, one for each ``"node"``, or ``"one"``, which runs
            the decorated function in the caller's process.
        backend: the backend of the process group if `@distributed` says ``"auto"``; ``None`` leaves the choice to the
            device.
        places_model: whether the strategy itself moves the model to its devices, as for a model that does not fit on
            one.
        owns_scale: whether `backward` and `step` scale fp16 themselves, so that distwrap's scaler is not used.
        steps_parameters: whether optimizers hold the model's own parameters; otherwise they hold shards that the
            strategy has made.
        averages_at_once: whether each backward averages gradients over the ranks, also within a window of `accumulate`.
        same_weights: whether all ranks hold the same weights after each step, so that distwrap compares them.
        is_simulated: whether its ranks can be simulated: they exchange by torch's process groups alone.
        exchanges: what carries gradients or weights, so that `comm` is refused; empty where `comm` may.
        device: the device of its only process, if that is neither torch's accelerator nor the CPU.
        formerly: the name of another package by which it was chosen; a line at the start says what that name became.
    """

    launches: Literal["device", "node", "one"] = "device"
    backend: str | None = None
    places_model: bool = False
    owns_scale: bool = False
    steps_parameters: bool = False
    averages_at_once: bool = False
    same_weights: bool = True
    is_simulated: bool = True
    exchanges: str = ""
    device: torch.device | None = None
    formerly: str = ""

    # In the caller

    def check(self, run: Options) -> None:
        """Refuse a run before a process starts or a model is wrapped: missing packages, options that clash.

        By default `comm` is refused where the strategy `exchanges` by itself.

        Raises:
            OptionError: the run is refused; the message says what to install or change.
        """

    # When the ranks meet

    def join(self, placement: Any, options: Options, secret: bytes) -> World | None:
        """Meet the other ranks in this strategy's own way, and return their world, which becomes the current one.

        Returns:
            ``None`` if they meet as under any other strategy.
        """
        return None

    def init_process_group(self, backend: str, **arguments: Any) -> None:
        """Make the process group, by default by ``torch.distributed.init_process_group``.

        Args:
            backend: the backend that the run has chosen.
            **arguments: ``store``, ``rank``, ``world_size``, ``timeout`` and ``device_id`` for torch.
        """
        dist.init_process_group(backend, **arguments)

    def setup(self, world: World) -> Layout | None:
        """Arrange the ranks when several have met. Every rank calls it, only for the strategy of the run.

        Returns:
            The share of the data for this rank; ``None`` if each rank takes its own.
        """
        return None

    # Models and optimizers

    def choose(self, model: nn.Module, run: Options, device: torch.device) -> Strategy:
        """Return the strategy that prepares this model: itself, unless it chooses among others.

        `wrap_model` calls it on every rank, and binds the model to the result, which must be the same on all ranks.
        """
        return self

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        """Return the model for the loop to train.

        The given model is on its device, with its weights in their type, unless the strategy `places_model` itself.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prepare_model().")

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        """Return the optimizer for the loop to step; subclasses of `DDPStrategy` must call ``super()``."""
        return optimizer

    # A step

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, which is scaled under fp16; for `distwrap.backward`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Switch the exchange of gradients in the next backwards on or off; for `accumulate`."""

    def gradients(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the gradients accumulated on this rank, to rescale in place; for `scale_loss`."""
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def clip(
        self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], max_norm: float
    ) -> torch.Tensor | float | None:
        """Clip gradients by the norm over the whole model, whatever part of it is here; return that norm."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def norm(self, optimizer: Optimizer) -> torch.Tensor | float | None:
        """Return the norm by which the last step has clipped, if `clip` could not know it before the step."""
        return None

    def step(self, optimizer: Optimizer) -> bool | None:
        """Step an optimizer, for `distwrap.optimizer_step`.

        Under fp16 the gradients are already unscaled, and a rank with an overflow does not call it. So all ranks must
        have the same gradients before the step, as under DDP; a strategy that exchanges within it `owns_scale`.

        Returns:
            ``False`` if the step was skipped.
        """
        optimizer.step()
        return True

    # State

    def consolidate(self, model: nn.Module) -> None:
        """Give every rank one set of weights, for `distwrap.consolidate`; by default they already have the same."""

    def checkpoint_io(self) -> str | CheckpointIO:
        """Return the format of `distwrap.save` if its ``io`` is ``"auto"``: a name or an object."""
        return "auto"

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "formerly"}
        if "checks" in shown:  # since check() is a method
            shown["check"] = shown.pop("checks")
        shown |= shown.pop("ddp_options", {})
        defaults = {name: each.default for name, each in inspect.signature(type(self)).parameters.items()}
        differ = [f"{name}={value!r}" for name, value in shown.items() if repr(value) != repr(defaults.get(name))]
        return f"{type(self).__name__}({', '.join(differ)})"


class Launcher(ABC):
    """One way to start ranks. Subclass it, and register the class with `register_launcher`.

    A decorated call makes one launcher and calls, in this order, `count`, `check`, `plan`, `run` and `collect_result`.

    Attributes:
        name: for messages, and for the line at the start.
        several_nodes: whether callers on several nodes can each launch their own ranks of one run.
        restarts: whether it starts ranks again after a failure, and lets nodes come and go.
        start_method: multiprocessing's name for the way in which torch elastic starts the same ranks, where restarts
            are asked for; empty where it cannot. It is not inherited: elastic would lose what a subclass does else.
        writes_logs: whether `run` writes what each rank prints into the folder ``log_dir``.
        runs_one_rank: whether it also runs a call of one rank, which otherwise runs in the caller's process.
        summary: what the decorated call returns on this node where rank 0 is on another; set by `run`.
    """

    name: str = ""
    several_nodes: bool = False
    restarts: bool = False
    start_method: str = ""
    writes_logs: bool = False
    runs_one_rank: bool = False
    summary: object = None

    def __init_subclass__(cls) -> None:
        cls.start_method = vars(cls).get("start_method", "")

    @abstractmethod
    def count(self, nprocs: int | Literal["auto"]) -> int:
        """Return the number of ranks to start here; by default no more than there are devices.

        Raises:
            OptionError: there are fewer devices.
        """

    def check(self, job: Job) -> None:  # noqa: B027 - most launchers refuse nothing
        """Refuse a call that cannot work, before any process starts; by default refuse nothing.

        Raises:
            LaunchError: the call cannot work; the message says why, and what to do.
        """

    @abstractmethod
    def plan(self, job: Job) -> Any:
        """Return the instructions that all ranks have in common; by default with the call packed.

        Raises:
            SerializationError: names the object that cannot be packed.
        """

    def run(self, job: Job, plan: Any) -> Sequence[Any]:
        """Start the ranks, hand each the plan with its placement, wait for all, and leave none behind.

        In a rank's process `distwrap.launch.worker.work` does the rest, given a `LauncherLink` to this launcher.

        Returns:
            The outcomes of the ranks that this node has started, in rank order.

        Raises:
            BaseException: what a rank raised first, as `distwrap.launch.outcome.raise_if_failed` does.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run().")

    @abstractmethod
    def collect_result(self, job: Job, outcomes: Sequence[Any]) -> Any:
        """Write what was trained into the caller's objects, and return what the decorated call returns."""
