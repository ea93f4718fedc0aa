"""``python -m distwrap estimate``: the memory of a rank under each strategy, before anything is allocated."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distwrap.checks import AT_LEAST_ONE, as_bytes
from distwrap.devices.selection import visible_devices
from distwrap.errors import ModelError, OptionError
from distwrap.model.empty import init_empty
from distwrap.precision import InPrecision
from distwrap.strategies.activations import activation_bytes, input_of
from distwrap.strategies.auto import memory_of
from distwrap.strategies.estimate import Need, estimate, fit, optimizer, recommended
from distwrap.wording import as_size, first_line, unknown_name

_COLUMNS = ("parameters", "gradients", "buckets", "optimizer", "gathered", "total")


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "estimate",
        description="Makes a model on the meta device, where it takes no memory, and shows what each strategy would "
        "need. Exit code: 0 where one of ddp to fsdp fits, 1 where none does, 2 where it cannot be estimated.",
    )
    parser.add_argument("model", metavar="MODULE:MODEL", help="the class of the model, or a function that returns it")
    parser.add_argument("--args", nargs="+", default=[], metavar="VALUE", help="arguments for the class or function")
    parser.add_argument("--kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="keyword arguments for it")
    parser.add_argument("--nprocs", type=int, help="ranks on each node; by default one for each visible device, or 1")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes; by default 1")
    parser.add_argument("--precision", default="32", help="the precision of @distributed; by default 32")
    parser.add_argument(
        "--optimizer",
        default="adamw",
        help="an optimizer of torch.optim, as 'sgd(momentum=0.9)', or module:Class; by default adamw",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        metavar="SHAPE",
        help="the shape of each input of one rank, as 32x128:int64, to measure activations too",
    )
    parser.add_argument(
        "--device-memory", metavar="80GB", help="memory of each rank's device; by default that of the devices here"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Estimate, and print the table; return the exit code."""
    devices = visible_devices()
    nprocs = AT_LEAST_ONE("--nprocs", max(1, devices.count) if given.nprocs is None else given.nprocs)
    ranks = nprocs * AT_LEAST_ONE("--nnodes", given.nnodes)
    device = torch.device(devices.kind)
    in_precision = InPrecision(given.precision, device)
    make = optimizer(given.optimizer)
    if given.device_memory is None:
        memory = memory_of(device, nprocs)
        where = f"the CPU's memory over {nprocs} ranks" if device.type == "cpu" else f"{devices.count} {device.type}"
    else:
        memory, where = as_bytes("--device-memory", given.device_memory), "as given"
    batch = [input_of(each) for each in given.batch or ()]
    model = model_of(given.model, [_value(text) for text in given.args], _kwargs(given.kwargs))
    needs = estimate(model, ranks, nprocs, in_precision, make)
    others = [
        Need("tp", why_not="as its plan= divides the layers"),
        Need("pipeline", why_not="as its stages divide blocks"),
    ]
    activations, remark = _activations(in_precision.precision.weights(model), batch, in_precision)
    choice = recommended(needs, memory, activations)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(
        f"{given.model}: {numbers:,} parameters{'' if trained == numbers else f', {trained:,} of them trained'}; "
        f"{ranks} rank{'s' * (ranks > 1)}, precision {given.precision}, {given.optimizer}\n\n"
        f"{table([*needs, *others], memory, activations)}\n\n"
        f"Activations: {remark}\n"
        f"Memory of a rank: {as_size(memory)} ({where})\n"
        f"Recommended: strategy={choice.strategy!r}: {choice.why}."
    )
    return 0 if choice.fits else 1


def table(needs: Sequence[Need], memory: int, activations: int | None = None) -> str:
    """Lay out what each strategy needs in columns.

    Example:
        >>> print(table([Need("ddp", 4000, 4000, 4000, 8000), Need("tp", why_not="by a plan")], 10**6))
        strategy  parameters  gradients  buckets  optimizer  gathered    total
        ddp           4.0 kB     4.0 kB   4.0 kB     8.0 kB         -  20.0 kB  fits
        tp        -  by a plan
    """
    rows = [
        [as_size(size) if (size := getattr(need, name)) else "-" for name in _COLUMNS] if not need.why_not else []
        for need in needs
    ]
    first = max(len(need.strategy) for need in (*needs, Need("strategy")))
    widths = [max(len(row[at]) for row in (_COLUMNS, *rows) if row) for at in range(len(_COLUMNS))]

    def line(name: str, cells: Sequence[str], end: str) -> str:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([name.ljust(first), *padded, end]).rstrip()

    lines = [line("strategy", _COLUMNS, "")]
    for need, row in zip(needs, rows, strict=True):
        why_not = f"{need.strategy.ljust(first)}  -  {need.why_not}"
        lines.append(line(need.strategy, row, fit(need, memory, activations)) if row else why_not)
    return "\n".join(lines)


def model_of(place: str, args: Sequence[Any], kwargs: dict[str, Any]) -> nn.Module:
    """Make the model of ``"module:class or function"`` on the meta device.

    Raises:
        OptionError: there is nothing of this name, or it takes other arguments.
        ModelError: it cannot be made without numbers, or is no model.
    """
    name, _, attribute = place.partition(":")
    if not attribute:
        raise OptionError(f"{place!r} does not name a model: write module:Model, as my_package.nets:Net.")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(name)
    except Exception as error:
        hint = f" Write the module's name, as {name[:-3].replace('/', '.')}." if name.endswith(".py") else ""
        raise OptionError(f"cannot import {name!r}: {type(error).__name__}: {first_line(error)}.{hint}") from error
    finally:
        sys.path.remove(os.getcwd())
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
            raise OptionError(unknown_name(f"model of {name!r}", part, known))
        found = getattr(found, part)
    if not callable(found):
        raise OptionError(f"{place} is a {type(found).__name__}: give a class, or a function that returns the model.")
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a function in C
        signature = inspect.Signature.from_callable(lambda *args, **kwargs: None)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise OptionError(
            f"{place} cannot be called so: {error}. Its signature is {attribute}{signature}; give them as "
            "--args 3 or --kwargs width=3."
        ) from error
    try:
        with init_empty():
            model = found(*args, **kwargs)
    except Exception as error:
        raise ModelError(
            f"{place} cannot be made on the meta device, where tensors have no numbers: {type(error).__name__}: "
            f"{first_line(error)}. Give a function that only builds the model, and neither loads nor moves it."
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{place} has returned a {type(model).__name__}, not an nn.Module.")
    return model


def _activations(model: nn.Module, batch: list[torch.Tensor], in_precision: InPrecision) -> tuple[int | None, str]:
    """Return the bytes of activations, if they can be measured, and a remark on them."""
    if not batch:
        return None, "not in it; --batch measures them"
    if not _is_without_autocast(in_precision):
        return None, "not in it: autocast does nothing on the meta device, so they would be those of float32"
    try:
        found = activation_bytes(model, list(in_precision.inputs(batch)))
    except Exception as error:  # noqa: BLE001 - a forward of the user's may do anything
        return None, f"not in it: a forward on the meta device raised {type(error).__name__}: {first_line(error)}"
    return found, f"{as_size(found)} besides, for the backward of one batch, under ddp to fsdp"


def _is_without_autocast(in_precision: InPrecision) -> bool:
    with in_precision.context():
        return not torch.is_autocast_enabled(in_precision.device.type)


def _kwargs(given: Sequence[str]) -> dict[str, Any]:
    for text in given:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            raise OptionError(f"--kwargs {text}: write it as key=value.")
    return {key: _value(text) for key, _, text in (each.partition("=") for each in given)}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
