"""Mixed precision: what is computed in which type, and the order of scale, unscale, clip, step and update."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import distwrap as dw
from distwrap.errors import OptionError, PrecisionError
from distwrap.group.world import current_world
from distwrap.precision import InPrecision, LossScaling

STEPS, SCALE = 5, 64.0


class Probe(nn.Module):
    """Remembers in which type its inner layer computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.inner(x)
        self.seen = hidden.dtype
        return {"y": self.outer(hidden.tanh()), "hidden": [hidden], "name": "probe"}


def under(precision: str, body: Callable[[], Any], nprocs: int = 1, strategy: str = "ddp") -> list[Any]:
    """Run a body in a world of this precision, and return every rank's value."""
    return dw.distributed(
        nprocs=nprocs, strategy=strategy, precision=precision, launcher="forkserver", timeout=30, returns="all"
    )(body)()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def setting(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = dw.wrap_model(nn.Linear(4, 1))
    scaler = current_world().part(LossScaling).scaler
    if scaler is not None and scaler.get_scale() != SCALE:  # at which nothing here overflows
        current_world().part(LossScaling).scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches() -> torch.Tensor:
    return torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("nprocs", "strategy"), [(1, "single"), (1, "dp"), (1, "ddp"), (2, "ddp")])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_computes_in_the_small_type_and_keeps_the_rest_in_float32(
    precision: str, dtype: torch.dtype, nprocs: int, strategy: str
) -> None:
    """Inner activations are small; outputs in any nesting, weights and gradients are float32, as is evaluation."""

    def body() -> None:
        model = dw.wrap_model(Probe())
        outputs = model(torch.randn(2, 4))
        assert model.seen == dtype
        assert outputs["y"].dtype == outputs["hidden"][0].dtype == torch.float32
        assert outputs["name"] == "probe"
        dw.backward(outputs["y"].sum())
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
        model.seen = None
        with torch.no_grad():
            assert model(torch.randn(2, 4))["y"].dtype == torch.float32
        assert model.seen == dtype

    under(precision, body, nprocs, strategy)


def test_one_model_may_have_a_precision_of_its_own() -> None:
    """``wrap_model(precision=…)`` wins over the run's."""

    def body() -> None:
        model = dw.wrap_model(Probe(), precision="32")
        model(torch.ones(1, 4))
        assert model.seen == torch.float32

    under("bf16", body)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_is_that_of_the_run(precision: str, dtype: torch.dtype) -> None:
    """Code outside of a wrapped model computes in the run's precision inside ``autocast()``."""

    def body() -> None:
        with dw.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype

    under(precision, body)


def test_float32_clips_and_steps() -> None:
    """In float32 ``optimizer_step`` clips to the norm, of the optimizer's or the given model's gradients, and steps."""

    def body() -> None:
        for given in (False, True):
            model, optimizer = setting()
            before = weights(model)
            dw.backward(100 * model(torch.ones(1, 4)).sum())
            assert dw.optimizer_step(optimizer, model=model if given else None, max_norm=0.5)
            moved = torch.tensor(before) - torch.tensor(weights(model))
            assert moved.norm().item() == pytest.approx(0.1 * 0.5, rel=1e-4)

    under("32", body)


def test_a_step_tells_the_norm_before_its_clip() -> None:
    """The norm is that of one process, also where it only was asked for; without a clip there is none."""

    def body() -> None:
        for precision_norm, factor in ((0.5, 100.0), (float("inf"), 1.0)):
            model, optimizer = setting()
            dw.backward(factor * model(torch.ones(1, 4)).sum())
            step = dw.optimizer_step(optimizer, max_norm=precision_norm)
            assert step
            assert isinstance(step, int)
            assert repr(step) == "True"
            assert step.norm is not None
            assert step.norm.item() == pytest.approx(factor * 5**0.5, rel=1e-3)
            again = pickle.loads(pickle.dumps(step))
            assert (bool(again), again.norm) == (True, step.norm)
        optimizer.zero_grad()
        dw.backward(model(torch.ones(1, 4)).sum())
        assert dw.optimizer_step(optimizer).norm is None

    for precision in ("32", "fp16"):
        under(precision, body)


class OwnScale(dw.DDPStrategy):
    """A strategy that scales losses by itself, as an engine does."""

    owns_scale = True


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_strategy_that_owns_the_scale_may_leave_losses_unscaled(nprocs: int) -> None:
    """Under fp16 neither a backward, nor a step, nor unscale() asks for a scale of distwrap's."""

    @dw.distributed(nprocs=nprocs, strategy=OwnScale(), precision="fp16", launcher="forkserver", timeout=30)
    def body() -> None:
        model, optimizer = setting()
        before = weights(model)
        for step in (optimizer.step, lambda: dw.optimizer_step(optimizer, max_norm=1.0)):
            for backward in (torch.Tensor.backward, dw.backward):
                optimizer.zero_grad()
                backward(model(torch.ones(2, 4)).sum())  # type: ignore[operator]
                dw.unscale(optimizer)
                step()
        assert weights(model) != before

    body()


class Doubled:
    """A precision that is no subclass of distwrap's, and has what a run needs of one."""

    is_plain = False

    def weights(self, model: nn.Module) -> nn.Module:
        return model

    def inputs(self, value: Any) -> Any:
        return value

    def context(self, device: torch.device) -> Any:
        return nullcontext()

    def outputs(self, value: torch.Tensor) -> torch.Tensor:
        return value.double()

    def make_scaler(self, device: torch.device) -> None:
        return None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        return None


def test_a_precision_needs_no_base_class() -> None:
    precision: Any = Doubled()
    assert dw.wrap_model(nn.Linear(1, 1), precision=precision)(torch.ones(1)).dtype == torch.float64


class Skipping(dw.DDPStrategy):
    """A strategy that doubles gradients before each step but the second, which it skips."""

    steps = 0

    def step(self, optimizer: torch.optim.Optimizer) -> bool | None:
        self.steps += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 2
        return self.steps != 2 and super().step(optimizer)


def test_fp16_steps_by_the_strategy() -> None:
    """The strategy takes the step under fp16 too, with unscaled gradients, but none that has overflowed."""

    @dw.distributed(nprocs=1, strategy=Skipping(), precision="fp16")
    def body() -> tuple[list[bool], float, int]:
        model, optimizer = setting()
        before, taken = weights(model)[-1], []
        for factor in (1.0, 1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            dw.backward(model(torch.ones(1, 4)).sum() * factor)
            taken.append(dw.optimizer_step(optimizer))
        return taken, before - weights(model)[-1], current_world().strategy.steps

    taken, moved, steps = body()
    assert (taken, steps) == ([True, False, False, True], 3)
    assert moved == pytest.approx(2 * 0.1 * 2)


@dataclass
class Counted(dw.Precision):
    """A precision that counts the steps after which it is asked to act; as a dataclass it has no hash."""

    acted: list[torch.optim.Optimizer] = field(default_factory=list)

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, enabled=False)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.acted.append(optimizer)


def test_a_precision_acts_on_the_optimizers_of_its_models() -> None:
    """After a step a precision acts once where the optimizer has parameters of its models, and never elsewhere."""
    made: list[Counted] = []
    dw.register_precision("counted", lambda: made.append(Counted()) or made[-1])

    @dw.distributed(nprocs=1)
    def body() -> None:
        kinds = {"one": "counted", "other": "counted", "own": Counted(), "plain": "32"}
        models = {name: dw.wrap_model(nn.Linear(1, 1), precision=kind) for name, kind in kinds.items()}
        optimizers = {}
        for names in ("one", "own", "plain", "one other own"):
            parameters = [value for name in names.split() for value in models[name].parameters()]
            optimizers[names] = torch.optim.SGD(parameters, lr=0.1)
            dw.backward(sum(models[name](torch.ones(1, 1)) for name in names.split()))
            optimizers[names].step()
        both = optimizers["one other own"]
        assert kinds["own"].acted == [optimizers["own"], both]
        assert [acted for precision in made for acted in precision.acted] == [optimizers["one"], both]

    body()


def test_fp16_clips_the_unscaled_gradients() -> None:
    """Under fp16 the norm is that of the true gradients: long ones are cut to it, short ones are left as they are."""

    def body() -> list[float]:
        lengths = []
        for factor in (100.0, 0.01):
            model, optimizer = setting()
            before = weights(model)
            dw.backward(factor * model(torch.ones(1, 4)).sum())
            assert dw.optimizer_step(optimizer, max_norm=0.5)
            lengths.append((torch.tensor(before) - torch.tensor(weights(model))).norm().item())
        return lengths

    [[long, short]] = under("fp16", body)
    assert long == pytest.approx(0.1 * 0.5, rel=1e-3)
    assert short == pytest.approx(0.1 * 0.01 * 5**0.5, rel=1e-2)


def test_fp16_skips_a_step_that_overflowed() -> None:
    """An infinite gradient skips the step on every rank: False, same weights, and half the scale from then on."""

    def body() -> list[float]:
        model, optimizer = setting()
        before = weights(model)
        dw.backward(model(torch.ones(1, 4)).sum() * (float("inf") if dw.rank() == dw.world_size() - 1 else 1.0))
        scale = current_world().part(LossScaling).scaler.get_scale()
        assert not dw.optimizer_step(optimizer, max_norm=1.0)
        assert weights(model) == before
        optimizer.zero_grad()
        dw.backward(model(torch.ones(1, 4)).sum())
        assert current_world().part(LossScaling).scaler.get_scale() == scale / 2
        assert dw.optimizer_step(optimizer)
        assert weights(model) != before
        return weights(model)

    one, other = under("fp16", body, nprocs=2)
    assert one == other
    under("fp16", body)


def test_fp16_refuses_a_plain_backward() -> None:
    """``loss.backward()``, whose small gradients would vanish, is an error, and not one for a model in float32."""

    def body() -> None:
        model, _ = setting()
        with pytest.raises(PrecisionError, match=r"(?s)loss\.backward\(\).*distwrap\.backward"):
            model(torch.ones(1, 4)).sum().backward()
        other = dw.wrap_model(nn.Linear(1, 1), precision="32")
        other(torch.ones(1, 1)).sum().backward()

    under("fp16", body)


def test_fp16_refuses_a_scaler_that_scales_nothing() -> None:
    """A GradScaler that is disabled, as torch makes CUDA's on other devices, is no scaler."""

    def body() -> None:
        model, _ = setting()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with pytest.raises(PrecisionError, match="made for the device"):
            scaler.scale(model(batches()[0]).sum()).backward()

    under("fp16", body)


def test_fp16_refuses_a_plain_step_on_scaled_gradients() -> None:
    """``optimizer.step()`` after ``backward(loss)`` is an error before any weight has changed."""

    def body() -> None:
        model, optimizer = setting()
        before = weights(model)
        dw.backward(model(torch.ones(1, 4)).sum())
        with pytest.raises(PrecisionError, match=r"distwrap\.optimizer_step"):
            optimizer.step()
        assert weights(model) == before

    under("fp16", body)


def test_fp16_refuses_a_step_without_a_backward() -> None:
    """``optimizer_step`` before the first backward, and twice after one, is an error."""

    def body() -> None:
        model, optimizer = setting()
        with pytest.raises(PrecisionError, match="called since"):
            dw.optimizer_step(optimizer)
        dw.backward(model(torch.ones(1, 4)).sum())
        dw.optimizer_step(optimizer)
        with pytest.raises(PrecisionError, match="called since"):
            dw.optimizer_step(optimizer)

    under("fp16", body)


def test_the_watch_over_steps_ends_with_the_run() -> None:
    """After a run in fp16, optimizers in this process step as before, even where a step was left out."""

    def body() -> None:
        model, _ = setting()
        dw.backward(model(torch.ones(1, 4)).sum())

    watching = len(_global_optimizer_pre_hooks)
    dw.distributed(nprocs=1, precision="fp16")(body)()
    assert len(_global_optimizer_pre_hooks) == watching
    weight = nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.5).step()
    assert weight.item() == 0.5


def test_torchs_own_gradient_scaler_works() -> None:
    """The GradScaler idiom is not refused, and gives the same weights as `backward` and `optimizer_step`."""

    def ours() -> list[float]:
        model, optimizer = setting()
        for x in batches():
            optimizer.zero_grad()
            dw.backward(model(x).pow(2).mean())
            dw.optimizer_step(optimizer, max_norm=0.5)
        return weights(model)

    def theirs() -> list[float]:
        model, optimizer = setting()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for x in batches():
            optimizer.zero_grad()
            scaler.scale(model(x).pow(2).mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    assert under("fp16", ours) == under("fp16", theirs)


@pytest.mark.parametrize("precision", ["32", "fp16"])
def test_gradients_accumulate_over_two_backwards(precision: str) -> None:
    """Two backwards of half a batch, then one step, are one backward of the whole."""

    def body() -> None:
        results = []
        for parts in (1, 2):
            model, optimizer = setting()
            for x in batches():
                optimizer.zero_grad()
                for part in x.chunk(parts):
                    dw.backward(model(part).pow(2).mean() / parts)
                assert dw.optimizer_step(optimizer)
            results.append(weights(model))
        torch.testing.assert_close(*map(torch.tensor, results), rtol=5e-3, atol=5e-3)

    under(precision, body)


def test_two_optimizers_with_a_backward_each() -> None:
    """As in adversarial training: each loss has its own backward and step, and both models train."""

    def body() -> None:
        (one, of_one), (other, of_other) = setting(0), setting(1)
        before = weights(one), weights(other)
        for x in batches():
            for model, optimizer in ((one, of_one), (other, of_other)):
                optimizer.zero_grad()
                dw.backward(model(x).pow(2).mean())
                assert dw.optimizer_step(optimizer)
        assert weights(one) != before[0]
        assert weights(other) != before[1]

    under("fp16", body)


def test_two_optimizers_share_one_backward() -> None:
    """One loss, two optimizers: both take the same scale off, also where the first one's step changes it."""

    def body() -> None:
        (one, of_one), (other, of_other) = setting(0), setting(0)
        before = weights(one)
        x = torch.ones(1, 4)
        dw.backward(one(x).sum() * float("inf") + other(x).sum())
        scale = current_world().part(LossScaling).scaler.get_scale()
        assert not dw.optimizer_step(of_one)
        assert dw.optimizer_step(of_other)
        assert weights(one) == before
        torch.testing.assert_close(torch.tensor(weights(other)), torch.tensor(before) - 0.1, rtol=1e-3, atol=1e-4)
        of_one.zero_grad()
        dw.backward(one(x).sum())
        assert current_world().part(LossScaling).scaler.get_scale() == scale / 2

    under("fp16", body)


def test_each_optimizer_has_a_state_of_its_own() -> None:
    """After one backward and the step of one optimizer, the own step of the other is refused: it is scaled still."""

    def body() -> None:
        (one, of_one), (other, of_other) = setting(0), setting(0)
        before = weights(other)
        dw.backward(one(torch.ones(1, 4)).sum() + other(torch.ones(1, 4)).sum())
        assert dw.optimizer_step(of_one)
        with pytest.raises(PrecisionError, match="still scaled"):
            of_other.step()
        assert weights(other) == before
        assert dw.optimizer_step(of_other)
        torch.testing.assert_close(torch.tensor(weights(other)), torch.tensor(before) - 0.1, rtol=1e-3, atol=1e-4)

    under("fp16", body)


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_batch_is_skipped_after_unscale(factor: float) -> None:
    """A loop that looks at unscaled gradients may skip the batch; the scale follows what it has seen."""

    def body() -> None:
        model, optimizer = setting()
        scaler = current_world().part(LossScaling).scaler
        before = weights(model)
        dw.backward(model(torch.ones(1, 4)).sum() * factor)
        dw.unscale(optimizer)
        optimizer.zero_grad()
        dw.backward(model(torch.ones(1, 4)).sum())
        assert scaler.get_scale() == (SCALE if factor == 1.0 else SCALE / 2)
        dw.unscale(optimizer)
        torch.testing.assert_close(model.module.weight.grad, torch.ones(1, 4), rtol=1e-3, atol=0)
        assert dw.optimizer_step(optimizer)
        torch.testing.assert_close(torch.tensor(weights(model)), torch.tensor(before) - 0.1, rtol=1e-3, atol=1e-4)

    under("fp16", body)


def test_an_own_step_after_unscale_is_refused_with_the_reason() -> None:
    """The gradients are not scaled any more, but the step would take those that have overflowed."""

    def body() -> None:
        model, optimizer = setting()
        dw.backward(model(torch.ones(1, 4)).sum())
        dw.unscale(optimizer)
        with pytest.raises(PrecisionError, match="after distwrap"):
            optimizer.step()
        assert dw.optimizer_step(optimizer)

    under("fp16", body)


def test_an_optimizer_of_other_tensors_steps_as_it_likes() -> None:
    """Its gradients were not scaled, also where a batch of a model in fp16 was given up before the step."""

    def body() -> float:
        model, optimizer = setting()
        temperature = torch.nn.Parameter(torch.ones(()))
        own = torch.optim.SGD([temperature], lr=0.1)
        dw.backward(model(torch.ones(1, 4)).sum())
        optimizer.zero_grad()
        for step in (own.step, lambda: dw.optimizer_step(own)):
            (temperature - 2).square().backward()
            step()
            own.zero_grad()
        return temperature.item()

    assert under("fp16", body) == [pytest.approx(1.36)]


def test_tensors_that_train_in_the_same_loss_are_scaled_too() -> None:
    """What is in no wrapped model gets the right step; an optimizer that was made too late is refused."""

    def body() -> tuple[float, float]:
        model, _ = setting()
        temperature, late = (torch.nn.Parameter(torch.ones(())) for _ in range(2))
        own = torch.optim.SGD([temperature], lr=0.1)
        dw.backward(model(torch.ones(1, 4)).sum() * 0 + 3 * temperature + 3 * late)
        with pytest.raises(PrecisionError, match="still scaled"):
            own.step()
        assert dw.optimizer_step(own)
        of_late = torch.optim.SGD([late], lr=0.1)
        for step in (of_late.step, lambda: dw.optimizer_step(of_late)):
            with pytest.raises(PrecisionError, match="before the first backward"):
                step()
        return temperature.item(), late.item()

    assert under("fp16", body) == [pytest.approx((0.7, 1.0))]


def test_what_another_optimizer_accumulates_follows_the_scale() -> None:
    """One optimizer skips a step and halves the scale, while the other adds up two batches: their sum is right."""

    def body() -> list[float]:
        (one, of_one), (other, of_other) = setting(0), setting(0)
        before, x = weights(other), torch.ones(1, 4)
        dw.backward(one(x).sum() * float("inf") + other(x).sum())
        assert not dw.optimizer_step(of_one)
        of_one.zero_grad()
        dw.backward(one(x).sum() + 2 * other(x).sum())
        assert current_world().part(LossScaling).scaler.get_scale() == SCALE / 2
        assert dw.optimizer_step(of_one)
        assert dw.optimizer_step(of_other)
        return [now - then for now, then in zip(weights(other), before, strict=True)]

    assert under("fp16", body) == [pytest.approx([-0.3] * 5, rel=1e-3)]


def test_a_plain_backward_after_a_scaled_one_is_refused() -> None:
    """Scaled and unscaled gradients do not add up to anything."""

    def body() -> None:
        model, optimizer = setting()
        dw.backward(model(torch.ones(1, 4)).sum())
        with pytest.raises(PrecisionError, match="become zero"):
            model(torch.ones(1, 4)).sum().backward()
        optimizer.zero_grad()
        dw.backward(model(torch.ones(1, 4)).sum())
        assert dw.optimizer_step(optimizer)

    under("fp16", body)


def _clipped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _replaced(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    optimizer.step()


def _by_closure(model: Any, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        dw.backward(loss := model(torch.ones(1, 4)).sum())
        return loss

    optimizer.zero_grad()
    optimizer.step(closure)


def _again(model: Any, optimizer: torch.optim.Optimizer) -> None:
    dw.unscale(optimizer)
    dw.backward(model(torch.ones(1, 4)).sum())
    dw.optimizer_step(optimizer)


def _without_zero_grad(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        assert dw.optimizer_step(optimizer)
        dw.backward(model(torch.ones(1, 4)).sum())


def _by_two(model: Any, optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    assert dw.optimizer_step(optimizer)
    dw.optimizer_step(other)


@pytest.mark.parametrize("how", [_clipped, _replaced, _by_closure, _again, _without_zero_grad, _by_two])
def test_no_step_is_over_gradients_of_the_wrong_scale(how: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    """Also where they were changed or replaced, are computed in the step, or mixed with others: an error, no number."""

    def body() -> None:
        model, optimizer = setting()
        dw.backward(model(torch.ones(1, 4)).sum())
        with pytest.raises(PrecisionError):
            how(model, optimizer)

    under("fp16", body)


def test_a_discriminator_is_zeroed_before_its_own_backward() -> None:
    """What a generator's loss adds to the gradients of the discriminator's last step is no error."""

    def body() -> list[float]:
        (discriminator, of_one), (generator, of_other) = setting(0), setting(1)
        for number in range(3):
            of_one.zero_grad()
            dw.backward(discriminator(torch.full((1, 4), number / 2)).sum())
            assert dw.optimizer_step(of_one)
            of_other.zero_grad()
            dw.backward(discriminator(generator(torch.ones(1, 4)).expand(1, 4)).sum())
            assert dw.optimizer_step(of_other)
        return weights(discriminator) + weights(generator)

    assert under("fp16", body)[0] == pytest.approx(under("32", body)[0], rel=1e-2, abs=1e-2)


def test_a_free_tensor_that_was_changed_is_refused() -> None:
    """A tensor of no model keeps its scale through an in-place change."""

    def body() -> None:
        model, _ = setting()
        temperature = torch.nn.Parameter(torch.ones(()))
        own = torch.optim.SGD([temperature], lr=0.1)
        dw.backward(model(torch.ones(1, 4)).sum() * 0 + 3 * temperature)
        temperature.grad.mul_(1.0)
        for step in (own.step, lambda: dw.optimizer_step(own)):
            with pytest.raises(PrecisionError):
                step()

    under("fp16", body)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("is_anew", [True, False])
def test_heads_that_train_by_turns(set_to_none: bool, is_anew: bool) -> None:
    """All optimizers step after each batch, whichever head it has trained; also where each batch makes them anew."""

    def body() -> list[float]:
        heads = [setting(seed)[0] for seed in range(2)]

        def optimizers() -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]

        those = optimizers()
        for number in range(4):
            those = optimizers() if is_anew else those
            dw.backward(heads[number % 2](torch.full((1, 4), number / 4)).sum())
            for optimizer in those:
                assert dw.optimizer_step(optimizer)
                optimizer.zero_grad(set_to_none=set_to_none)
        return weights(heads[0]) + weights(heads[1])

    [expected] = under("32", body)
    [found] = under("fp16", body)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_gradients_that_two_optimizers_hold_follow_the_scale_once() -> None:
    """A generator with two optimizers, while the discriminator's skipped step halves the scale."""

    def body() -> list[float]:
        (one, of_one), (other, of_other) = setting(0), setting(0)
        held_too = torch.optim.SGD(other.parameters(), lr=0.1)
        before, x = weights(other), torch.ones(1, 4)
        dw.backward(other(x).sum())
        dw.backward(one(x).sum() * float("inf"))
        assert not dw.optimizer_step(of_one)
        of_one.zero_grad()
        dw.backward(one(x).sum())
        assert dw.optimizer_step(of_other)
        assert len(held_too.param_groups) == 1
        return [now - then for now, then in zip(weights(other), before, strict=True)]

    assert under("fp16", body) == [pytest.approx([-0.1] * 5, rel=1e-3)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_divided_gradients(set_to_none: bool) -> None:
    """FSDP adds to the part of a gradient that a rank has, which is known to be scaled then."""

    def body() -> list[float]:
        torch.manual_seed(0)
        model = dw.wrap_model(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            dw.backward(0.01 * model(torch.full((1, 4), number + 1.0)).sum())
            assert dw.optimizer_step(optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
        whole = [parameter.full_tensor() for parameter in model.parameters()]
        return torch.cat([each.detach().flatten() for each in whole]).tolist()

    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    expected = [each - 0.1 * 0.01 * 6 for each in plain.weight.flatten().tolist()]
    for found in under("fp16", body, 2, "fsdp"):
        assert found[:8] == pytest.approx(expected, rel=1e-3)


def test_a_model_in_float32_beside_one_in_fp16() -> None:
    """It trains by plain backwards, as without the other one; also where wrapping that one was refused."""

    def body() -> None:
        with pytest.raises(OptionError):
            dw.wrap_model(nn.Linear(4, 1), precision="fp16", strategy="zero1", process_group=dist.group.WORLD)
        assert current_world().part(LossScaling).scaler is None
        for beside in ("nothing", "fp16"):
            if beside == "fp16":
                half = dw.wrap_model(nn.Linear(4, 1), precision="fp16")
                of_half = torch.optim.SGD(half.parameters(), lr=0.1)
                dw.backward(half(torch.ones(1, 4)).sum() * 0.01)
                assert dw.optimizer_step(of_half)
            torch.manual_seed(0)
            model = dw.wrap_model(nn.Linear(4, 1), precision="32")
            before = torch.tensor(weights(model))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(1, 4)).sum().backward()
            assert dw.optimizer_step(optimizer)
            torch.testing.assert_close(torch.tensor(weights(model)), before - 0.1)

    under("32", body, nprocs=2)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_two_ranks_train_as_one_process(precision: str) -> None:
    """Two ranks with half of each batch end up where one process with the whole batch does, up to the small type."""

    def body() -> list[float]:
        model, optimizer = setting()
        for x in batches():
            optimizer.zero_grad()
            dw.backward((model(x[dw.rank() :: dw.world_size()]) - 1).pow(2).mean())
            assert dw.optimizer_step(optimizer, max_norm=1.0)
        return weights(model)

    one, other = under(precision, body, nprocs=2)
    assert one == other
    [alone] = under(precision, body)
    tolerance = 2e-3 if precision == "fp16" else 2e-2
    torch.testing.assert_close(torch.tensor(one), torch.tensor(alone), rtol=tolerance, atol=tolerance)


def test_true_bf16_trains_small_weights() -> None:
    """``bf16-true``: weights, inputs, activations and gradients in bfloat16, outputs in float32; ranks stay alike."""

    def body() -> list[float]:
        model = dw.wrap_model(Probe())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = weights(model)
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(torch.full((2, 4), dw.rank() + 1.0))
            assert model.seen == torch.bfloat16
            assert outputs["y"].dtype == outputs["hidden"][0].dtype == torch.float32
            dw.backward(outputs["y"].pow(2).mean())
            assert (
                {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
            )
            assert dw.optimizer_step(optimizer, max_norm=1.0)
        with dw.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        dw.assert_in_sync(model)
        assert weights(model) != before
        return weights(model)

    one, other = under("bf16-true", body, nprocs=2)
    assert one == other
    under("bf16-true", body)


class Parts(nn.Module):
    """Methods that call several modules, with keywords, functions, checkpoints or nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def two(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(input=x)

    def functional(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.a.weight)

    def fit(self, rows: list[torch.Tensor]) -> list[torch.dtype]:
        dtypes = []
        for row in rows:
            output = self.a(row)
            dtypes.append(output.dtype)
            output = output + self.b(output)
            dw.backward(output.sum())
        return dtypes

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.mark.parametrize("nprocs", [1, 2])
def test_any_method_trains_in_true_bfloat16(nprocs: int) -> None:
    """Modules that a method calls get bfloat16; one that calls none computes in float32, but where it is named."""

    def body() -> None:
        model, x = dw.wrap_model(Parts()), torch.full((2, 4), 1 + 2**-12)
        output = model.two(x)
        assert output.dtype == torch.float32
        dw.backward(output.sum())
        assert model.b.weight.grad.dtype == torch.bfloat16
        assert model.fit([x, x]) == [torch.bfloat16] * 2
        assert torch.equal(model.plain(x), 3 * x)
        named = dw.wrap_model(Parts(), forward_methods=["functional"])
        assert named.functional(x).dtype == torch.float32
        with torch.no_grad():
            assert model.two(x).dtype == torch.float32

    under("bf16-true", body, nprocs)


@pytest.mark.parametrize("precision", ["bf16", "bf16-true", "fp16"])
def test_a_retrofitted_loss_computes_in_float32(precision: str) -> None:
    """A loss among the arguments has nothing to train, and computes as one that is made in the function does."""

    class Similarity(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a @ b.T).mean()

    @dw.distributed(nprocs=1, precision=precision, retrofit=True)  # type: ignore[call-overload,untyped-decorator]
    def body(model: nn.Module, losses: list[nn.Module]) -> None:
        output, target = model(torch.ones(2, 4)), torch.full((2, 4), 1 + 2**-12)
        for loss, plain in zip(losses, (nn.MSELoss(), Similarity()), strict=True):
            value = loss(output, target)
            assert value.dtype == torch.float32
            assert torch.equal(value, plain(output, target))
        assert loss.training

    body(nn.Linear(4, 4), [nn.MSELoss(), Similarity()])


def test_a_skipped_step_skips_the_scheduler() -> None:
    """The scheduler given to ``optimizer_step`` steps with the optimizer, and not where a gradient overflowed."""

    def body() -> None:
        model, optimizer = setting()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for factor, rate in ((float("inf"), 0.1), (1.0, 0.05), (1.0, 0.025)):
            optimizer.zero_grad()
            dw.backward(model(torch.ones(1, 4)).sum() * factor)
            taken = dw.optimizer_step(optimizer, scheduler=scheduler)
            assert taken == (factor == 1.0)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)

    under("fp16", body, nprocs=2)

    def in_full() -> None:
        model, optimizer = setting()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        dw.backward(model(torch.ones(1, 4)).sum())
        assert dw.optimizer_step(optimizer, scheduler=scheduler)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)

    under("32", in_full)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_clip_of_scaled_gradients_is_refused(nprocs: int) -> None:
    """A clip between ``backward`` and ``optimizer_step`` under fp16 is an error; after ``unscale`` it is right."""

    def body() -> float:
        model, optimizer = setting()
        dw.backward(100 * model(torch.ones(1, 4)).sum())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with pytest.raises(PrecisionError, match="max_norm="):
            dw.optimizer_step(optimizer)
        with pytest.raises(PrecisionError, match="were changed"):
            dw.unscale(optimizer)
        optimizer.zero_grad()
        before = weights(model)
        dw.backward(100 * model(torch.ones(1, 4)).sum())
        dw.unscale(optimizer)
        with pytest.raises(PrecisionError, match="and once"):
            dw.unscale(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert dw.optimizer_step(optimizer)
        with pytest.raises(PrecisionError, match="not scaled"):
            dw.unscale(optimizer)
        return (torch.tensor(before) - torch.tensor(weights(model))).norm().item()

    for length in under("fp16", body, nprocs=nprocs):
        assert length == pytest.approx(0.1 * 0.5, rel=1e-3)


def test_a_clip_of_any_layer_is_refused() -> None:
    """A clip of one layer is named, whichever it is, in place or by another tensor; one left out has no scale."""

    def body() -> None:
        torch.manual_seed(0)
        model = dw.wrap_model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
        parts = [torch.optim.SGD(layers.parameters(), lr=0.1) for layers in (model[:2], model[2])]
        current_world().part(LossScaling).scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

        def replaced(layer: nn.Module) -> None:
            layer.weight.grad = layer.weight.grad.clamp(-1, 1)  # type: ignore[operator,union-attr]

        changes: list[Callable[[nn.Module], Any]] = [
            lambda layer: nn.utils.clip_grad_norm_(layer.parameters(), 0.5),
            lambda layer: nn.utils.clip_grad_value_(layer.parameters(), 0.5),
            replaced,
        ]
        for change in changes:
            for index, optimizer in ((0, parts[0]), (1, parts[0]), (2, parts[1])):
                model.zero_grad()
                dw.backward(100 * model(torch.ones(1, 4)).sum())
                change(model[index])
                with pytest.raises(PrecisionError, match=rf"that of '{index}\.weight', for example.*max_norm="):
                    dw.optimizer_step(optimizer)
        model.zero_grad()
        dw.backward(100 * model(torch.ones(1, 4)).sum())
        before = model[1].weight.clone()
        model[0].weight.grad = None
        model[1].weight.grad.zero_()
        parts[1].zero_grad(set_to_none=False)  # of another optimizer, as of a discriminator's
        assert dw.optimizer_step(parts[0])
        assert torch.equal(model[1].weight, before)
        kept = weakref.ref(model[2].weight.grad.untyped_storage())
        assert dw.optimizer_step(parts[1])
        model.zero_grad()
        assert kept() is None

    for nprocs in (1, 2):
        under("fp16", body, nprocs=nprocs)


def test_unscale_is_a_no_op_elsewhere() -> None:
    """In float32 gradients have no scale."""

    def body() -> None:
        model, optimizer = setting()
        dw.backward(model(torch.ones(1, 4)).sum())
        dw.unscale(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert dw.optimizer_step(optimizer)

    under("32", body)


def test_each_thread_computes_in_the_runs_precision() -> None:
    """Autocast is a thread's own: a forward run in another thread, as DataParallel's replicas are, enters it anew."""
    for precision, dtype in (("bf16", torch.bfloat16), ("32", torch.float32)):
        replicas = [Probe(), Probe()]
        in_precision = InPrecision(precision, torch.device("cpu"))  # type: ignore[arg-type]
        threads = [Thread(target=in_precision(replica), args=(torch.ones(1, 4),)) for replica in replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [replica.seen for replica in replicas] == [dtype, dtype]
