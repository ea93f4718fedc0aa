from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from distwrap.devices.cpus import _quota, choose_threads, share_threads
from distwrap.devices.kinds import kind_of
from distwrap.devices.selection import (
    Devices,
    check_not_shared,
    choose_backend,
    choose_device,
    choose_nprocs,
    visible_devices,
)
from distwrap.environments import Placement
from distwrap.errors import OptionError, PlacementError

NONE = Devices("cpu", 0)
TWO = Devices("cuda", 2)
FOUR = Devices("xpu", 4)


def local(rank: int, size: int) -> Placement:
    return Placement(rank, size, local_rank=rank, local_world_size=size)


@pytest.mark.parametrize(("devices", "nprocs"), [(NONE, 1), (TWO, 2), (FOUR, 4)])
def test_auto_is_a_process_an_accelerator(devices: Devices, nprocs: int) -> None:
    """auto starts one process for each accelerator, and one where there are none."""
    assert choose_nprocs("auto", devices) == nprocs


@pytest.mark.parametrize("nprocs", [1, 2])
def test_as_many_processes_as_asked(nprocs: int) -> None:
    """A number that the devices allow is taken."""
    assert choose_nprocs(nprocs, TWO) == nprocs


def test_the_cpu_sets_no_limit() -> None:
    """Without accelerators any number of processes may share the CPU."""
    assert choose_nprocs(64, NONE) == 64


def test_more_processes_than_devices_are_refused() -> None:
    """More processes than devices is an error before any process starts, with both numbers and the ways out."""
    with pytest.raises(OptionError, match=r"nprocs=3, but this node shows 2 cuda device.*at most 2, hide"):
        choose_nprocs(3, TWO)


def test_ranks_that_share_take_turns_on_the_devices() -> None:
    """Where the word is said, the fifth of five ranks on two devices is on the first, and gloo is between them."""
    assert [choose_device(local(rank, 5), TWO, shared=True).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert choose_backend("auto", torch.device("cuda", 0), shared=True) == "gloo"
    assert choose_backend("gloo", torch.device("cuda", 0), shared=True) == "gloo"
    with pytest.raises(OptionError, match="NCCL takes no two ranks on one GPU"):
        choose_backend("cpu:gloo,cuda:nccl", torch.device("cuda", 0), shared=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_the_device_of_its_local_rank(rank: int) -> None:
    """Each rank of a machine has a device of its own."""
    assert choose_device(local(rank, 2), TWO) == torch.device("cuda", rank)
    assert choose_device(local(rank, 2), FOUR) == torch.device("xpu", rank)


def test_the_local_rank_counts_on_the_second_machine() -> None:
    """A rank of the second machine takes the device of its local rank, not of its rank."""
    place = Placement(3, 4, local_rank=1, local_world_size=2, node_rank=1, nnodes=2)
    assert choose_device(place, TWO) == torch.device("cuda", 1)


def test_the_only_device_is_taken() -> None:
    """Where the cluster shows each rank one device, that is device 0 for all of them."""
    assert choose_device(local(3, 4), Devices("cuda", 1)) == torch.device("cuda", 0)


def test_without_accelerators_the_device_is_the_cpu() -> None:
    """Where there are no accelerators every rank is on the CPU."""
    assert choose_device(local(3, 4), NONE) == torch.device("cpu")


def test_ranks_that_do_not_fit_the_devices_are_refused() -> None:
    """More ranks than devices, and more than one device, is a mistake in the launch."""
    with pytest.raises(PlacementError, match=r"4 ranks on this node see 2 cuda devices: start at most 2"):
        choose_device(local(3, 4), TWO)


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("meta", "gloo")])
def test_the_backend_follows_from_the_device(kind: str, backend: str) -> None:
    """auto is NCCL on CUDA, gloo on the CPU, and gloo where torch names nothing."""
    assert choose_backend("auto", torch.device(kind)) == backend


def test_an_asked_backend_is_taken() -> None:
    """A named backend is not second-guessed."""
    assert choose_backend("mpi", torch.device("cuda")) == "mpi"


@pytest.mark.parametrize("asked", ["nccl", "NCCL", "cpu:gloo,cuda:nccl"])
def test_nccl_is_for_gpus(asked: str) -> None:
    """A loop that was written for NVIDIA's GPUs is told what to write where there are none."""
    with pytest.raises(OptionError, match=rf"backend='{asked}' .* this rank is on cpu: leave backend at 'auto'"):
        choose_backend(asked, torch.device("cpu"))
    assert choose_backend(asked, torch.device("cuda")) == asked


def test_ranks_share_the_cpus() -> None:
    """The CPUs this process may use are divided among the ranks here, at least one each."""
    allowed = len(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        assert [choose_threads(size) for size in (1, allowed, 100 * allowed)] == [allowed, 1, 1]


def test_a_chosen_number_of_threads_is_left_alone() -> None:
    """Where the user has set OMP_NUM_THREADS, nothing is set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3")
        assert choose_threads(2) is None


def test_counting_devices_touches_none() -> None:
    """Looking for accelerators initialises none, so that forking stays possible."""
    devices = visible_devices()
    assert devices.count == torch.cuda.device_count()
    assert not torch.cuda.is_initialized()


def test_using_the_cpu_is_nothing_to_do() -> None:
    """Making the CPU the current device needs no accelerator."""
    kind_of("cpu").use(torch.device("cpu"))


def test_two_ranks_on_one_device_are_refused() -> None:
    """The same physical device under two ranks of a machine is named, with both ranks."""
    came = {rank: {"host": "n1", "gpu": gpu} for rank, gpu in ((2, "GPU-a"), (3, "GPU-a"), (4, "GPU-b"))}
    for rank in (2, 3):
        with pytest.raises(PlacementError, match=r"ranks 2, 3 on n1 are all on the same physical device .*GPU-a"):
            check_not_shared(rank, torch.device("cuda", 0), came)
    check_not_shared(4, torch.device("cuda", 0), came)


def test_sharing_that_was_asked_for_is_fine() -> None:
    """A rank that chose its device itself, or is on the CPU, has no name to compare."""
    came: dict[int, dict[str, Any]] = {rank: {"host": "n1", "gpu": None} for rank in range(2)}
    check_not_shared(0, torch.device("cpu"), came)


@pytest.mark.parametrize(
    ("cpus", "threads"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 2),
        ([[0, 1], [2, 3]], 2),
        ([[0, 1, 2, 3], [2, 3, 4, 5]], 2),
        ([[0], [0], [0]], 1),
        ([[0, 1, 2, 3]], 4),
    ],
)
def test_cpus_are_divided_among_those_who_share_them(
    cpus: list[list[int]], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that a cluster has bound to CPUs of their own are not divided once more."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert share_threads(0, {rank: {"cpus": found} for rank, found in enumerate(cpus)}) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share_threads(0, {rank: {"cpus": found} for rank, found in enumerate(cpus)}) is None


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_control_groups_quota(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    """Both versions of control groups, with and without a limit."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert _quota(str(tmp_path)) == quota
