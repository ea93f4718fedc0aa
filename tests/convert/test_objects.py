"""Uses of Accelerate's, Fabric's and Horovod's names: what each becomes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from distwrap.convert.converting import Converted, convert
from distwrap.convert.script import Script

ACCELERATE = """
import os, torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.utils.data import DataLoader

logger = get_logger(__name__)

def main(args):
    accelerator = Accelerator({options})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for x in loader:
        {block}:
            accelerator.backward(model(x).mean())
            {clip}
            optimizer.step()
    {code}

def start():
    main(args)

if __name__ == "__main__":
    start()
"""

FABRIC = """
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

def main():
    fabric = Fabric(accelerator="auto")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
    for step, x in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(model(x).mean())
        optimizer.step()
    {code}

main()
"""


def accelerate(options: str = "", block: str = "if True", clip: str = "pass", code: str = "pass") -> Converted:
    return convert(Script(ACCELERATE.format(options=options, block=block, clip=clip, code=code)))


@pytest.mark.parametrize(
    ("code", "becomes"),
    [
        ('accelerator.save_state("out")', 'os.makedirs("out", exist_ok=True)'),
        ('accelerator.load_state("out")', 'load(os.path.join("out", "state.pt"), into={"model": model, '),
        ("x = accelerator.get_state_dict(model)", "x = model.state_dict()"),
        ("x = accelerator.gather_for_metrics((x, y))", "x = gather((x, y))"),
        ("with accelerator.no_sync(model): pass", "with no_sync(model): pass"),
        ("with accelerator.local_main_process_first(): pass", "with rank_zero_first(local=True): pass"),
        ('logger.info("x")', 'logger.info("x", rank_zero=True)'),
        ('logger.info("x", main_process_only=False)', 'logger.info("x")'),
        ("print(accelerator.is_local_main_process)", "print(local_rank() == 0)"),
    ],
)
def test_names_of_accelerate(code: str, becomes: str) -> None:
    """Each use becomes what docs/reference/names.md says."""
    result = accelerate(code=code)
    assert result.is_result, [each.text("x.py") for each in result.notes]
    assert f"    {becomes}" in result.text


@pytest.mark.parametrize("precision", ['"fp16"', "args.precision"])
def test_scaled_gradients(precision: str) -> None:
    """Where the precision may be fp16, the clip is of true gradients, and the step may be skipped."""
    text = accelerate(f"mixed_precision={precision}", clip="accelerator.clip_grad_norm_(model.parameters(), 1.0)").text
    assert "unscale(optimizer); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n" in text
    assert "optimizer_step(optimizer)\n" in text
    assert '.options(precision=args.precision or "no")(args)' in text or '@distributed(precision="fp16")\n' in text


@pytest.mark.parametrize(
    "words",
    [
        {"options": "gradient_accumulation_steps=2"},
        {"options": "gradient_accumulation_steps=args.steps()", "block": "with accelerator.accumulate(model)"},
        {"options": "fsdp_plugin=plugin"},
        {"code": "other(accelerator)"},
        {"code": "accelerator.trackers[0]"},
        {
            "options": 'mixed_precision="fp16", gradient_accumulation_steps=2',
            "block": "with accelerator.accumulate(model)",
            "clip": "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
        },
    ],
    ids=str,
)
def test_what_is_refused(words: dict[str, str]) -> None:
    """A use that has no equal is named, and nothing is changed."""
    result = accelerate(**words)
    assert not result.is_result
    assert result.notes.of("unsure")


@pytest.mark.parametrize("option", ["dataloader_config", "split_batches", "fsdp_plugin"])
def test_what_to_write_for_an_option(option: str) -> None:
    """An option of Accelerate's that is not converted is refused with what to write in its place."""
    (note,) = accelerate(f"{option}=configuration").notes.of("unsure")
    assert f"{option}= is not converted" in note.why
    assert note.fix.startswith(("shard_loader(", "strategy="))


@pytest.mark.parametrize("loads", [False, True])
def test_states_of_optimizers_under_horovod(loads: bool) -> None:
    """A broadcast of an optimizer's state goes; where the script loads one, the list says who must load it."""
    text = (Path(__file__).parent / "cases" / "horovod" / "classic.py").read_text()
    if loads:
        loading = "    optimizer.load_state_dict(torch.load('o.pt'))\n"
        text = text.replace("    hvd.broadcast_p", loading + "    hvd.broadcast_p")
    result = convert(Script(text))
    assert result.is_result
    assert "broadcast_optimizer_state" not in result.text
    notes = [note for note in result.notes if "broadcast_optimizer_state" in note.seen]
    assert any(note.why == "broadcast_optimizer_state is not needed" for note in notes)
    assert [note.fix for note in notes if note.outcome == "left"] == (
        ["optimizer.load_state_dict() on every rank, not on rank 0 alone"] if loads else []
    )


def horovod(old: str, new: str) -> Converted:
    """Convert the classic program with other lines."""
    text = (Path(__file__).parent / "cases" / "horovod" / "classic.py").read_text()
    assert old in text
    return convert(Script(text.replace(old, new)))


def test_weights_that_one_rank_loads_under_horovod() -> None:
    """A broadcast of weights goes; where rank 0 alone has loaded some, the list says who must load them."""
    lines = "    if hvd.rank() == 0:\n        model.load_state_dict(torch.load('m.pt'))\n    hvd.broadcast_p"
    left = horovod("    hvd.broadcast_p", lines).notes.of("left")
    assert "model.load_state_dict() on every rank, not on rank 0 alone" in [note.fix for note in left]


def test_an_optimizer_of_horovods_that_is_told_when_to_exchange() -> None:
    """Names that no plain optimizer has are refused with what to write, and do not stay in the program."""
    result = horovod(
        "            optimizer.step()",
        "            optimizer.synchronize()\n            with optimizer.skip_synchronize():\n"
        "                optimizer.step()",
    )
    assert not result.is_result
    assert "optimizer_step(optimizer, max_norm=…)" in result.notes.of("unsure")[0].fix
    assert horovod(
        "            optimizer.step()", "            optimizer.step()\n            torch.cuda.synchronize()"
    ).is_result


def test_half_precision_of_horovods() -> None:
    """Compression to half precision is named as left out, also where it stands in the call."""
    names = "named_parameters=model.named_parameters()"
    (note,) = horovod(names, f"{names}, compression=hvd.Compression.fp16").notes.of("left")
    assert "not in half precision" in note.why
    assert not horovod(names, f"{names}, compression=hvd.Compression.none").notes.of("left")


SCHEDULED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

def main():
    accelerator = Accelerator({options})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(data, batch_size=4)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    for x in loader:
        with {block}:
            accelerator.backward(model(x).mean())
            {line}
            optimizer.step()

main()
"""


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("schedule.step()", "for _ in range(world_size()): schedule.step()"),
        ("schedule.step(); steps += 1", "[schedule.step() for _ in range(world_size())]; steps += 1"),
        (
            "optimizer.zero_grad(); schedule.step()",
            "optimizer.zero_grad(); [schedule.step() for _ in range(world_size())]",
        ),
        ("if x.any(): schedule.step()", "if x.any(): [schedule.step() for _ in range(world_size())]"),
    ],
)
def test_a_schedule_steps_once_for_each_rank(line: str, becomes: str) -> None:
    """What stands beside it on its line is done once, as before."""
    result = convert(Script(SCHEDULED.format(options="", block="accelerator.autocast()", line=line)))
    assert result.is_result
    assert becomes in [each.strip() for each in result.text.splitlines()]


@pytest.mark.parametrize("line", ["optimizer.step(); steps += 1", "optimizer.step(); optimizer.zero_grad()"])
def test_what_stands_beside_a_step_that_accumulates(line: str) -> None:
    """A statement that is done for each batch is not put with the step under the end of a window."""
    options, block = "gradient_accumulation_steps=2", "accelerator.accumulate(model)"
    result = convert(Script(SCHEDULED.format(options=options, block=block, line=line)))
    assert result.is_result == ("steps" not in line)
    assert [note.fix for note in result.notes.of("unsure")] == ["it on a line of its own"] * ("steps" in line)


@pytest.mark.parametrize(
    ("code", "becomes"),
    [
        ('fabric.load("out", {"model": model})', 'load("out", into={"model": model})'),
        ('rest = fabric.load("out", state)', 'rest = load("out", into=state)'),
        ('fabric.load("out", state, strict=False)', 'loaded = load("out", into=state, strict=False)'),
        ("print(fabric.all_gather(x).mean())", "print(gather(x).mean())"),
        ("x = fabric.to_device(x)", "x = to_device(x)"),
        (
            "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
            "torch.nn.utils.clip_grad_norm_(model.parameters(), ",
        ),
    ],
)
def test_names_of_fabric(code: str, becomes: str) -> None:
    """Each use becomes what docs/reference/names.md says."""
    result = convert(Script(FABRIC.format(code=code)))
    assert result.is_result, [each.text("x.py") for each in result.notes]
    assert f"    {becomes}" in result.text
    assert "with no_sync(model, enabled=step % 2 == 0):" in result.text


@pytest.mark.parametrize(
    ("precision", "is_scaled"), [("16", True), ("16-mixed", True), ("bf16-mixed", False), ("32-true", False)]
)
def test_a_clip_by_fabric(precision: str, is_scaled: bool) -> None:
    """Gradients that the precision scales are not clipped as they are; others are."""
    code = FABRIC.format(code="fabric.clip_gradients(model, optimizer, max_norm=1.0)")
    given = code.replace('Fabric(accelerator="auto")', f'Fabric(accelerator="auto", precision="{precision}")')
    assert given != code
    assert convert(Script(given)).is_result != is_scaled


def test_a_stack_is_refused() -> None:
    """What Fabric stacks, and gather joins, is left where its shape matters."""
    assert not convert(Script(FABRIC.format(code="x = fabric.all_gather(x)"))).is_result
