"""The tables of strategies, algorithms, precisions and launchers, and the functions that add to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from distwrap.former_names import BECAME, HINTS, LAUNCHER_HINTS, LAUNCHER_OF_STRATEGY, PRECISION_HINTS, REMOVED
from distwrap.name_table import Factory, Registry

if TYPE_CHECKING:
    from distwrap.protocols import Algorithm, Launcher, Precision, Strategy

# The tables' names for an editor, which offers them; a checker takes any other text too: plug-ins add names, and a name
# may have options. tests/test_declared_options.py compares them with the tables.
StrategyName = Literal[
    "ddp",
    "ddp2",
    "dp",
    "single",
    "zero1",
    "fsdp",
    "hsdp",
    "tp",
    "pipeline",
    "deepspeed",
    "horovod",
    "hivemind",
    "auto",
    "of_device",
    "bagua",
    "ddp_spawn",
    "ddp_fork",
    "ddp_forkserver",
    "ddp_script",
    "ddp_notebook",
]
LauncherName = Literal[
    "auto", "fork", "forkserver", "spawn", "script", "elastic", "ray", "slurm", "xla", "simulate", "external"
]
PrecisionName = Literal["32", "bf16", "bf16-true", "fp16"]
AlgorithmName = Literal[
    "allreduce",
    "fp16",
    "bf16",
    "bytegrad",
    "powersgd",
    "topk",
    "qadam",
    "decentralized",
    "low_precision_decentralized",
    "async",
    "local_sgd",
    "diloco",
]

strategies: Registry[Strategy] = Registry(
    "strategy",
    ("prepare_model", "prepare_optimizer"),
    "strategies",
    "distwrap.strategies",
    (
        ("ddp", "ddp:DDPStrategy", "one process a device, gradients averaged: torch's DistributedDataParallel"),
        ("ddp2", "dp:DDP2Strategy", "one process a node over all its devices, gradients averaged across nodes"),
        ("dp", "dp:DPStrategy", "one process over all its devices, in threads: torch's DataParallel"),
        ("single", "single:SingleStrategy", "one process, one device"),
        ("zero1", "zero:ZeroStrategy", "ddp with the optimizer's state divided over the ranks"),
        ("fsdp", "fsdp:FSDPStrategy", "each rank holds a share of every weight: torch's FSDP2"),
        ("hsdp", "fsdp:FSDPStrategy", "each node holds a copy, divided over its ranks: FSDP2", {"shard": "node"}),
        ("tp", "fsdp:FSDPStrategy", "the ranks of a node cut each layer among them", {"tensor_parallel": "node"}),
        ("pipeline", "pipeline:PipelineStrategy", "the blocks of a model in stages on the ranks, over microbatches"),
        ("deepspeed", "deepspeed:DeepSpeedStrategy", "DeepSpeed's engine, ZeRO 1 to 3 with offload, behind the loop"),
        ("horovod", "horovod:HorovodStrategy", "DDP whose gradients Horovod averages"),
        ("hivemind", "hivemind:HivemindStrategy", "peers that average now and then, and may come and go: hivemind"),
        ("auto", "auto:AutoStrategy", "the plainest of ddp, zero1, hsdp and fsdp that fits, by an estimate"),
        ("of_device", "of_device:of_device", "a strategy by its name, where torch has devices of a type: type='hpu'"),
        ("bagua", "bagua:BaguaStrategy", "DDP with an algorithm under Bagua's name: algorithm='gradient_allreduce', …"),
    ),
    aliases=dict.fromkeys(LAUNCHER_OF_STRATEGY.keys() - BECAME, "ddp"),
    former=BECAME,
    hints=HINTS,
    gone=REMOVED["strategy"],
    gone_options=REMOVED["option"],
)

algorithms: Registry[Algorithm] = Registry(
    "algorithm",
    ("attach",),
    "algorithms",
    "distwrap.comm",
    (
        ("allreduce", "gradients:AllReduce", "gradients in full"),
        ("fp16", "gradients:FP16", "gradients in float16: half the bytes"),
        ("bf16", "gradients:BF16", "gradients in bfloat16: half the bytes"),
        ("bytegrad", "gradients:ByteGrad", "gradients in 8 bits: a quarter of the bytes"),
        ("powersgd", "gradients:PowerSGD", "gradients as thin matrices, with error feedback"),
        ("topk", "gradients:TopK", "the largest gradients, with error feedback"),
        ("qadam", "qadam:QAdam", "Adam's momentum in 8 bits or 1, after a warm-up"),
        ("decentralized", "replicas:Decentralized", "weights averaged with peers, during the step"),
        (
            "low_precision_decentralized",
            "replicas:LowPrecisionDecentralized",
            "weights averaged with two neighbours, in 8 bits",
        ),
        ("async", "asynchronous:AsyncAveraging", "weights averaged by the clock, in the background"),
        ("local_sgd", "replicas:LocalSGD", "weights averaged every few steps"),
        ("diloco", "replicas:DiLoCo", "an outer step with momentum every few dozen steps"),
    ),
    gone=REMOVED["algorithm"],
)


precisions: Registry[Precision] = Registry(
    "precision",
    ("weights", "inputs", "context", "outputs"),
    "precisions",
    "distwrap.precision",
    (
        ("32", "precisions:FullPrecision", "float32, or whatever type the model has"),
        ("bf16", "precisions:MixedBF16", "autocast to bfloat16"),
        ("bf16-true", "precisions:TrueBF16", "weights and inputs in bfloat16"),
        ("fp16", "precisions:MixedFP16", "autocast to float16, with scaled losses"),
    ),
    # Spellings of Lightning ("16-mixed", 32) and of Accelerate ("no").
    aliases={
        **dict.fromkeys(("32-true", "fp32", "float32", "no"), "32"),
        **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
        **dict.fromkeys(("16", "16-mixed", "float16"), "fp16"),
    },
    hints=PRECISION_HINTS,
    loose=True,
)


launchers: Registry[Launcher] = Registry(
    "launcher",
    ("count", "check", "plan", "run", "collect_result"),
    "launchers",
    "distwrap.launch",
    (
        ("auto", "auto:fastest", "fork where that is safe, else forkserver"),
        ("fork", "fork:ForkLauncher", "copies of this process"),
        ("forkserver", "forkserver:ForkServerLauncher", "forks of a warm server, which has imported torch"),
        ("spawn", "spawn:SpawnLauncher", "fresh interpreters"),
        ("script", "script:ScriptLauncher", "this command line again for the other ranks; this process is rank 0"),
        ("elastic", "elastic:ElasticLauncher", "torch elastic: ranks start again, and nodes come and go"),
        ("ray", "ray:RayLauncher", "actors on a Ray cluster, with the resources that a rank needs"),
        ("slurm", "slurm:SlurmLauncher", "a Slurm job, which the call submits, waits for, and gets the results of"),
        ("xla", "xla:XlaLauncher", "processes of torch_xla, one for each of its devices: strategy='xla'"),
        (
            "simulate",
            "distwrap.testing.simulation.simulation:SimulateLauncher",
            "threads of this process, in turns: for a debugger",
        ),
        ("external", "external:refuse", "none: an outer launcher must have started the ranks"),
    ),
    hints=LAUNCHER_HINTS,
    gone=REMOVED["launcher"],
)


REGISTRIES: tuple[Registry[Any], ...] = (strategies, algorithms, precisions, launchers)


def register_strategy(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make a strategy known by a name, for ``@distributed(strategy=name)`` and ``wrap_model(strategy=name)``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `Strategy`; or ``"module:name"``, imported when it is chosen.
        description: one line, for `available_strategies`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is not a word, or the factory cannot be called.

    Example:
        >>> register_strategy("ddp_static", "distwrap.strategies.ddp:DDPStrategy", "DDP, static", static_graph=True)
        >>> available_strategies()["ddp_static"]
        'DDP, static'
    """
    strategies.register(name, factory, description, **defaults)


def available_strategies() -> dict[str, str]:
    """Return the strategies' names, each with its description: ours, registered ones, and those of installed packages.

    Example:
        >>> "ddp" in available_strategies()
        True
    """
    return strategies.available()


def register_algorithm(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make an algorithm of exchange known by a name, for ``comm=name``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `distwrap.comm.Algorithm`; or ``"module:name"``.
        description: one line, for `available_algorithms`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is not a word, or the factory cannot be called.

    Example:
        >>> register_algorithm("rare", "distwrap.comm:LocalSGD", "a mean now and then", sync_every=100)
        >>> available_algorithms()["rare"]
        'a mean now and then'
    """
    algorithms.register(name, factory, description, **defaults)


def available_algorithms() -> dict[str, str]:
    """Return the names of the algorithms for ``comm=``, each with its description.

    Example:
        >>> "bytegrad" in available_algorithms()
        True
    """
    return algorithms.available()


def register_precision(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make a precision known by a name, for ``@distributed(precision=name)`` and ``wrap_model(precision=name)``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `distwrap.precision.Precision`; or ``"module:name"``.
        description: one line, for `available_precisions`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is not a word, or the factory cannot be called.

    Example:
        >>> register_precision("brain", "distwrap.precision.precisions:MixedBF16", "autocast to bfloat16")
        >>> available_precisions()["brain"]
        'autocast to bfloat16'
    """
    precisions.register(name, factory, description, **defaults)


def available_precisions() -> dict[str, str]:
    """Return the names of the precisions, each with its description.

    Example:
        >>> "bf16" in available_precisions()
        True
    """
    return precisions.available()


def register_launcher(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make a launcher known by a name, for ``@distributed(launcher=name)``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `distwrap.launch.base.Launcher`; or ``"module:name"``, imported
            when it is chosen.
        description: one line, for `available_launchers`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is no word, or the factory cannot be called.

    Example:
        >>> register_launcher("fresh", "distwrap.launch.spawn:SpawnLauncher", "spawn by another name")
        >>> available_launchers()["fresh"]
        'spawn by another name'
    """
    launchers.register(name, factory, description, **defaults)


def available_launchers() -> dict[str, str]:
    """Return the launchers' names, each with its description: ours, registered ones, and those of installed packages.

    Example:
        >>> "forkserver" in available_launchers()
        True
    """
    return launchers.available()
