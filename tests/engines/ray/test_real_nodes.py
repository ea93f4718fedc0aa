"""Ranks on two nodes of Ray's that the command ``ray start`` has started, as people start clusters by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ArrivalError
from distwrap.launch.ray import RayLauncher
from tests.engines.ray.real_node import RealNode, wait_for_nodes
from tests.engines.ray.weights import assert_close, one_process
from tests.engines.regression import net, trained

pytestmark = pytest.mark.timeout(400)  # Ray starts a dozen processes a cluster, which busy cores take minutes for


@pytest.fixture(scope="module")
def head() -> Iterator[RealNode]:
    """A head with two accelerators of a made-up kind."""
    with closing(RealNode(resources={"accel": 2})) as made:
        wait_for_nodes(made, 1)
        yield made


def placed_and_trained(address: str, wait: float, **options: Any) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Train on four ranks, each of which wants an accelerator, and return where each was, and its weights."""
    launcher = RayLauncher(address=address, resources={"accel": 1}, wait=wait)

    @distributed(nprocs=4, launcher=launcher, returns="all", timeout=60, **options)
    def main() -> tuple[Any, dict[str, torch.Tensor]]:
        model = dw.wrap_model(net())
        trained(model, torch.optim.Adam(model.parameters(), lr=0.05))
        return dw.placement(), model.state_dict()

    return main()


def test_ranks_that_want_an_accelerator_each_fill_two_nodes(head: RealNode) -> None:
    """There is no room for four on the head alone; once a second node has come there is, and they train as one."""
    with pytest.raises(ArrivalError, match=r"no room for 4 ranks .*'accel': 1.* '2 of 2'.* on 1 node"):
        placed_and_trained(head.address, wait=2.0)
    with closing(RealNode(head.address, resources={"accel": 2})):
        assert [each["accel"] for each in wait_for_nodes(head, 2)] == [2.0, 2.0]
        found = placed_and_trained(head.address, wait=60.0)
    assert [(each.rank, each.node_rank, each.local_rank, each.nnodes) for each, _ in found] == [
        (0, 0, 0, 2),
        (1, 0, 1, 2),
        (2, 1, 0, 2),
        (3, 1, 1, 2),
    ]
    for _, weights in found:
        assert_close(weights, one_process())
