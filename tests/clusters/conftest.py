"""The real things, started once: a Slurm cluster, hosts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import namespaces, slurm as emulated
from tests.clusters.namespaces import Hosts
from tests.clusters.slurm import Slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm cluster of three nodes."""
    lacking = emulated.missing()
    if lacking:
        pytest.skip(f"no Slurm: {lacking}")
    with tempfile.TemporaryDirectory(prefix="distwrap-slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # for munge's own user
        with emulated.cluster(folder) as running:
            yield running


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, each with a network of its own."""
    lacking = namespaces.missing()
    if lacking:
        pytest.skip(f"no hosts: {lacking}")
    with namespaces.hosts("hosta", "hostb") as made:
        yield made
