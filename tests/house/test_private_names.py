"""The private names that _internals relies on are there, and distwrap is imported without any of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
import platform
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import distwrap
from distwrap._internals import python as python_names, torch as torch_names, torch_data
from distwrap.errors import LoaderError, ModelError
from distwrap.versions import TORCH_RELEASE
from tests.house.private_names import TABLE
from tests.interpreters import run_python
from tests.slow import slow

# torch's own extension points: to override them is what they are for.
OVERRIDDEN = {"_apply", "_load_from_state_dict"}
# By these torch calls a process group that is made in Python.
OVERRIDDEN |= {"_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing", "_device_types"}
OVERRIDDEN |= {"_set_group_name", "_set_group_desc", "_source_rank", "_get_backend"}
OVERRIDDEN |= {"_get_sequence_number_for_group"}
OVERRIDDEN |= {"_is_protocol", "_is_runtime_protocol", "_backward_cls"}  # typing and torch make them themselves


def test_no_class_overrides_a_private_method_by_chance() -> None:
    """A private method of a class of ours replaces none of torch's or Python's, but for torch's extension points."""
    replaced = {
        (cls.__name__, name)
        for cls in _classes()
        for name in vars(cls)
        if name.startswith("_") and not name.startswith("_abc_") and not name.endswith("_")
        if any(name in vars(base) for base in cls.__mro__ if not base.__module__.startswith("distwrap"))
    }
    assert not {each for each in replaced if each[1] not in OVERRIDDEN}


def _classes() -> Iterator[type]:
    """Yield the classes of the package, but for those of _internals."""
    for found in pkgutil.walk_packages(distwrap.__path__, "distwrap."):
        if not found.name.endswith("__main__") and "_internals" not in found.name:
            classes = vars(importlib.import_module(found.name)).values()
            yield from (cls for cls in classes if isinstance(cls, type) and cls.__module__ == found.name)


# What there is


@pytest.mark.parametrize("of_datasets", [False, slow(True, why="imports datasets")], ids=["others", "datasets"])
@pytest.mark.slow("others of its kind are in make test")
def test_this_version_has_each(of_datasets: bool) -> None:
    """Each name is in the installed version of its owner; where it is not, _internals is to name that version."""
    gone = []
    for each in TABLE:
        owner = each.module.partition(".")[0]
        if (owner == "datasets") is not of_datasets or importlib.util.find_spec(owner) is None:
            continue
        if not each.is_in(TORCH_RELEASE):
            continue
        try:
            eval(each.expression, {**vars(importlib.import_module(each.module))})
        except (AttributeError, NameError, ImportError) as error:
            gone.append(f"{each.module}:{each.expression} ({error}); without it: {each.without}")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, cloudpickle {_version('cloudpickle')}"
    assert not gone, "\n".join([f"Gone in {versions}:", *gone])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# What happens without

IN_C = {"_version", "queue_callback", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"}

HIDE_EACH = """
import importlib, json, os, pkgutil, sys
import distwrap

def import_all():
    for found in pkgutil.walk_packages(sys.modules["distwrap"].__path__, "distwrap."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)

import_all()  # so that torch has imported what distwrap makes it import; what torch itself needs is its own affair
for name in [name for name in sys.modules if name.partition(".")[0] == "distwrap"]:
    del sys.modules[name]

def hide(module, owner, name):
    if any(part.startswith("_") and part != "__init__" for part in module.split(".")) and module != "torch._C":
        parent, _, last = module.rpartition(".")
        sys.modules[module] = None
        vars(sys.modules[parent]).pop(last, None)
    else:
        place = importlib.import_module(module)
        delattr(eval(owner, vars(place)) if owner else place, name)

def imported_without(names):
    sys.stdout.flush()
    if os.fork() == 0:
        said = []
        try:
            for module, owner, name in names:
                try:
                    hide(module, owner, name)
                    said.append(f"{name} imported")
                except (AttributeError, TypeError) as error:
                    said.append(f"{name} failed: {error}")
            import distwrap
            import_all()
            print(*said, sep="\\n", flush=True)
            os._exit(0)
        except BaseException as error:
            if len(names) == 1:
                print(names[0][2], "failed:", type(error).__name__, error, flush=True)
            os._exit(1)
    return os.wait()[1] == 0

hidden = json.loads(sys.argv[1])
for start in range(0, len(hidden), 10):  # one by one only where a group fails
    group = hidden[start : start + 10]
    if not imported_without(group):
        for each in group:
            imported_without([each])
"""


@pytest.mark.slow("imports the package again and again")
def test_importing_distwrap_needs_none_of_them() -> None:
    """With any of the names hidden, distwrap and all of its modules can be imported."""
    pytest.importorskip("cloudpickle")
    here = [each for each in TABLE if each.can_be_hidden and each.is_in(TORCH_RELEASE)]
    here = [each for each in here if importlib.util.find_spec(each.module.partition(".")[0]) is not None]  # of engines
    hidden = list(dict.fromkeys((each.module, each.owner, each.name) for each in here))
    done = run_python("-c", HIDE_EACH, json.dumps(hidden), timeout=300)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert set(told) == {name for _, _, name in hidden}
    # Names of a class that is written in C cannot be hidden; nothing looks at them at import.
    assert {name for name, result in told.items() if result != "imported"} <= IN_C, told


def test_an_overflow_without_the_scalers_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the scaler's own table, the gradients themselves show an overflow."""
    monkeypatch.delattr(torch.amp.GradScaler, "_found_inf_per_device")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, nn.Parameter(torch.ones(1))], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for gradient, overflowed in ((1.0, False), (float("inf"), True), (float("nan"), True)):
        weight.grad = torch.tensor([1.0, gradient])
        assert torch_names.has_overflowed(scaler, optimizer) is overflowed


def test_what_cannot_be_done_without_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a feature is lost with a name, its use raises an error that names it and says what to do."""
    model: Any = nn.Module()
    model.reducer = None
    monkeypatch.delattr(nn.parallel.DistributedDataParallel, "_pre_forward")
    with pytest.raises(ModelError, match="_pre_forward"):
        torch_names.step_of_ddp("_pre_forward")(model)
    with pytest.raises(ModelError, match="_rebuild_buckets"):
        torch_names.prepare_another_average(model)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)
    monkeypatch.setattr("distwrap._internals.torch_data.get_worker_info", lambda: None)
    with pytest.raises(LoaderError, match="worker's information"):
        torch_data.show_worker_info(3)
    with pytest.raises(LoaderError, match="makes its iterator"):
        torch_data.check_iterator_hook(object)  # type: ignore[arg-type]


def test_quiet_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing depends on a name but a report or a little time, its loss is not noticed."""
    model: Any = nn.Module()
    model.reducer = None
    assert torch_names.is_averaging(model, otherwise=True)
    torch_names.remove_ddp_hooks(model)
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert torch_names.current_backward() is None
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    called: list[int] = []
    torch_names.after_backward(lambda: called.append(1))
    assert called == [1]
    monkeypatch.delattr(torch._C._distributed_c10d, "_resolve_process_group")
    assert torch_names.size_of_group("0") is None
    assert torch_data.batches_given(iter([])) is None
    monkeypatch.delattr(torch.utils.data.dataloader, "_BaseDataLoaderIter")
    assert torch_data.held_iterators(torch.utils.data.DataLoader([])) == []
    monkeypatch.delattr(torch.nn.modules.batchnorm, "_NormBase")
    assert torch_names.norm_classes() == ()
    assert torch_names.has_scaled(object())  # type: ignore[arg-type]
    monkeypatch.delattr(sys, "_current_frames")
    assert python_names.frames_of_threads() == {}
    monkeypatch.delattr("subprocess._args_from_interpreter_flags")
    assert python_names.interpreter_flags() == []
    monkeypatch.delattr("weakref.finalize._registry")
    python_names.stop_finalizers_at_exit()
    monkeypatch.delattr("threading._shutdown")
    assert not python_names.run_interpreter_end()
    monkeypatch.delattr("atexit._clear")
    assert not python_names.can_forget_exit_handlers()


def test_the_generators_memory_is_known_or_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look sees each draw, and what is put back is drawn again; without the name, nothing is read or put."""
    memory = python_names.GeneratorMemory()
    assert memory.is_known
    for draw in (random.random, numpy.random.rand):
        before = memory.read()
        assert memory.read() == before
        drawn = draw()
        assert memory.read() != before
        memory.write(before)
        assert draw() == drawn
    monkeypatch.delattr(random, "_inst")
    assert not python_names.GeneratorMemory().is_known
