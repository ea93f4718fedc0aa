"""A strategy on a named type of device, for Lightning's names such as ``hpu_parallel`` and ``mps``."""

import importlib
import importlib.util
from contextlib import suppress

import torch

from distwrap.devices.kinds import VENDORS, accelerator_of_torch
from distwrap.errors import OptionError
from distwrap.protocols import Strategy


def of_device(type: str, strategy: str = "ddp") -> Strategy:
    """Return a strategy, if torch has devices of this type.

    The vendor's package is imported if it is installed, and torch has not imported it.

    Args:
        type: torch's name of the device type, as ``"hpu"``.
        strategy: the name of the strategy.

    Raises:
        OptionError: torch has no such devices here; the message says which package has them, and what to use.

    Example:
        >>> of_device("cpu", "single")
        SingleStrategy()
    """
    from distwrap.registry import strategies  # imports this file

    made = strategies.make(strategy)
    if type == "cpu":
        return made
    if type == "xla" and _is_installed("torch_xla") and accelerator_of_torch() != type:
        if strategy not in ("ddp", "single"):
            raise OptionError(f"strategy={strategy!r} on torch_xla's devices: only 'ddp' runs there.")
        from distwrap.strategies.xla import XLAStrategy

        return XLAStrategy()
    package = VENDORS[type].package if type in VENDORS else ""
    if package and accelerator_of_torch() != type and _is_installed(package):
        importlib.import_module(package)
    found = accelerator_of_torch()
    if found != type or not torch.accelerator.is_available():
        raise OptionError(_missing(type, strategy, found))
    if type == "mps":
        made.device = torch.device(type)
    return made


def _is_installed(package: str) -> bool:
    with suppress(ModuleNotFoundError):  # the parent package is missing
        return importlib.util.find_spec(package) is not None
    return False


def _missing(type: str, strategy: str, found: str | None) -> str:
    known = VENDORS.get(type)
    variable = known.visible_by if known else ""
    if known and known.package and not _is_installed(known.package):
        why = f"the package that brings them, {known.package}, is not installed ({known.source})"
    elif found == type:
        why = f"it sees none{variable and f': look at {variable}'}"
    else:
        why = "this torch is built for " + (repr(found) if found else "no accelerator")
    whose = f", {known.maker}," if known else ""
    needs = f"strategy={strategy!r} on devices of type {type!r}{whose} needs torch to have some, and {why}"
    return f"{needs}. Write strategy={strategy!r}, which takes the accelerator that torch has, or the CPU."
