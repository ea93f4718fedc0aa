"""The decorator ``@distributed``, and the type of what it returns."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

import wrapt
from typing_extensions import Unpack

from distwrap.decorated import BoundDecoratedFunction, DecoratedFunction
from distwrap.errors import OptionError
from distwrap.frames import are_left_out
from distwrap.options import VARIABLES, Options
from distwrap.versions import CLASS_METHODS_DO_NOT_BIND

if TYPE_CHECKING:
    from distwrap.protocols import Algorithm, Launcher, Precision, Strategy
    from distwrap.prove.proof import Proof
    from distwrap.registry import AlgorithmName, LauncherName, PrecisionName, StrategyName

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
Value_co = TypeVar("Value_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)
Backend = Literal["auto", "nccl", "gloo", "cpu:gloo,cuda:nccl"]


class GivenOptions(TypedDict, total=False):
    """Types of the options that ``@distributed`` takes besides ``returns``, which decides the type of a call."""

    strategy: StrategyName | str | Strategy
    nprocs: int | Literal["auto"]
    nnodes: int | str
    node_rank: int | None
    rdzv_endpoint: str | None
    launcher: LauncherName | str | Launcher
    backend: Backend | str
    precision: PrecisionName | str | int | Precision
    comm: AlgorithmName | str | Algorithm | None
    share_devices: bool
    seed: int | None
    timeout: float
    max_restarts: int
    retrofit: bool
    report: bool | str | os.PathLike[str]
    log_dir: str | os.PathLike[str] | None


class Distributed(Protocol[P, R, Value_co]):
    """Decorated function, which is called like the plain one.

    Its types are the parameters, what the plain function returns, and what a call returns: that, or a list of it.
    """

    __name__: str
    __qualname__: str

    @property
    def __wrapped__(self) -> Callable[P, R]:
        """The plain function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Value_co:
        """Run it on all ranks; return rank 0's value, or those of all."""

    @overload
    def options(self, **options: Unpack[GivenOptions]) -> Distributed[P, R, Value_co]: ...
    @overload
    def options(self, *, returns: Literal["rank0"], **options: Unpack[GivenOptions]) -> Distributed[P, R, R]: ...
    @overload
    def options(self, *, returns: Literal["all"], **options: Unpack[GivenOptions]) -> Distributed[P, R, list[R]]: ...
    def options(self, **options: Any) -> Any:
        """Return the same function with other options, for one call: ``train.options(nprocs=4)(…)``."""

    def prove(self, **options: Any) -> Callable[P, Proof]:
        """Return a function that proves a call of this one: ``train.prove()(…)``; see `distwrap.testing.prove`."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Distributed[P, R, Value_co]: ...
    @overload
    def __get__(
        self: Distributed[Concatenate[S_contra, Q], R, Value_co], instance: S_contra, owner: type | None = None
    ) -> Distributed[Q, R, Value_co]: ...


def _parameters() -> list[inspect.Parameter]:
    """Return the options as keyword-only parameters, for ``help`` and notebooks."""
    types = {name: getattr(kind, "__forward_arg__", kind) for name, kind in GivenOptions.__annotations__.items()}
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=types.get(option.name, option.type),
        )
        for option in fields(Options)
    ]


def _shows_options(function: Callable[P, R]) -> Callable[P, R]:
    """Give a function that takes options by name a signature that lists them."""
    first = next(iter(inspect.signature(function).parameters.values()))
    function.__signature__ = inspect.Signature([first, *_parameters()])  # type: ignore[attr-defined]
    return function


class _BoundDistributedFunction(BoundDecoratedFunction):
    @_shows_options
    def options(self, **options: Any) -> Any:
        """Return the method with other options, for one call: ``trainer.fit.options(nprocs=4)(…)``.

        An option that is left out stays as it is.
        """
        return DistributedFunction(self.__wrapped__, *self._self_parent._self_updated(options))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "options"]


class DistributedFunction(DecoratedFunction):
    """A function under ``@distributed``; `Distributed` is its type for a checker."""

    __bound_function_wrapper__ = _BoundDistributedFunction

    @staticmethod
    def _self_call(
        base: Options,
        asked: frozenset[str],
        given: dict[str, Any],
        wrapped: Callable[..., Any],
        instance: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        from distwrap.group.world import active_world
        from distwrap.launch import start  # at the first call: most of the package, which decorating does not need
        from distwrap.launch.task import Task
        from distwrap.tracebacks import fold

        __tracebackhide__ = are_left_out()  # IPython and pytest look for it
        if isinstance(wrapped, wrapt.PartialCallableObjectProxy):  # Trainer.fit(trainer, …)
            wrapped, args = wrapped.__wrapped__, (instance, *args)
        is_outermost = active_world() is None  # within a run, our frames tell in what a rank has failed
        try:
            options = base.with_environment(os.environ).updated(given, where=".options()").simulated(os.environ)
            of_environment = {name for variable, name in VARIABLES.items() if os.environ.get(variable)}
            task = Task(wrapped, args, kwargs, options, (asked - of_environment) | given.keys())
            return start(task)  # DISTWRAP_TRACEBACK=full shows the frames of distwrap
        except BaseException as error:
            if is_outermost:
                fold(error)
            raise

    @_shows_options
    def options(self, **options: Any) -> DistributedFunction:
        """Return the function with other options, for one call: ``train.options(nprocs=4)(…)``.

        An option that is left out stays as it is.
        """
        if CLASS_METHODS_DO_NOT_BIND and self.is_in_class_method():
            raise TypeError(
                f"{self.__qualname__}.options() does not know the class that it is called on: since Python 3.13 "
                f"@classmethod hides it. Write @distributed above @classmethod."
            )
        return DistributedFunction(self.__wrapped__, *self._self_updated(options))

    def prove(self, **options: Any) -> Callable[..., Proof]:
        """Return a function that proves a call of this one: ``train.prove()(…)``; see `distwrap.testing.prove`."""
        # By its name: it is above all that a decorated function needs.
        prove = importlib.import_module("distwrap.testing").prove
        return lambda *args, **kwargs: prove(self, *args, keywords=kwargs, **options)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "options", "prove"]

    def _self_updated(self, options: dict[str, Any]) -> tuple[Options, frozenset[str], dict[str, Any]]:
        base, asked, given = self._self_settings
        base.updated(options, where=".options()")
        return base, asked, {**given, **options}


@overload
def distributed(
    fn: None = None,
    /,
    *,
    strategy: StrategyName | str | Strategy = "ddp",
    nprocs: int | Literal["auto"] = "auto",
    nnodes: int | str = 1,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    launcher: LauncherName | str | Launcher = "auto",
    backend: Backend | str = "auto",
    precision: PrecisionName | str | int | Precision = "32",
    comm: AlgorithmName | str | Algorithm | None = None,
    share_devices: bool = False,
    seed: int | None = None,
    timeout: float = 600.0,
    max_restarts: int = 0,
    returns: Literal["rank0"] = "rank0",
    retrofit: bool = False,
    report: bool | str | os.PathLike[str] = False,
    log_dir: str | os.PathLike[str] | None = None,
) -> Callable[[Callable[P, R]], Distributed[P, R, R]]: ...
@overload
def distributed(
    fn: None = None,
    /,
    *,
    strategy: StrategyName | str | Strategy = "ddp",
    nprocs: int | Literal["auto"] = "auto",
    nnodes: int | str = 1,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    launcher: LauncherName | str | Launcher = "auto",
    backend: Backend | str = "auto",
    precision: PrecisionName | str | int | Precision = "32",
    comm: AlgorithmName | str | Algorithm | None = None,
    share_devices: bool = False,
    seed: int | None = None,
    timeout: float = 600.0,
    max_restarts: int = 0,
    returns: Literal["all"],
    retrofit: bool = False,
    report: bool | str | os.PathLike[str] = False,
    log_dir: str | os.PathLike[str] | None = None,
) -> Callable[[Callable[P, R]], Distributed[P, R, list[R]]]: ...
@overload
def distributed(fn: Callable[P, R], /, **options: Unpack[GivenOptions]) -> Distributed[P, R, R]: ...


@_shows_options
def distributed(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Turn a plain function with a training loop into one that runs on several processes.

    It is written bare, ``@distributed``, or with options. A call runs the function on every rank and returns rank 0's
    value. An exception on any rank is raised in the caller, with its type and the rank's traceback. With a single
    process it is a plain call; under torchrun, or inside another decorated function, it joins the ranks that are there
    and launches none. Inside another decorated function an option that its run does not have is refused. Nothing of the
    caller's environment is changed afterwards.

    Args:
        fn: the function, method, class or static method.
        strategy: how the model is replicated: a name out of `available_strategies`, as ``"ddp"`` or ``"dp"``; or
            ``"ddp_spawn"``, ``"ddp_fork"``, ``"ddp_forkserver"``, ``"ddp_script"``, ``"ddp_notebook"``: ``"ddp"`` with
            that launcher; or a `Strategy`, as ``DDPStrategy(static_graph=True)``. ``"dp"`` is one process over all
            devices it sees, whatever `nprocs` says.
        nprocs: processes on this node; ``"auto"`` is one for each accelerator, else 1.
        nnodes: nodes, all of which run the same command; ``"1:4"`` lets them come and go. On nodes other than that of
            rank 0 the call returns a `NodeSummary`.
        node_rank: which of the nodes this one is; by default the one that `rdzv_endpoint` names is 0, and the others
            are numbered as they arrive.
        rdzv_endpoint: where the nodes meet, ``"host:port"``: one of them, the same on all.
        launcher: ``"auto"`` (fork where that is safe, else forkserver), ``"forkserver"``, ``"fork"``, ``"spawn"``,
            ``"script"``, ``"elastic"`` (torch's agent, which `max_restarts` and ``"1:4"`` choose too), ``"ray"`` (a Ray
            cluster; an extra), ``"slurm"`` (a job that the call submits; an extra), ``"external"``, which refuses to
            run unless an outer launcher is there, or another name out of `available_launchers`; also with options, as
            ``"ray(cpus=4)"``, or a launcher itself.
        backend: the process group's backend; ``"auto"`` is NCCL on CUDA and gloo on the CPU.
        precision: ``"32"``, ``"bf16"`` or ``"fp16"``; Lightning's and Accelerate's spellings are taken too.
        comm: how wrapped models exchange gradients or weights: a name out of `available_algorithms`, as
            ``"bytegrad"``, also with options, ``"local_sgd(sync_every=16)"``; or an object out of `distwrap.comm`.
        share_devices: let ranks take turns on an accelerator where there are fewer than ranks, to try many ranks on
            one GPU; they exchange through gloo, since NCCL refuses it.
        seed: seeds all ranks alike, and their loaders' workers apart.
        timeout: seconds for a collective, at most 120 of them for all ranks to arrive.
        max_restarts: how often all ranks are started again after one has failed; see `resume_from`.
        returns: ``"rank0"``, or ``"all"`` for the list of all ranks' values.
        retrofit: wrap models, optimizers and loaders among the arguments before the function sees them, and write the
            trained weights and optimizer state back into the caller's own objects.
        report: whether to tell at the end where the time went, on rank 0's standard error; the path of a file that
            ends in ``.json`` gets all figures too. See `report`.
        log_dir: a folder for what each rank prints, besides the console: ``rank_0.stdout.log``, ``rank_0.stderr.log``,
            …, appended to. Left to an outer launcher where there is one.

    Returns:
        The function with the same signature, and ``.options(…)`` to change options for one call.

    Raises:
        OptionError: an option is wrong, or the function is of a kind that cannot be launched.

    Environment: ``DISTWRAP_STRATEGY``, ``_LAUNCHER``, ``_NPROCS``, ``_NNODES``, ``_NODE_RANK``, ``_RDZV_ENDPOINT``,
    ``_BACKEND``, ``_PRECISION``, ``_COMM``, ``_SHARE_DEVICES``, ``_SEED``, ``_TIMEOUT``, ``_MAX_RESTARTS``,
    ``_REPORT`` and ``_LOG_DIR`` override these arguments, ``.options()`` overrides both; ``DISTWRAP_DISABLE=1`` runs
    the function in this process.

    Example:
        >>> @distributed(nprocs=1)
        ... def main(epochs: int) -> int:
        ...     return epochs * world_size()
        >>> main(3)
        3
    """
    base = Options().updated(options)
    if fn is None:
        return lambda fn=None: _decorated(fn, base, frozenset(options))
    return _decorated(fn, base, frozenset(options))


def _decorated(fn: Any, base: Options, asked: frozenset[str]) -> DistributedFunction:
    plain = fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn
    if isinstance(plain, (DistributedFunction, _BoundDistributedFunction)):
        raise OptionError(
            f"{plain.__qualname__} is decorated with @distributed twice. Keep one, or use .options(…) for one call."
        )
    if inspect.isclass(plain) or not callable(plain):
        kind = f"the class {plain.__qualname__}" if inspect.isclass(plain) else repr(plain)
        nprocs = f" A number of processes is nprocs={plain}." if isinstance(plain, int) else ""
        raise OptionError(
            f"@distributed decorates a function or a method, not {kind}: write it above one, or say "
            f"main = distributed(…)(train).{nprocs}"
        )
    name = getattr(plain, "__qualname__", type(plain).__qualname__)
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise OptionError(
            f"@distributed takes plain functions, and {name} is async: a rank has no event loop. "
            f"Decorate a plain function, and call asyncio.run(…) inside it."
        )
    if inspect.isgeneratorfunction(plain):
        raise OptionError(
            f"@distributed takes plain functions, and {name} is a generator: its values cannot be sent back one by "
            f"one. Return a list instead."
        )
    return DistributedFunction(fn, base, asked, {})
