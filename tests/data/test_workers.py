from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from distwrap import locked_folder, shard_loader
from distwrap.data import workers
from tests.data.ranks import standing_on
from tests.slow import INTERPRETERS
from tests.snapshot import random_state


class WorkerSeeds(Dataset[int]):
    """Each item is the seed of the worker that fetched it, from which its augmentation draws."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


def seeds(rank: int, *, seed: int | None = 7, loaders: int = 1, **options: Any) -> list[int]:
    """The seeds of the two workers on a rank, of the last of so many loaders."""
    with standing_on(rank, 2, seed=seed):
        for _ in range(loaders):
            loader = shard_loader(DataLoader(WorkerSeeds(), batch_size=2, num_workers=2, **options))
        return [int(seed) for batch in loader for seed in batch[:1]]


def test_workers_of_different_ranks_draw_apart() -> None:
    """No two workers of two ranks have the same seed, so that augmentation differs."""
    assert len({*seeds(0), *seeds(1)}) == 4


def test_worker_seeds_follow_the_run() -> None:
    """The same run gives its workers the same seeds again, and another seed others."""
    assert seeds(1) == seeds(1)
    assert not {*seeds(1)} & {*seeds(1, seed=8)}


@pytest.mark.slow("starts workers, again and again")
def test_two_loaders_of_a_rank_draw_apart() -> None:
    """The second loader of a run gets a stream of its own."""
    assert not {*seeds(0)} & {*seeds(0, loaders=2)}


def test_a_loaders_own_generator_is_heard_and_kept() -> None:
    """Without a seed of the run, the seed of the loader's generator counts, and its state is left alone."""
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    first = seeds(0, seed=None, generator=generator)
    assert torch.equal(generator.get_state(), before)
    assert first == seeds(0, seed=None, generator=torch.Generator().manual_seed(5))
    assert len({*first, *seeds(1, seed=None, generator=generator)}) == 4


def test_workers_take_nothing_from_the_callers_random_numbers() -> None:
    """Seeding the workers draws nothing from the training loop's generators."""
    before = random_state()
    seeds(0)
    assert random_state() == before


LIMITED = """
import resource, sys
import torch
from torch.utils.data import DataLoader
import distwrap

@distwrap.distributed(nprocs=2, launcher="fork")
def main():
    if sys.argv[1] == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (48, 512))
    data = torch.zeros(64, 200_000 if sys.argv[1] == "memory" else 1)
    held = []
    for batch in distwrap.shard_loader(DataLoader(data, batch_size=1, num_workers=1)):
        held.append(batch)

main()
"""


def limited(what: str, tmp_path: Path, *before: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(LIMITED)
    command = [*before, sys.executable, str(program), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2], env=ENV)
    assert done.returncode == 1
    return done.stderr


ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.slow(INTERPRETERS)
def test_too_few_open_files(tmp_path: Path) -> None:
    """The error names the rank, the limit and the way to lift it."""
    told = limited("files", tmp_path)
    assert "Each batch on its way is an open file, and this process may have 48: say `ulimit -n 512`" in told


@pytest.mark.slow(INTERPRETERS)
def test_too_little_shared_memory(tmp_path: Path) -> None:
    """A container's small /dev/shm is named with its size, and how to have more."""
    small = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("only root can give a process a /dev/shm of its own")
    told = limited("memory", tmp_path, "unshare", "--mount", "sh", "-c", small, "sh")
    assert "of 4 MiB are free: give a container more (docker run --shm-size=8g" in told


CONTAINER = """
import os, pathlib, sys, time
import torch
from torch.utils.data import DataLoader
import distwrap

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        if sys.argv[1] == "first" and index >= 16:
            pathlib.Path("midway").touch()
            while not os.path.exists("go on"):
                time.sleep(0.01)
        return torch.zeros(1)

@distwrap.distributed(nprocs=2, launcher="fork", timeout=30)
def main():
    return len([batch for batch in distwrap.shard_loader(DataLoader(Data(), batch_size=2, num_workers=1))])

print(main())
"""


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder with a short name, as for sockets it must be."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_a_long_place_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' sockets go where their path is short enough; it was too long, and the first batch never came."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert len(seeds(0)) == 2
    assert not list(long.iterdir())


@pytest.mark.slow("starts workers, again and again")
def test_two_containers_that_share_tmp(tmp_path: Path, short_folder: str) -> None:
    """Where two runs have the same process numbers neither takes the other's folder of workers for a dead one's."""
    apart = ["unshare", "--pid", "--mount-proc", "--fork"]
    if os.geteuid() != 0 or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("only root can give a process numbers of its own")
    (tmp_path / "program.py").write_text(CONTAINER)
    shared = Path(short_folder)
    (shared / "distwrap-workers-killed").mkdir()  # nobody holds its lock
    env = {**ENV, "TMPDIR": str(shared), "DISTWRAP_QUIET": "1"}

    def start(which: str) -> subprocess.Popen[str]:
        command = [*apart, sys.executable, "program.py", which]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes)  # type: ignore[call-overload]

    with start("first") as first:
        try:
            while not (tmp_path / "midway").exists():
                assert first.poll() is None, first.communicate()
                time.sleep(0.02)
            with start("second") as second:
                assert second.communicate(timeout=60)[0] == "8\n"
        finally:
            (tmp_path / "go on").touch()  # else it would never end
        assert first.communicate(timeout=60)[0] == "8\n"
    assert not list(shared.iterdir())


def test_a_worker_without_its_rank_waits_for_the_lock_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a rank that is killed end one after the other, and the last of them lets go of the lock."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # whose path is short enough for sockets
        monkeypatch.setattr(tempfile, "tempdir", place)
        folder = locked_folder.make(workers._KIND)
        (folder / "pid-1").symlink_to("what another worker has just removed")
        child = os.fork()
        if child == 0:
            workers._Orphan(folder, rank=0)._run()  # ends the process
        time.sleep(0.3)  # in which it has most likely looked once
        assert folder.exists()
        os.close(locked_folder._held.pop(folder))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 1
        assert not folder.exists()
