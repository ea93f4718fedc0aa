"""Full precision inside a node, the algorithm between nodes; the nodes are told apart by the placement alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distwrap import assert_in_sync, consolidate, wrap_model, wrap_optimizer
from distwrap.comm import AsyncAveraging, Decentralized, DiLoCo, LocalSGD, LowPrecisionDecentralized, traffic
from distwrap.errors import OptionError
from distwrap.group.world import current_world, rank
from distwrap.registry import algorithms
from distwrap.testing import run_ranks
from tests.comm import references
from tests.comm.test_weight_algorithms import LR, Linear, Quadratic, flat, target_of
from tests.slow import MORE_RANKS, nightly, slow

NODES = {2: [0, 0], 3: [0, 0, 1], 4: [0, 0, 1, 1], 5: [0, 0, 0, 1, 1]}
LATER = nightly(5, row="products", why="three ranks show it, on nodes of different sizes too")
RANKS = [2, slow(3, why=MORE_RANKS), slow(4, why=MORE_RANKS), LATER]
GRADIENT = ["allreduce", "fp16", "bf16", "bytegrad", "powersgd", "topk(ratio=0.5)"]


def pretend(nodes: list[int]) -> None:
    """Place the ranks on nodes."""
    world, node = current_world(), nodes[rank()]
    place = replace(
        world.placement,
        node_rank=node,
        nnodes=len(set(nodes)),
        local_rank=nodes[: rank()].count(node),
        local_world_size=nodes.count(node),
    )
    world.placement = place


def named(comm: str) -> Any:
    made = algorithms.make(comm)
    return replace(made, hierarchical=True)


def _average_gradients(nodes: list[int]) -> dict[str, tuple[Any, int, int]]:
    pretend(nodes)
    found = {}
    for comm in GRADIENT:
        torch.manual_seed(0)
        model = wrap_model(nn.Linear(60, 50), comm=named(comm))
        x = torch.randn(4, 60, generator=torch.Generator().manual_seed(rank()))
        model(x).square().mean().backward()
        sent = traffic(model)
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
        found[comm] = gradient.double().numpy(), sent.sent, sent.between_nodes
    return found


@cache
def averaged(ranks: int) -> list[dict[str, tuple[Any, int, int]]]:
    return run_ranks(_average_gradients, ranks, NODES[ranks])


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients(ranks: int) -> None:
    """Nodes of different sizes too: the mean is over ranks, not over nodes."""
    nodes, everyone = NODES[ranks], averaged(ranks)
    exact = everyone[0]["allreduce"][0]
    size = np.abs(exact).max()
    for comm in GRADIENT:
        for found in everyone:
            assert np.array_equal(found[comm][0], everyone[0][comm][0]), comm
        off = np.abs(everyone[0][comm][0] - exact).max()
        if len(set(nodes)) == 1:
            assert off == 0, comm  # inside a node all is full precision
        elif comm in ("fp16", "bf16", "bytegrad"):
            assert 0 < off < 0.02 * size, comm
        leaders = [nodes.index(node) for node in sorted(set(nodes))]
        for number, found in enumerate(everyone):
            _, sent, between = found[comm]
            assert sent > 0
            assert bool(between) == (number in leaders and len(leaders) > 1), (comm, number)
    if len(set(nodes)) > 1:
        assert everyone[0]["bytegrad"][2] < 0.26 * everyone[0]["allreduce"][2]


def _plain_mean() -> Any:
    torch.manual_seed(0)
    model = wrap_model(nn.Linear(60, 50))
    model(torch.randn(4, 60, generator=torch.Generator().manual_seed(rank()))).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double().numpy()  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_hierarchical_mean_is_ddps(ranks: int) -> None:
    """It is the mean over all ranks that plain DDP takes."""
    plain = run_ranks(_plain_mean, ranks)[0]
    assert np.allclose(averaged(ranks)[0]["allreduce"][0], plain, rtol=1e-5, atol=1e-8)


WEIGHT: dict[str, tuple[Any, type[references.Replicas]]] = {
    "local_sgd": (LocalSGD(sync_every=3, hierarchical=True), references.LocalSGD),
    "diloco": (DiLoCo(sync_every=3, hierarchical=True), references.DiLoCo),
    "decentralized": (Decentralized(hierarchical=True), references.DecentralizedAll),
    "shift_one": (Decentralized(peer_selection="shift_one", hierarchical=True), references.ShiftOne),
    "low precision": (LowPrecisionDecentralized(hierarchical=True), references.Ring),
}


def _descend(nodes: list[int]) -> dict[str, list[Any]]:
    pretend(nodes)
    return {name: _descend_by(name) for name in WEIGHT}


def _descend_by(name: str) -> list[Any]:
    model = wrap_model(Quadratic(), comm=WEIGHT[name][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    history = []
    for _ in range(8):
        optimizer.zero_grad()
        model(target_of(rank(), 1.0)).backward()
        optimizer.step()
        history.append(flat(model))
    consolidate(model)
    assert_in_sync(model)
    return history


@pytest.mark.parametrize("ranks", [3, 4, LATER])
@pytest.mark.slow("the same on more ranks, and by other ways")
def test_a_node_is_one_replica(ranks: int) -> None:
    """A node descends along the mean of its ranks' gradients, and only nodes meet, under every algorithm."""
    nodes = NODES[ranks]
    everyone = run_ranks(_descend, ranks, nodes)
    targets = [
        np.mean([target_of(number, 1.0).numpy() for number in range(ranks) if nodes[number] == node], axis=0)
        for node in (0, 1)
    ]
    for name, (_, reference) in WEIGHT.items():
        replicas, most = reference(np.ones(100), targets, LR), 2e-2 if name == "low precision" else 1e-9
        for step in range(8):
            replicas.step()
            for number, found in enumerate(everyone):
                weights, of_first = found[name][step], everyone[nodes.index(nodes[number])][name][step]
                assert np.abs(weights - replicas.w[nodes[number]]).max() < most, (name, step, number)
                assert np.array_equal(weights, of_first), (name, step, number)


def _by_the_clock(nodes: list[int]) -> tuple[Any, bool]:
    pretend(nodes)
    model = wrap_model(Linear(), comm=AsyncAveraging(sync_interval_ms=2, hierarchical=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(20 + 10 * nodes[rank()]):
        optimizer.zero_grad()
        model(target_of(rank(), 1.0)[:1].expand(101)).backward()
        optimizer.step()
    before = flat(model)
    consolidate(model)
    return flat(model), before


def test_async_between_nodes_of_different_pace() -> None:
    nodes = NODES[4]
    everyone = run_ranks(_by_the_clock, 4, nodes)
    slopes = [float(target_of(number, 1.0)[0]) for number in range(4)]
    progress = [-np.mean(slopes[:2]) * 20, -np.mean(slopes[2:]) * 30]
    for number, (weights, before) in enumerate(everyone):
        assert np.allclose(weights, np.mean(progress), rtol=1e-9)
        assert np.array_equal(before, everyone[nodes.index(nodes[number])][1])  # alike in a node


def _qadam(nodes: list[int], hierarchical: bool) -> Any:
    if hierarchical:
        pretend(nodes)
    torch.manual_seed(0)
    comm = replace(algorithms.make("qadam(warmup_steps=10, bits=8)"), hierarchical=hierarchical)
    model = wrap_model(nn.Linear(30, 20), comm=comm)
    optimizer = wrap_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1), model)
    for step in range(14):
        optimizer.zero_grad()
        model(
            torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * rank() + step))
        ).square().mean().backward()
        optimizer.step()
    assert_in_sync(model)
    return flat(model)


@pytest.mark.slow("the same on more ranks, and by other ways")
def test_qadam_steps_alike_on_all_ranks_of_a_node() -> None:
    """Only the node's first rank turns gradients into momenta; the others' optimizers must take them as such."""
    near = run_ranks(_qadam, 4, NODES[4], True)
    flatly = run_ranks(_qadam, 4, NODES[4], False)
    assert all(np.array_equal(weights, near[0]) for weights in near)
    assert np.abs(near[0] - flatly[0]).max() < 0.02


def _odd_nodes() -> None:
    pretend([0, 1, 2])
    wrap_model(nn.Linear(2, 2), comm=Decentralized(peer_selection="shift_one", hierarchical=True))


def test_shift_one_counts_nodes() -> None:
    with pytest.raises(OptionError, match="odd number"):
        run_ranks(_odd_nodes, 3)
