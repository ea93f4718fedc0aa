"""Failures that are the user's own, and those that only follow from another rank's, told apart by who raised them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import distwrap as dw
from distwrap.errors import WorkerDiedError
from distwrap.group import failures
from distwrap.testing import run_ranks

LIMIT = 60.0


def _reset() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    ours.sendall(b"x")


def _nccl() -> None:
    raise RuntimeError("this cluster's NCCL is older than 2.19")


def _timed_out() -> None:
    raise RuntimeError("Timed out waiting for the database")


def _in_a_backward() -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: _nccl())
    weight.sum().backward()


def _in_a_circle() -> None:
    try:
        raise ValueError("wrapped") from RuntimeError("this cluster's NCCL is older than 2.19")
    except ValueError as error:
        raise error.__cause__ or error  # noqa: B904


def _ends(raises: Callable[[], None]) -> None:
    if dw.rank() == 1:
        raises()


@pytest.mark.parametrize(
    ("raises", "error", "words"),
    [
        (_reset, ConnectionError, "Broken pipe"),
        (_nccl, RuntimeError, "this cluster's NCCL is older"),
        (_timed_out, RuntimeError, "Timed out waiting for the database"),
        (_in_a_backward, RuntimeError, "this cluster's NCCL is older"),
        (_in_a_circle, RuntimeError, "this cluster's NCCL is older"),
    ],
)
def test_a_users_own_error_stays_his(raises: Callable[[], None], error: type[Exception], words: str) -> None:
    """An error of the user's is raised in the caller whatever it says, though the other ranks are done already."""
    with pytest.raises(error, match=f"^(.Errno 32. )?{words}") as caught:
        run_ranks(_ends, 2, raises, timeout=LIMIT)
    assert getattr(caught.value, "rank", None) == 1


class Fetched(Dataset[int]):
    """Samples from a server that hangs up."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ConnectionResetError(104, "the server hung up")


def _fetches(workers: int) -> None:
    for _ in dw.shard_loader(DataLoader(Fetched(), num_workers=workers)):
        pass


@pytest.mark.parametrize("workers", [0, 1])
def test_a_datasets_own_error_stays_its_own(workers: int) -> None:
    """An operating system's error in a dataset, also in a loader's worker, is no end of that worker."""
    with pytest.raises(ConnectionResetError, match="the server hung up"):
        run_ranks(_fetches, 2, workers, timeout=LIMIT)


def test_what_follows_from_a_lost_peer() -> None:
    """An error of torch's that tells of a lost peer, and what is raised while it is handled, is no first cause."""
    lost = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")  # native code raises it at a call
    assert failures.is_secondary(lost)
    with pytest.raises(ValueError, match="the mean") as caught:
        _handle(lost)
    assert not failures.is_secondary(lost)  # a raise in the user's code
    lost.__traceback__ = None
    assert failures.is_secondary(caught.value)
    assert not failures.is_secondary(ConnectionResetError(104, "Connection reset by peer"))


def _handle(lost: Exception) -> None:
    try:
        raise lost
    except RuntimeError as error:
        raise ValueError("the mean could not be taken") from error


def _loses_a_peer(path: str) -> None:
    """Lose rank 1 in a load, which is told as a checkpoint that cannot be read."""
    dw.save({"weight": torch.ones(3)}, path, io="sharded")
    if dw.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dw.load(path)


def test_a_load_that_loses_a_rank_is_no_first_cause(tmp_path: Path) -> None:
    """Whoever reads a checkpoint together with a rank that dies has not failed first."""
    with pytest.raises(WorkerDiedError, match=r"rank 1 on .* killed by SIGKILL"):
        run_ranks(_loses_a_peer, 2, str(tmp_path / "parts"), timeout=LIMIT)
