"""What options and environment say together of the nodes that take part."""

from __future__ import annotations

from typing import Any

import pytest

from distwrap.environments import Node
from distwrap.errors import OptionError
from distwrap.launch.task import NodePlan, resolve
from distwrap.options import Options


def plan(node: Node | None = None, **options: Any) -> NodePlan:
    return resolve(Options().updated(options), node)


POD = Node(2, 1, 4, "pod-0:23456", "kubeflow")


def test_one_node_by_default() -> None:
    """Without a word there is one node, and nobody to meet."""
    assert plan() == NodePlan()


def test_several_by_options() -> None:
    """nnodes, node_rank and rdzv_endpoint describe the launch."""
    assert plan(nnodes=2, node_rank=1, rdzv_endpoint="head:1234") == NodePlan(2, 2, 1, "head", 1234)


def test_several_by_the_environment() -> None:
    """A cluster that starts a process a node says how many ranks each has, too."""
    assert plan(POD) == NodePlan(2, 2, 1, "pod-0", 23456, nprocs=4)


@pytest.mark.parametrize(
    ("options", "elastic"),
    [
        ({"max_restarts": 1}, True),
        ({"launcher": "elastic"}, True),
        ({"nnodes": "1:2", "rdzv_endpoint": "h"}, True),
        ({"nnodes": 2, "rdzv_endpoint": "h"}, False),
        ({}, False),
    ],
)
def test_what_needs_torch_elastic(options: dict[str, Any], elastic: bool) -> None:
    """Restarts, a range of nodes, or to be asked for by name."""
    assert plan(**options).elastic is elastic


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [("h:1", "h", 1), ("h", "h", 29400), ("[fd00::2]:1", "fd00::2", 1), ("[fd00::2]", "fd00::2", 29400)],
)
def test_endpoints(endpoint: str, host: str, port: int) -> None:
    """A host with or without a port, an IPv6 address in brackets."""
    found = plan(nnodes=2, rdzv_endpoint=endpoint)
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize(
    ("node", "options", "message"),
    [
        (None, {"nnodes": 2}, r"nnodes=2 needs rdzv_endpoint='host:port'"),
        (
            None,
            {"nnodes": 2, "rdzv_endpoint": "h", "node_rank": 2},
            r"node_rank=2, but there are 2 node\(s\). It must be 0 to 1",
        ),
        (None, {"node_rank": 1}, r"node_rank=1, but there are 1 node\(s\). Say how many there are with nnodes"),
        (None, {"nnodes": 2, "rdzv_endpoint": "h:x"}, r"rdzv_endpoint='h:x': it must be 'host:port'"),
        (None, {"nnodes": 2, "rdzv_endpoint": "h:70000"}, r"rdzv_endpoint='h:70000'"),
        (None, {"nnodes": 2, "rdzv_endpoint": "h", "launcher": "script"}, r"'script' is not made for several nodes"),
        (None, {"max_restarts": 1, "launcher": "script"}, r"'script' is not made for restarts"),
        (POD, {"nnodes": 3}, r"nnodes=3, but kubeflow says 2: take nnodes out of the code"),
        (POD, {"node_rank": 0}, r"node_rank=0, but kubeflow says 1"),
    ],
)
def test_refused(node: Node | None, options: dict[str, Any], message: str) -> None:
    """What is half said or contradicts itself is refused before anything starts."""
    with pytest.raises(OptionError, match=message):
        plan(node, **options)
