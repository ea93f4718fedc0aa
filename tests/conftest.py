"""Every test is held to leave nothing behind, and every launch in it too."""

from __future__ import annotations

import compileall
import gc
import getpass
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

import distwrap
from distwrap.devices.selection import visible_devices
from distwrap.group import world
from distwrap.launch import base, forkserver as server
from distwrap.options import TEST_RANKS
from distwrap.versions import TORCH
from tests import costs, interpreters, orphans
from tests.accelerator.build import build, missing
from tests.accelerator.elsewhere import close, placed
from tests.costs import pytest_addoption, pytest_runtest_makereport, pytest_runtest_protocol  # noqa: F401 - hooks
from tests.forked_commands import spawned_as_forks
from tests.imported_once import import_in_server
from tests.nightly import ROWS
from tests.slow import nightly
from tests.snapshot import Snapshot, random_state

MAIN = os.getpid()

os.environ["DISTWRAP_QUIET"] = "1"
os.environ["DISTWRAP_TRACEBACK"] = "full"  # a test of this package fails because of the frames that users need not see
# What torch.compile does at its first use: in torch 2.6 it sets this variable, and starts processes that stay.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch 2.6 sets it where CUDA is asked for, and is not there
# torch asks the name server who 127.0.0.1 is, at each connection to a store: 5 s where an answer is lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
settings.register_profile("distwrap", deadline=None)  # an example may take as long as a busy machine needs
settings.load_profile("distwrap")


def pytest_configure(config: pytest.Config) -> None:
    """Make ready what all tests share.

    Byte code is written as pip does, also where PYTHONDONTWRITEBYTECODE is set: a thousand interpreters read it. And
    Ctrl-C and Ctrl-\\ are heard, which programs ignore that are started from a script in the background.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and SIGHUP, which nohup ignores
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    orphans.adopt_orphans()
    costs.configure(config)
    if not hasattr(config, "workerinput"):
        for folder in (Path(distwrap.__file__).parent, Path(__file__).parent):
            compileall.compile_dir(folder, quiet=2)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Start once what stays on purpose: interpreters to fork, the pipe of torch's store, multiprocessing's tracker."""
    interpreters.interpreter()
    import_in_server("hypothesis", "pytest")  # as files of tests do
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first one imports torch's compiler, which sets a variable
    server.warm_server()
    resource_tracker.ensure_running()  # multiprocessing's, which comes with the first process that is spawned
    if multiprocessing.get_start_method() == "forkserver":  # since Python 3.14
        multiprocessing.set_forkserver_preload(["torch"])  # else each worker of a loader imports it
        forkserver.ensure_running()
    if visible_devices().count and "PRETEND_VISIBLE_DEVICES" not in os.environ:
        square = torch.rand(8, 8, device=torch.accelerator.current_accelerator())  # opens files of the driver's
        (square @ square).sum().item()
    gc.collect()
    gc.freeze()  # what is imported now is not looked through again
    costs.begin()  # the first test pays for none of this


@pytest.fixture(scope="session", autouse=True)
def _spawned_ranks_are_forks(_warm: None) -> Iterator[None]:
    """Start no interpreter for a rank of ``launcher="spawn"``; tests/process/ has real ones."""
    with spawned_as_forks():
        yield


@pytest.fixture(autouse=True)
def _tests_leave_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a variable, thread, process, file, world or process group."""
    before = Snapshot.take()
    yield
    left = before.differences()
    orphans.kill_orphans(Snapshot.take().children - before.children)
    assert not left, left
    assert not dist.is_initialized()
    assert world.active_world() is None


@pytest.fixture(autouse=True)
def _launches_leave_nothing_behind(_tests_leave_nothing_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the caller before and after each launch: environment, threads, children, files, random numbers."""
    launch = base.launch

    def checked(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != MAIN or threading.current_thread() is not threading.main_thread():
            return launch(*args, **kwargs)
        before, random_before = Snapshot.take(), random_state()
        try:
            return launch(*args, **kwargs)
        finally:
            assert random_state() == random_before
            left = before.differences()
            assert not left, left

    monkeypatch.setattr(base, "launch", checked)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a test out of `make test` that does not say why, or that no row of `make nightly` runs.

    What needs an accelerator is left out of `make test` too: a compiler works a minute for the pretended one.
    """
    if item.get_closest_marker("gpu"):
        item.add_marker(pytest.mark.slow("on pretended devices"))
    for marker in item.iter_markers("slow"):
        if not [word for word in marker.args if isinstance(word, str) and word.strip()]:
            raise pytest.UsageError(f'{item.nodeid} is slow without a reason: @pytest.mark.slow("500 launches")')
    for marker in item.iter_markers("nightly"):
        row = ROWS.get(marker.kwargs.get("row", ""))
        if row is None or row.words or not item.nodeid.startswith(row.folders) or not marker.kwargs.get("why"):
            example = '@pytest.mark.nightly(row="products", why="two ranks show it")'
            raise pytest.UsageError(f"{item.nodeid} is of no row of tests/nightly.py that would run it: {example}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let a test that needs an accelerator run once for each number of devices that it names, or with one.

    Of what one or two devices show, four are a row of `make nightly`: each number is a pytest of its own.
    """
    marker = metafunc.definition.get_closest_marker("gpu")
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if marker is not None and not any("devices" in names for names in named):
        if "devices" not in metafunc.fixturenames:
            metafunc.fixturenames.append("devices")
        counts = [
            nightly(each, row="accelerator", why="fewer devices show it") if each > 2 else each
            for each in marker.args or (1,)
        ]
        metafunc.parametrize("devices", counts, ids=lambda count: f"{count} devices")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Find a place for what needs an accelerator."""
    have = visible_devices().count
    if not have and any(item.get_closest_marker("gpu") for item in items):
        why = missing()
        if why is None:
            build()
        placed(items, why)
    for item in items:
        real = item.get_closest_marker("processes")
        if real is not None and os.environ.get(TEST_RANKS) == "simulate":
            item.add_marker(pytest.mark.skip(reason=f"not for simulated ranks: {real.args[0]}"))
        elif item.get_closest_marker("cuda") and not torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason="needs NVIDIA's GPU, and this machine has none"))
        elif have and (gpu := item.get_closest_marker("gpu")) and item.callspec.params["devices"] > have:
            pretended = "PRETEND_VISIBLE_DEVICES" in os.environ  # another pytest pretends more of them
            if pretended or gpu.kwargs.get("separate") or item.callspec.params["devices"] > 2 * have:
                item.add_marker(pytest.mark.skip(reason=f"needs more accelerators than the {have} of this machine"))
            else:
                os.environ["DISTWRAP_SHARE_DEVICES"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Skip a test whose fixtures need a newer torch, in the words of the package's own refusal."""
    with _refusals_skip():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that needs a newer torch, in the words of the package's own refusal."""
    with _refusals_skip():
        return (yield)


@contextmanager
def _refusals_skip() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        refusal = re.search(rf"[^\n:]* needs torch [\d.]+ or newer, and this is {re.escape(TORCH)}", str(error))
        if refusal is None:
            raise
        pytest.skip(refusal[0].strip())


def pytest_sessionfinish() -> None:
    """End the pytests on pretended devices, and the interpreter whose forks are programs."""
    close()
    interpreters.close()
    costs.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """On workers let the files that take long come first, so that none of them is left for the end."""
    if hasattr(session.config, "workerinput"):
        weights: Counter[str] = Counter()
        for item in session.items:
            weights[_scope(item.nodeid)] += 20 if item.get_closest_marker("slow") else 1
        session.items.sort(key=lambda item: -weights[_scope(item.nodeid)])


def _scope(nodeid: str) -> str:
    """Return the file of a test, or the folder whose files share daemons, or pytests on pretended devices."""
    folder = next((each for each in ("tests/clusters/", "tests/accelerator/") if nodeid.startswith(each)), "")
    return folder or nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a scope on one worker: a file's, which share warm ranks, or a folder's."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_report_header() -> str:
    return f"distwrap: torch {torch.__version__}, {os.cpu_count()} CPUs, {shutil.disk_usage('/').free >> 30} GiB free"
