"""Kinds of devices: what differs between a CPU, CUDA and other accelerators. A class each, found by the device's type.

A package adds a kind by an entry point of the group ``distwrap.device_kinds``, named as torch names the type; without
one, an accelerator is treated as `torch.accelerator` treats any.
"""

import importlib
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distwrap._internals.torch import on_first_use
from distwrap.devices.cpus import allowed_memory
from distwrap.errors import OptionError
from distwrap.name_table import Registry
from distwrap.versions import ASKS_WITHOUT_DRIVER


class Vendor(NamedTuple):
    """A type of accelerator of another maker than NVIDIA, for messages; what torch does with one is asked of torch.

    Attributes:
        maker: what it is called, for messages.
        package: the one that makes torch know it, as one imports it; empty where torch does by itself.
        visible_by: the variable that says which of its devices a process sees.
        source: where that is documented.
        collectives: the module that brings its process groups' backend, where the package does not.
        has_float64: whether all of its devices compute with numbers of 64 bits, as far as torch's package is to know.
    """

    maker: str
    package: str
    visible_by: str
    source: str
    collectives: str = ""
    has_float64: bool = True


_DOCS = "https://docs.pytorch.org/docs/stable/notes"

# habana's HABANA_VISIBLE_DEVICES is read by the container runtime alone; HCCL's table of types has no float64.
VENDORS = {
    "xpu": Vendor("Intel's GPUs", "", "ZE_AFFINITY_MASK", f"{_DOCS}/get_start_xpu.html"),
    "hpu": Vendor("Intel's Gaudi", "habana_frameworks.torch", "HABANA_VISIBLE_MODULES",
        "https://docs.habana.ai/en/latest/PyTorch/", "habana_frameworks.torch.distributed.hccl", has_float64=False),
    "npu": Vendor("Huawei's Ascend", "torch_npu", "ASCEND_RT_VISIBLE_DEVICES", "https://github.com/Ascend/pytorch",
        has_float64=False),
    "mlu": Vendor("Cambricon's MLU", "torch_mlu", "MLU_VISIBLE_DEVICES", "https://github.com/Cambricon/torch_mlu"),
    "musa": Vendor("Moore Threads' GPUs", "torch_musa", "MUSA_VISIBLE_DEVICES",
        "https://github.com/MooreThreads/torch_musa"),
    "xla": Vendor("Google's TPUs", "torch_xla", "TPU_VISIBLE_CHIPS", "https://docs.pytorch.org/xla/"),
    "mps": Vendor("Apple's GPUs", "", "", f"{_DOCS}/mps.html", has_float64=False),
}  # fmt: skip


_first_uses: dict[str, str] = {}  # by type, the lines of the stack


class DeviceKind:
    """A type of device, treated as `torch.accelerator` treats any; the base of kinds that differ.

    Attributes:
        type: torch's name, as ``"xpu"``.
        visible_by: the variable that says which devices a process sees; empty where nobody knows.
        counts_untouched: whether a process may still be forked once its devices were counted.
    """

    visible_by = ""
    counts_untouched = False

    def __init__(self, type: str) -> None:
        self.type = type
        if type in VENDORS:
            self.visible_by = VENDORS[type].visible_by

    @property
    def module(self) -> Any:
        """Module of torch for this type, as `torch.xpu`; ``None`` if it has none, as for ``"xla"`` and ``"meta"``."""
        return getattr(torch, self.type, None)

    def is_built(self) -> bool:
        """Return whether torch is built for such devices, where `torch.accelerator` cannot be asked."""
        return False

    def count(self) -> int:
        """Count the devices that this process sees, without touching one where the type allows."""
        return torch.accelerator.device_count()

    def backend(self) -> str:
        """Return the process group's backend for ``backend="auto"``."""
        backends = dist.Backend.default_device_backend_map
        package = VENDORS[self.type].collectives if self.type in VENDORS else ""
        if package and self.type not in backends:
            with suppress(ImportError):
                importlib.import_module(package)
        return str(backends.get(self.type, "gloo"))

    def bound(self, device: torch.device) -> torch.device | None:
        """Return the device to which torch binds a process group; ``None`` where it cannot, as gloo is not for it."""
        return None

    def use(self, device: torch.device) -> None:
        """Make the device the current one, so that tensors and collectives without a device of their own land on it."""
        self.module.set_device(device)

    def finish(self, device: torch.device) -> None:
        """Wait until the device has done what it was given, so that a clock can be read."""
        self.module.synchronize(device)

    def unique_name(self, device: torch.device) -> str | None:
        """Return a name that no other physical device has; ``None`` where torch tells none."""
        uuid = getattr(self._properties(device), "uuid", None)
        return None if uuid is None else str(uuid)

    def processor(self, device: torch.device) -> str:
        """Return the name of the model: results are equal to the bit only between devices of one name."""
        return str(getattr(self.module, "get_device_name", lambda _: self.type)(device))

    def prevents_fork(self) -> bool:
        """Return whether this process has used the devices in a way that a forked process cannot."""
        used = bool(getattr(self.module, "is_initialized", lambda: False)())
        return used or (not self.counts_untouched and self.count() > 0)

    def watch_first_use(self) -> None:
        """Remember for `first_use` where a device is first used, without touching one."""
        on_first_use(self.module, self._remember)

    def first_use(self) -> str:
        """Return the lines of the stack that used a device first; empty where nobody has watched."""
        return _first_uses.get(self.type, "")

    def random_state(self, device: torch.device) -> torch.Tensor | None:
        """Return the state of the device's random number generator; ``None`` where it has none of its own."""
        return getattr(self.module, "get_rng_state", lambda _: None)(device)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Put a state of `random_state` back."""
        self.module.set_rng_state(state.cpu(), device)

    def streams(self) -> Any:
        """Return the module with the streams on which a copy runs beside the computation; ``None`` without such."""
        return self.module if all(hasattr(self.module, name) for name in ("Stream", "Event", "stream")) else None

    def memory(self, device: torch.device) -> int | None:
        """Return the bytes that the device has; ``None`` where torch does not tell."""
        return getattr(self.module, "mem_get_info", lambda _: (None, None))(device)[1]

    def has_float64(self, device: torch.device) -> bool:
        """Return whether the device computes with numbers of 64 bits."""
        if self.type in VENDORS and not VENDORS[self.type].has_float64:
            return False
        return bool(getattr(self._properties(device), "has_fp64", True))  # as torch.xpu tells it

    def peak_memory(self, device: torch.device) -> int | None:
        """Return the most bytes that tensors have held on the device at a time; ``None`` where torch does not tell."""
        return getattr(self.module, "max_memory_allocated", lambda _: None)(device)

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that torch uses for these devices."""
        return {}

    def unused(self) -> str | None:
        """Return a remark where there seem to be devices that torch does not see."""
        return None

    def _properties(self, device: torch.device) -> Any:
        return getattr(self.module, "get_device_properties", lambda _: None)(device)

    def _remember(self) -> None:
        from distwrap.tracebacks import frames_as_text  # for the first use of a device alone

        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        _first_uses.setdefault(self.type, frames_as_text(frames[-3:]))


class CPU(DeviceKind):
    """CPU, which is always there and never counted: any number of ranks may share it."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def count(self) -> int:
        return 0

    def backend(self) -> str:
        return "gloo"

    def processor(self, device: torch.device) -> str:
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"

    def prevents_fork(self) -> bool:
        return False

    def streams(self) -> None:
        return None

    def memory(self, device: torch.device) -> int | None:
        return allowed_memory()


device_kinds: Registry[DeviceKind] = Registry(
    "device kind",
    ("count", "backend"),
    "device_kinds",
    "distwrap.devices",
    (
        ("cpu", "kinds:CPU", "the CPU"),
        ("cuda", "accelerators:CUDA", "NVIDIA's GPUs, and AMD's through ROCm"),
        ("mps", "accelerators:MPS", "Apple's GPU, by its name alone"),
        ("xla", "accelerators:XLA", "TPUs by torch_xla, by their name alone"),
    ),
)


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the kind of a device, or of a type of device.

    Example:
        >>> kind_of("cpu").count()
        0
    """
    type = device if isinstance(device, str) else device.type
    try:
        name = device_kinds.name_of(type)
    except OptionError:
        return DeviceKind(type)
    return device_kinds.make(name)


@cache
def widest(device: torch.device) -> torch.dtype:
    """Return float64, in which sums are exact to many digits; float32 where the device has no float64.

    Example:
        >>> widest(torch.device("cpu"))
        torch.float64
    """
    return torch.float64 if kind_of(device).has_float64(device) else torch.float32


def generators_kept(device: torch.device | str) -> AbstractContextManager[None]:
    """Return a context after which the CPU's generator of random numbers, and a device's, go on where they were.

    Example:
        >>> state = torch.get_rng_state()
        >>> with generators_kept("cpu"):
        ...     _ = torch.rand(2)
        >>> torch.equal(torch.get_rng_state(), state)
        True
    """
    place = torch.device(device)
    if place.type == "cpu":
        return torch.random.fork_rng(devices=[])
    index = torch.get_device_module(place.type).current_device() if place.index is None else place.index
    return torch.random.fork_rng(devices=[index], device_type=place.type)


def kind_of_torch() -> DeviceKind:
    """Return the kind of accelerator that torch is built for, whether or not one is there; else the CPU.

    Apple's MPS counts as none: torch has no process group for it.
    """
    name = accelerator_of_torch()
    return kind_of("cpu" if name in (None, "mps") else str(name))


def accelerator_of_torch() -> str | None:
    """Return torch's name of the accelerator that it is built for, whether or not one is there. Touches none."""
    if not ASKS_WITHOUT_DRIVER and kind_of("cuda").is_built():
        return "cuda"
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # an older torch, built for an accelerator that is not there
        return None
    return None if accelerator is None else accelerator.type


def watch_first_use() -> None:
    """Remember where devices are first used, so that a refusal to fork can say it. Touches nothing."""
    kind_of_torch().watch_first_use()


def kind_that_prevents_fork() -> DeviceKind | None:
    """Return the kind whose devices this process has used so that it cannot be forked any more."""
    return next((kind for kind in (kind_of("cuda"), kind_of_torch()) if kind.prevents_fork()), None)


def unused_devices() -> list[str]:
    """Return a remark for each kind that seems to be here though torch does not see it, or that is broken."""
    remarks = []
    for name in device_kinds.names():
        try:
            remarks.append(kind_of(name).unused())
        except OptionError as error:  # a package that the program may not need
            remarks.append(str(error))
    return [remark for remark in remarks if remark]


class Given(NamedTuple):
    """A tensor, and when it is ready."""

    tensor: torch.Tensor
    moment: Any


class SideStream:
    """A stream of a device, for a thread beside the program's; on the CPU, and where a device has no streams, nothing.

    In the program's own stream its work would wait for whatever that waits for, as a collective to which other ranks
    have not come yet; and the program would wait for it.

    Args:
        device: on which the stream is.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = kind_of(device).streams()
        self._stream: Any = None if self._module is None else self._module.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Give what this thread does within a ``with`` to this stream."""
        if self._module is None:
            yield
            return
        with self._module.stream(self._stream):
            yield

    def moment(self) -> Any:
        """Return what `wait` waits for: all that the current stream of this thread was given until now."""
        if self._module is None:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def wait(self, moment: Any) -> None:
        """Let the current stream of this thread wait for a moment of another."""
        if self._module is not None and moment is not None:
            self._module.current_stream(self._device).wait_event(moment)

    def reached(self, moment: Any) -> bool:
        """Return whether the device has come to a moment."""
        return moment is None or bool(moment.query())

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that another stream has made until the current one has used it."""
        if self._module is not None:
            tensor.record_stream(self._module.current_stream(self._device))

    def given(self, tensor: torch.Tensor) -> Given:
        """Return a tensor of the current stream for one who is in another."""
        return Given(tensor, self.moment())

    def taken(self, given: Given) -> torch.Tensor:
        """Return a tensor that another stream has given, for the current one."""
        self.wait(given.moment)
        self.uses(given.tensor)
        return given.tensor
