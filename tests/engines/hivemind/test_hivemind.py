"""Whole trainings with peers of hivemind, against one process."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import CollectiveError, LaunchError, ModelError, OptionError, WorkerDiedError
from distwrap.strategies.hivemind import HivemindStrategy, global_steps
from distwrap.strategies.hivemind.optimizer import PeerSteps
from distwrap.strategies.hivemind.peers import Peers
from tests.engines.hivemind.program import loss_of, made, one_process, step, strategy, train
from tests.engines.regression import data

STEPS = 3


@pytest.mark.parametrize(("nprocs", "launcher"), [(2, "fork"), (3, "spawn")])
def test_loss_is_that_of_ddp(nprocs: int, launcher: str) -> None:
    """After as many global steps; and all ranks have the same weights, once they are brought together."""

    patient = strategy(nprocs, matchmaking_seconds=1.0 if nprocs == 2 else 1.5)

    @distributed(strategy=patient, nprocs=nprocs, launcher=launcher, returns="all", timeout=60)
    def main() -> tuple[float, int, bool]:
        model, optimizer = made()
        train(model, optimizer, STEPS)
        near = nn.utils.parameters_to_vector(model.parameters()).detach()
        dw.consolidate(model)
        dw.assert_in_sync(model)
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        return loss_of(model), global_steps(optimizer), torch.allclose(near, after, atol=1e-5)

    found = main()
    assert {steps for _, steps, _ in found} == {STEPS}
    assert all(near for *_, near in found)
    for loss, *_ in found:
        assert loss == pytest.approx(one_process(STEPS), rel=0.05)


def test_users_objects_survive() -> None:
    """Optimizer, scheduler, hooks, state and checkpoints are the user's own; a scheduler counts what steps it sees."""

    @distributed(strategy=strategy(2, compression="fp16", average_state_every=2), nprocs=2, timeout=60)
    def main() -> tuple[Any, ...]:
        model = dw.wrap_model(nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        wrapped = dw.wrap_optimizer(dw.wrap_optimizer(optimizer))
        after = torch.optim.lr_scheduler.LambdaLR(wrapped, lambda count: 1 - 0.5 * (count > 0))
        hooked, taken, locally = [], 0, 0
        wrapped.register_step_pre_hook(lambda *_: hooked.append(1))
        while global_steps(wrapped) < 2:
            wrapped.zero_grad()
            model(torch.ones(6, 5)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            taken += dw.optimizer_step(wrapped, scheduler=before)
            after.step()
            locally += 1
            time.sleep(0.02)
        count = int(wrapped.state[next(model.parameters())]["step"])
        same = wrapped is dw.wrap_optimizer(optimizer) and wrapped.state_dict() == optimizer.state_dict()
        rate = optimizer.param_groups[0]["lr"]
        return same, hooked == [1, 1], taken, before.last_epoch, after.last_epoch == locally, count, rate

    assert main() == (True, True, 2, 2, True, 2, 0.05)


def test_local_updates() -> None:
    """Each step changes a rank's own weights; a global step averages them."""

    @distributed(strategy=strategy(2, local_updates=True, target_batch_size=48), nprocs=2, returns="all", timeout=60)
    def main() -> tuple[bool, float]:
        model, optimizer = made()
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        step(model, optimizer)
        moved = not torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
        train(model, optimizer, 2)
        dw.consolidate(model)
        dw.assert_in_sync(model)
        return moved, loss_of(model)

    (moved, loss), other = main()
    assert moved
    assert other == (moved, loss)
    assert loss < one_process(0)


def test_a_rank_that_is_done_helps_the_others() -> None:
    """A rank with less data waits in consolidate(), and takes part in their rounds meanwhile."""

    @distributed(strategy=strategy(2, target_batch_size=24), nprocs=2, returns="all", timeout=60)
    def main() -> tuple[int, float]:
        model, optimizer = made()
        train(model, optimizer, 1 if dw.rank() else 3)
        dw.consolidate(model)
        time.sleep(1.0)  # no samples in the time in which hivemind expects a global step
        dw.consolidate(model)
        return global_steps(optimizer), sum(value.double().sum().item() for value in model.parameters())

    first, second = main()
    assert first == second
    assert first[0] >= 3


def test_the_last_step_is_taken_where_ranks_come_together() -> None:
    """Samples that are enough only with those of all ranks are averaged in consolidate()."""

    @distributed(strategy=strategy(2, target_batch_size=12), nprocs=2, returns="all", timeout=60)
    def main() -> tuple[int, float]:
        model, optimizer = made()
        for _ in range(1):
            step(model, optimizer)
        dw.consolidate(model)
        return global_steps(optimizer), loss_of(model)

    for steps, loss in main():
        assert steps == 1
        assert loss == pytest.approx(one_process(1), rel=1e-3)


class Partly(nn.Module):
    """Net with a layer that no forward uses, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.used, self.unused, self.frozen = nn.Linear(5, 3), nn.Linear(2, 2), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return self.frozen(self.used(x))  # type: ignore[no-any-return]


def test_what_has_no_gradient_is_left_alone() -> None:
    """hivemind fills in zeros, with which weight decay would act; one process leaves such weights alone."""

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    @distributed(strategy=strategy(2, target_batch_size=24), nprocs=2, timeout=60)
    def main() -> dict[str, torch.Tensor]:
        model = dw.wrap_model(Partly())
        optimizer = dw.wrap_optimizer(adamw(model))
        while global_steps(optimizer) < 2:
            step(model, optimizer)
        dw.consolidate(model)
        assert model.unused.weight.grad is None
        return model.state_dict()

    found, one = main(), Partly()
    optimizer = adamw(one)
    for _ in range(2):
        optimizer.zero_grad()
        x, y = data()
        nn.functional.mse_loss(one(x), y).backward()
        optimizer.step()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0.05 if "used." in name[:5] else 0, msg=name)


def test_a_step_over_its_target_is_told_of(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that step in turns hear of each other's samples after their own next step, and take twice the target."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)

    @distributed(strategy=strategy(2), nprocs=2, timeout=60)
    def main() -> float:
        model, optimizer = made()
        while global_steps(optimizer) < 2:
            step(model, optimizer)
            time.sleep(1.5)
        dw.consolidate(model)
        return loss_of(model)

    assert main() == pytest.approx(one_process(2), rel=1e-3)
    assert re.search(
        r"global step \d took (18|24|30) samples of this run, and target_batch_size is 12", capfd.readouterr().err
    )


# What would be wrong without a word


def test_an_optimizer_that_is_not_wrapped() -> None:
    """Its step would train the ranks apart: no weight changes."""

    @distributed(strategy=strategy(2), nprocs=2, timeout=60)
    def main() -> None:
        model = dw.wrap_model(net := nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 5)).sum().backward()
        before = net.weight.detach().clone()
        try:
            optimizer.step()
        finally:
            assert torch.equal(net.weight, before)

    with pytest.raises(ModelError, match=r"rank . on .* optimizer = wrap_optimizer\(optimizer\)"):
        main()


def test_a_run_without_a_global_step() -> None:
    """It has trained nothing, and says so."""

    @distributed(strategy=strategy(2, target_batch_size=1200), nprocs=2, timeout=60)
    def main() -> None:
        model, optimizer = made()
        step(model, optimizer)

    with pytest.raises(ModelError, match="12 samples together, and target_batch_size=1200"):
        main()


def test_a_step_that_raises() -> None:
    """hivemind only logs what the optimizer's own step raises."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise KeyError("boom")

    @distributed(strategy=strategy(2), nprocs=2, timeout=60)
    def main() -> None:
        model = dw.wrap_model(nn.Linear(5, 3))
        optimizer = dw.wrap_optimizer(Broken(model.parameters(), lr=0.1))
        while not global_steps(optimizer):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()

    with pytest.raises(KeyError, match="boom"):
        main()


def test_peers_that_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two islands, each of one peer, are an error on all ranks that says who sees whom."""
    start = Peers._started

    def alone(self: Any, hivemind: Any, initial_peers: Any) -> Any:
        return start(self, hivemind, [])

    monkeypatch.setattr("distwrap.strategies.hivemind.peers.Peers._started", alone)

    @distributed(strategy=strategy(2, peer_seconds=8.0), nprocs=2, launcher="fork", timeout=60)
    def main() -> None:
        made()

    with pytest.raises(LaunchError, match=r"not every rank sees all 2 peers of this run: rank 0 sees 1; rank 1 sees 1"):
        main()


def test_a_rank_that_no_longer_steps() -> None:
    """The others notice at the first round without it, and end after some."""
    options = {"averaging_seconds": 2.0, "target_batch_size": 6, "average_state_every": 100}

    @distributed(strategy=strategy(2, **options), nprocs=2, timeout=40)
    def main() -> None:
        model, optimizer = made()
        if dw.rank():
            dw.barrier()
        train(model, optimizer, 9)

    with pytest.raises(CollectiveError, match=r"rank 0 on .* in 3 such steps in a row"):
        main()


def test_weights_that_differ_after_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that averaged all weights in a step must have the same ones then."""
    compare = PeerSteps._compare

    def change(self: PeerSteps, *, is_averaged: bool) -> str:
        if dw.rank():
            with torch.no_grad():
                self.parameters[0].mul_(1.5)
        return compare(self, is_averaged=is_averaged)

    monkeypatch.setattr(PeerSteps, "_compare", change)
    monkeypatch.setattr("distwrap.strategies.hivemind.optimizer._MISSES", 1)

    @distributed(strategy=strategy(2), nprocs=2, launcher="fork", timeout=60)
    def main() -> None:
        train(*made(), 9)

    with pytest.raises(CollectiveError, match=r"the norm .* a part was lost on the way, or changed by hand"):
        main()


def test_a_rank_that_dies_is_named() -> None:
    """The others do not wait for it."""

    @distributed(strategy=strategy(2), nprocs=2, timeout=60)
    def main() -> None:
        model, optimizer = made()
        train(model, optimizer, 1)
        if dw.rank():
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, 99)

    with pytest.raises(WorkerDiedError, match="rank 1"):
        main()


def test_loops_of_other_kinds() -> None:
    """Windows, a closure, checkpoints, bf16 and a second model with an optimizer of its own."""

    @distributed(strategy=strategy(2), nprocs=2, timeout=60, precision="bf16")
    def main(path: str) -> tuple[int, int, bool]:
        model, optimizer = made()
        other, second = made()
        x, y = data()

        def closure() -> torch.Tensor:
            second.zero_grad()
            loss = nn.functional.mse_loss(other(x), y)
            loss.backward()
            return loss

        while not (global_steps(optimizer) and global_steps(second)):
            optimizer.zero_grad()
            for (inputs, targets), window in dw.accumulate([(x, y), (x, y)], 2, model):
                (nn.functional.mse_loss(model(inputs), targets) / window.size).backward()
                if window.last:
                    optimizer.step()
            assert second.step(closure).detach() > 0  # type: ignore[union-attr]
        dw.consolidate(model)
        dw.save({"model": model, "optimizer": optimizer}, path)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        with torch.no_grad():
            next(model.parameters()).zero_()
        dw.load(path, into={"model": model, "optimizer": optimizer})
        same = torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
        dw.consolidate(other)
        dw.assert_in_sync(other)
        return len(optimizer.state), len(second.state), same

    with tempfile.TemporaryDirectory() as folder:
        assert main(f"{folder}/last.pt") == (4, 4, True)


def test_what_cannot_be_is_refused() -> None:
    """Before a process starts."""
    for options, words in [
        ({"target_batch_size": 4, "batch_size": 8}, "cannot be the larger one"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"run_id": "a.b"}, "without a dot"),
        ({"compression": "bf16"}, "compression"),
        ({"initial_peers": "/ip4/1.2.3.4"}, "a list of addresses"),
        ({"initial_peers": ["1.2.3.4:80"]}, "a list of addresses"),
        ({"initial_peers": ["/ip4/1.2.3.4/tcp/1/p2p/Q"]}, "give target_batch_size too"),
        ({"client_mode": True}, "client takes no connections"),
        ({"matchmaking_seconds": 5.0, "averaging_seconds": 5.0}, "Make it longer"),
        ({"average_state_every": 0}, "average_state_every"),
        ({"host": "me"}, "host='me'"),
    ]:
        with pytest.raises(OptionError, match=words):
            HivemindStrategy(**options)  # type: ignore[arg-type]
    for run, words in [
        ({"strategy": "hivemind"}, "how many a step has"),
        ({"strategy": "collaborative(batch_size=2)", "comm": "bytegrad"}, "comm= does not go"),
        ({"strategy": "hivemind(batch_size=2)", "precision": "fp16"}, "precisions '32' and 'bf16'"),
        ({"strategy": "hivemind(batch_size=2)", "precision": "bf16-true"}, "precisions '32' and 'bf16'"),
    ]:
        with pytest.raises(OptionError, match=words):
            distributed(nprocs=2, **run)(made)()  # type: ignore[call-overload]
