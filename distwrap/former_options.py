"""Options that people bring from other packages: for each, what to write here, with the value that was given."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

from distwrap.former_names import REMOVED


class Instead(NamedTuple):
    """Words of distwrap for another package's option.

    Attributes:
        option: the option of `@distributed` that means the same, or nothing.
        value: its value, as code; ``"…"`` where it does not follow from what was given.
        words: one or two sentences: instead of the option, or after it.
    """

    option: str = ""
    value: str = "…"
    words: str = ""


# What distwrap finds by itself.
_NUMBERED = "Leave it out: distwrap numbers the ranks, and distwrap.rank() and local_rank() say which one this is."
_ON_ONE_NODE = "Leave it out where there is one node: a free port is found."
_ACCELERATOR = "Leave it out: distwrap takes the accelerator that torch has, and the CPU where it has none."
_ON_CPU = "Leave it out where there is no accelerator; else hide it, as by CUDA_VISIBLE_DEVICES= in the environment."
_OF_ONE_NODE = "It counts the processes of one node."


def _count(value: object, after: str = "") -> Instead:
    """Return the number of processes for a number of devices, or a list of them."""
    if isinstance(value, str) and "," in value:
        value = value.strip(" []").split(",")
    if isinstance(value, (list, tuple)):
        return _chosen([str(each).strip() for each in value if str(each).strip()])
    word = str(value).strip()
    if word in ("-1", "auto", "all", "gpu", "True"):  # in words, since 1 is True
        return Instead("nprocs", '"auto"', "It is the default.")
    if word in ("0", "False"):
        return Instead("nprocs", "1", "To compute on the CPU, hide the accelerators, as by CUDA_VISIBLE_DEVICES=.")
    if word in ("None", ""):
        return Instead(words="Leave it out, or write nprocs=1 for one process.")
    return Instead("nprocs", word if word.isdecimal() else "…", after)


def _chosen(devices: list[str]) -> Instead:
    """Return the number of processes for devices that are chosen by their numbers."""
    if not devices:
        return _count(None)
    which = f"To choose the devices, set CUDA_VISIBLE_DEVICES={','.join(devices)} in the environment."
    return Instead("nprocs", str(len(devices)), which)


def _numbers(value: object) -> Instead:
    """Return the same for an option in which a single number is a device's, and no count of them."""
    is_one = isinstance(value, (int, str)) and not isinstance(value, bool) and str(value).strip().isdecimal()
    return _chosen([str(value).strip()]) if is_one else _count(value)


def _in_all(value: object) -> Instead:
    return _count(value, _OF_ONE_NODE)


def _accelerator(value: object) -> Instead:
    word = str(value).lower()
    if word == "cpu":
        return Instead(words=_ON_CPU)
    if word in ("tpu", "xla"):
        return Instead("strategy", '"xla"')
    return Instead("strategy", f'"{word}"') if word == "mps" else Instead(words=_ACCELERATOR)


def _precision(value: object) -> Instead:
    word = "no" if value is None or value is False else str(value).lower().removeprefix("torch.")
    if word in ("no", "false", "none", "0", "32", "fp32", "float32", "32-true"):
        return Instead("precision", '"32"', "It is the default.")
    known = {"fp16": "fp16", "16": "fp16", "float16": "fp16", "16-mixed": "fp16", "half": "fp16"}
    known |= {"bf16": "bf16", "bfloat16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16-true"}
    if word in known:
        return Instead("precision", f'"{known[word]}"')
    if word in ("64", "64-true", "fp64", "float64", "double"):
        return Instead("precision", '"32"', "Types stay: a model in float64, by model.double(), computes in it.")
    if word in ("16-true", "fp16-true"):
        return Instead("precision", '"fp16"', 'Its weights stay in float32; those of "bf16-true" do not.')
    if word == "tf32":
        return Instead("precision", '"32"', 'TF32 is torch.set_float32_matmul_precision("high").')
    if word in ("fp8", "int8", "transformer-engine"):
        return Instead("precision", '"bf16"', "Nothing here computes in 8 bits.")
    return Instead("precision", '"bf16"', 'Or "fp16", on devices without bfloat16; losses are then scaled.')


def _half(precision: str) -> Callable[[object], Instead]:
    """Return the precision for a switch that is named after it, or for DeepSpeed's section of that name."""
    return lambda value: Instead("precision", f'"{precision}"') if _is_on(_enabled(value)) else _precision("no")


def _enabled(value: object) -> object:
    return value.get("enabled", True) if isinstance(value, dict) else value


def _init_method(value: object) -> Instead:
    start = "tcp://"
    if isinstance(value, str) and value.startswith(start):
        return Instead("rdzv_endpoint", f'"{value[len(start) :]}"', _ON_ONE_NODE)
    return Instead(words="Leave it out: the variables of a launcher are read by themselves.")


def _port(value: object) -> Instead:
    return Instead("rdzv_endpoint", f'"HOST:{value if _is_plain(value) else "PORT"}"', _ON_ONE_NODE)


def _address(value: object) -> Instead:
    return Instead("rdzv_endpoint", f'"{value if _is_plain(value) else "HOST"}:29400"', _ON_ONE_NODE)


def _same(option: str, after: str = "") -> Callable[[object], Instead]:
    """Return the option that takes the same value under another name."""
    return lambda value: Instead(option, _as_code(value), after)


def _strategy(name: str) -> Callable[[object], Instead]:
    off = Instead(words="Leave it out, for a strategy that is not used.")
    return lambda value: off if value is None or value is False or value == "" else Instead("strategy", f'"{name}"')


def _words(text: str) -> Callable[[object], Instead]:
    """Return a sentence, in which VALUE is what was given."""
    return lambda value: Instead(words=text.replace("VALUE", _as_code(value)))


def _of_ddp(name: str) -> Callable[[object], Instead]:
    return _words(f"It belongs to wrap_model(model, {name}=VALUE), or to strategy=DDPStrategy({name}=VALUE).")


def _of_fsdp(name: str) -> Callable[[object], Instead]:
    return _words(f"It belongs to strategy=FSDPStrategy({name}=VALUE).")


_DDP = ("find_unused_parameters", "static_graph", "bucket_cap_mb", "gradient_as_bucket_view", "broadcast_buffers")
_FSDP = ("tensor_parallel", "shard", "wrap", "cpu_offload")

_TABLE: dict[str, Callable[[object], Instead]] = {
    # How many processes: Lightning, torchrun, mp.spawn, Ray Train, DataParallel.
    **dict.fromkeys(("devices", "gpus", "num_gpus", "n_gpus", "ngpus", "n_gpu", "num_devices"), _count),
    **dict.fromkeys(("gpu", "gpu_ids", "device_ids", "cuda_visible_devices"), _numbers),
    **dict.fromkeys(("nproc_per_node", "nprocs_per_node"), _count),
    **dict.fromkeys(("procs", "num_procs", "nranks", "processes", "gpus_per_node", "ntasks_per_node"), _count),
    **dict.fromkeys(("world_size", "num_processes", "np", "ntasks"), _in_all),
    "num_workers": lambda value: _count(value, "Workers that load data belong to the DataLoader."),
    # Where they compute.
    "accelerator": _accelerator,
    "device": _accelerator,
    "use_gpu": lambda value: Instead(words=_ACCELERATOR if _is_on(value) else _ON_CPU),
    "use_cuda": lambda value: Instead(words=_ACCELERATOR if _is_on(value) else _ON_CPU),
    "cpu": lambda value: Instead(words=_ON_CPU if _is_on(value) else _ACCELERATOR),
    # Nodes.
    **dict.fromkeys(("num_nodes", "nodes", "n_nodes", "num_machines", "hosts", "num_hosts"), _same("nnodes")),
    **dict.fromkeys(("machine_rank", "node_id", "nodeid"), _same("node_rank")),
    **dict.fromkeys(("master_port", "main_process_port"), _port),
    **dict.fromkeys(("master_addr", "main_process_ip"), _address),
    **dict.fromkeys(("init_method", "dist_url"), _init_method),
    **dict.fromkeys(("rank", "local_rank", "global_rank"), _words(_NUMBERED)),
    **dict.fromkeys(("rdzv_backend", "rdzv_id", "standalone"), _words("Leave it out: nodes meet at rdzv_endpoint.")),
    # Precision.
    **dict.fromkeys(("mixed_precision", "amp", "use_amp", "use_fp16", "dtype", "torch_dtype", "amp_dtype"), _precision),
    "fp16": _half("fp16"),
    "bf16": _half("bf16"),
    "half": _half("fp16"),
    "amp_backend": _words('Leave it out: precision="fp16" and "bf16" are torch\'s own autocast.'),
    # Strategies, backends and starts under other names.
    "plugins": _words("Leave it out: clusters are found by themselves, and precision= and strategy= take objects too."),
    **dict.fromkeys(("fsdp", "fsdp_plugin", "fsdp_config"), _strategy("fsdp")),
    **dict.fromkeys(("deepspeed", "deepspeed_plugin", "deepspeed_config"), _strategy("deepspeed")),
    "distributed_backend": _same("strategy"),
    **dict.fromkeys(("dist_backend", "process_group_backend", "ddp_backend"), _same("backend")),
    **dict.fromkeys(("start_method", "mp_start_method", "mp_context"), _same("launcher")),
    **dict.fromkeys(("random_seed", "manual_seed", "set_seed"), _same("seed")),
    **dict.fromkeys(("tee", "redirects"), _words('Write log_dir="logs": each rank\'s output goes there, and on.')),
    # What belongs elsewhere here.
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps", "accumulation_steps"),
        _words("It belongs to the loop: for batch, window in accumulate(loader, VALUE, model)."),
    ),
    **dict.fromkeys(
        ("gradient_clip_val", "max_grad_norm", "max_norm", "grad_clip", "gradient_clipping"),
        _words("It belongs to the loop: optimizer_step(optimizer, max_norm=VALUE)."),
    ),
    **{name: _of_ddp(name) for name in _DDP},
    **{name: _of_fsdp(name) for name in _FSDP},
    **dict.fromkeys(
        ("sync_batchnorm", "sync_bn", "convert_syncbn"),
        _words("It belongs to wrap_model(model, sync_batchnorm=VALUE)."),
    ),
    "batch_size": _words("It belongs to the DataLoader: its batch size is that of each rank."),
    "split_batches": _words('It belongs to shard_loader(loader, batch_size="global").'),
    "even_batches": _words('It belongs to shard_loader(loader, mode="pad"), or mode="exact".'),
    "dispatch_batches": _words('It belongs to shard_loader(loader, split="dispatch"), for a stream.'),
    **dict.fromkeys(
        ("use_distributed_sampler", "replace_sampler_ddp"),
        _words("Leave it out: shard_loader(loader) divides a loader."),
    ),
    **dict.fromkeys(
        ("log_with", "logger", "loggers"), _words("Leave it out: in the loop, distwrap.log(metrics) logs on rank 0.")
    ),
    **dict.fromkeys(
        ("max_epochs", "num_epochs", "epochs", "max_steps", "callbacks"), _words("It belongs to the loop.")
    ),
}

ENVIRONMENT_PREFIX = "DISTWRAP_"


def for_option(name: str, value: object) -> str:
    """Return what to write for an option of another package, or one that is not here any more; empty of any other.

    Example:
        >>> for_option("devices", 4)
        'Write nprocs=4.'
        >>> for_option("mixed_precision", "no")
        'Write precision="32". It is the default.'
    """
    if name in REMOVED["option"]:
        return REMOVED["option"][name]
    instead = _look_up(name, value)
    return "" if instead is None else _sentence(instead, f"{instead.option}={instead.value}")


def for_variable(variable: str, text: str, variables: Container[str]) -> str:
    """Return what to write for a variable that is named after an option of another package, or nothing.

    Args:
        variable: its name, which begins with ``DISTWRAP_``.
        text: its value.
        variables: those that there are.

    Example:
        >>> for_variable("DISTWRAP_DEVICES", "4", {"DISTWRAP_NPROCS"})
        'Write DISTWRAP_NPROCS=4.'
    """
    name = variable.removeprefix(ENVIRONMENT_PREFIX)
    if name.lower() in REMOVED["option"]:
        return REMOVED["option"][name.lower()]
    value: object = int(text) if text.removeprefix("-").isdecimal() else text
    instead = _look_up(name, value)
    if instead is None:
        return ""
    named = f"{ENVIRONMENT_PREFIX}{instead.option.upper()}"
    return _sentence(instead, f"{named}={instead.value.strip(chr(34))}" if named in variables else "")


def _look_up(name: str, value: object) -> Instead | None:
    row = _TABLE.get(name.lower().replace("-", "_"))
    return None if row is None else row(value)


def _sentence(instead: Instead, setting: str) -> str:
    return " ".join(filter(None, (f"Write {setting}." if instead.option and setting else "", instead.words)))


def _as_code(value: Any) -> str:
    """Return a plain value as code, and three dots for any other."""
    if isinstance(value, str):
        return f'"{value}"' if len(value) < 40 and value.isprintable() else "…"
    return repr(value) if _is_plain(value) else "…"


def _is_plain(value: object) -> bool:
    return type(value) in (int, float, bool) or (isinstance(value, str) and len(value) < 40)


def _is_on(value: object) -> bool:
    return value is True or str(value).lower() in ("1", "true", "yes", "on")
