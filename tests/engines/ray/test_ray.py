"""Calls on a real Ray cluster of two nodes, and decorated functions inside Ray's own workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ArrivalError, OptionError, WorkerDiedError, WorkerTraceback
from distwrap.launch.ray import RayLauncher
from tests.engines.ray.weights import assert_close, one_process
from tests.engines.regression import data, net, trained

pytestmark = pytest.mark.timeout(400)  # Ray starts a dozen processes a cluster, which busy cores take minutes for


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    """Two nodes of two CPUs, of which the second has a resource of its own; this process is their driver."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2, resources={"second": 2})
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.parametrize("nprocs", [2, 4])
def test_a_loop_on_two_nodes_ends_with_the_weights_of_one_process(nprocs: int) -> None:
    """The ranks of a node follow each other, and all of them train together."""

    @distributed(nprocs=nprocs, launcher=RayLauncher(spread="SPREAD"), returns="all")
    def main() -> tuple[Any, dict[str, torch.Tensor]]:
        model = dw.wrap_model(net())
        trained(model, torch.optim.Adam(model.parameters(), lr=0.05))
        return dw.placement(), model.state_dict()

    results = main()
    places = [place for place, _ in results]
    half = nprocs // 2
    assert [(each.rank, each.node_rank, each.local_rank) for each in places] == [
        (rank, rank // half, rank % half) for rank in range(nprocs)
    ]
    assert {(each.world_size, each.nnodes, each.local_world_size) for each in places} == {(nprocs, 2, half)}
    for _, weights in results:
        assert_close(weights, one_process())


def test_the_callers_own_model_is_trained() -> None:
    """As under every launcher, ``retrofit=True`` brings home what was trained."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    @distributed(nprocs=2, launcher="ray", retrofit=True)
    def main(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        trained(model, optimizer)
        return dw.world_size()

    assert main(model, optimizer) == 2
    assert_close(model.state_dict(), one_process())


class OwnError(Exception):
    """Exception of this test's."""


def test_an_exception_comes_in_its_own_type() -> None:
    """With the rank's traceback as its cause; the others, which wait for it, are ended."""

    @distributed(nprocs=2, launcher="ray", timeout=60)
    def main() -> None:
        if dw.rank() == 1:
            raise OwnError("out of cheese", 3)
        dw.barrier()

    with pytest.raises(OwnError, match="out of cheese") as caught:
        main()
    assert caught.value.args == ("out of cheese", 3)
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "rank 1" in str(caught.value.__cause__)


def test_a_killed_rank_is_named_and_nothing_is_left() -> None:
    """Ray tells of the death; no actor and no reservation stays behind."""

    @distributed(nprocs=2, launcher="ray", timeout=60)
    def main() -> None:
        if dw.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dw.barrier()

    with pytest.raises(
        WorkerDiedError, match=r"rank 1 on \S+ \(pid \d+\), an actor of Ray's, died without raising an exception"
    ):
        main()
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == 4


def test_no_room_is_told_with_what_is_free() -> None:
    """Ranks start together or not at all."""

    @distributed(nprocs=5, launcher=RayLauncher(wait=1.0))
    def main() -> None:
        raise AssertionError("started")

    with pytest.raises(
        ArrivalError,
        match=r"no room for 5 ranks within 1 s: each rank needs .*CPU.* are free on 2 "
        r"node",
    ):
        main()


def test_resources_and_runtime_environment_of_a_rank() -> None:
    """A resource of one node draws the ranks there; variables are set before the function runs; all CPUs are used."""
    options = {"resources": {"second": 1}, "runtime_env": {"env_vars": {"OF_TEST": "yes"}}}

    @distributed(launcher=RayLauncher(**options), nprocs=2, returns="all")  # type: ignore[arg-type]
    def main() -> tuple[str | None, bool, int]:
        import ray

        return os.environ.get("OF_TEST"), "second" in ray.get_runtime_context().get_assigned_resources(), dw.node_rank()

    assert main() == [("yes", True, 0), ("yes", True, 0)]

    @distributed(launcher="ray(cpus=2)", returns="all")
    def auto() -> tuple[int, int]:
        return dw.world_size(), torch.get_num_threads()

    assert auto() == [(2, 2), (2, 2)]


def test_wrong_options_are_refused() -> None:
    """Each with what it may be."""
    with pytest.raises(OptionError, match=r"RayLauncher: cpus=0.5: it must be a whole number of at least 1"):
        RayLauncher(cpus=0.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"gpus=-1"):
        RayLauncher(gpus=-1)
    with pytest.raises(OptionError, match="spread"):
        RayLauncher(spread="NEAR")  # type: ignore[arg-type]


def test_a_decorated_function_joins_the_workers_of_ray_train() -> None:
    """The workers have met already: the function runs in each, and its model trains with the others'."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    @ray.remote(num_cpus=0)
    class Board:
        def __init__(self) -> None:
            self.notes: list[Any] = []

        def note(self, what: Any) -> None:
            self.notes.append(what)

        def all(self) -> list[Any]:
            return self.notes

    board = Board.remote()

    def worker() -> None:
        @distributed(nprocs=7)
        def main() -> dict[str, torch.Tensor]:
            model = dw.wrap_model(net())
            trained(model, torch.optim.Adam(model.parameters(), lr=0.05))
            return model.state_dict()

        ray.get(board.note.remote((dw.rank(), dw.world_size(), main())))

    TorchTrainer(worker, scaling_config=ScalingConfig(num_workers=2)).fit()
    notes = sorted(ray.get(board.all.remote()), key=lambda note: note[0])
    assert [(rank, size) for rank, size, _ in notes] == [(0, 2), (1, 2)]
    for _, _, weights in notes:
        assert_close(weights, one_process())
    ray.kill(board)


def test_a_decorated_function_in_a_trial_of_ray_tune() -> None:
    """A trial is one process, whose ranks are its own; each trial gets its own result."""
    from ray import tune

    def trial(config: dict[str, float]) -> dict[str, float]:
        @distributed(nprocs=2)
        def main() -> float:
            model = dw.wrap_model(net())
            trained(model, torch.optim.SGD(model.parameters(), lr=config["lr"]))
            x, y = data()
            with torch.no_grad():
                return float(nn.functional.mse_loss(model(x), y))

        return {"loss": main()}

    results = tune.Tuner(trial, param_space={"lr": tune.grid_search([0.0, 0.5])}).fit()
    losses = {each.config["lr"]: each.metrics["loss"] for each in results}  # type: ignore[index]
    for rate, loss in losses.items():
        model = net()
        trained(model, torch.optim.SGD(model.parameters(), lr=rate))
        x, y = data()
        expected = float(nn.functional.mse_loss(model(x), y).detach())
        assert loss == pytest.approx(expected, rel=1e-5)
