"""Words about ranks that are too many for the CPUs of a node."""

import pytest

import distwrap as dw
from distwrap.devices.cpus import too_many_ranks
from distwrap.launch import base


def test_many_ranks_on_few_cores_are_told_of() -> None:
    """From five ranks a core on; the line says how many, on how many cores, and what to use."""
    assert too_many_ranks(8, 2) == too_many_ranks(4, 1) == ""
    assert too_many_ranks(9, 2).startswith("9 ranks on the 2 CPU cores of this node: starting them takes long")
    assert too_many_ranks(5, 1).endswith("use nprocs=2, or a single process.")


@pytest.mark.parametrize("quiet", ["0", "1"])
def test_it_is_told_before_the_ranks_start(
    quiet: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once in the caller, and not with DISTWRAP_QUIET."""
    monkeypatch.setenv("DISTWRAP_QUIET", quiet)
    monkeypatch.setattr(base, "allowed_cpus", lambda: [0])
    monkeypatch.setattr(base, "too_many_ranks", lambda count, cpus: f"{count} on {cpus}")
    dw.distributed(nprocs=2, launcher="forkserver")(dw.barrier)()
    lines = capfd.readouterr().err.splitlines()
    assert lines[:1] == ([] if quiet == "1" else ["distwrap: 2 on 1"])
