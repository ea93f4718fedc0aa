"""Options of other packages are answered with what to write here, and its value."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch

from distwrap.decorator import distributed
from distwrap.errors import OptionError
from distwrap.former_options import _TABLE, for_option, for_variable
from distwrap.options import DECLARATIONS, VARIABLES, Options


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("devices", 4, "Write nprocs=4."),
        ("devices", 1, "Write nprocs=1."),
        ("gpus", "2", "Write nprocs=2."),
        ("devices", "auto", 'Write nprocs="auto". It is the default.'),
        ("devices", -1, 'Write nprocs="auto". It is the default.'),
        ("devices", [0, 2], "Write nprocs=2. To choose the devices, set CUDA_VISIBLE_DEVICES=0,2 in the environment."),
        ("gpus", "0,2", "Write nprocs=2. To choose the devices, set CUDA_VISIBLE_DEVICES=0,2 in the environment."),
        ("gpus", 2, "Write nprocs=2."),
        ("num_workers", "1", "Write nprocs=1. "),
        ("devices", True, 'Write nprocs="auto". It is the default.'),
        ("devices", "4", "Write nprocs=4."),
        ("gpus", 0, "Write nprocs=1. To compute on the CPU, hide the accelerators"),
        ("gpus", None, "Leave it out, or write nprocs=1 for one process."),
        ("devices", "cuda:1", "Write nprocs=…."),
        ("gpu", 1, "Write nprocs=1. To choose the devices, set CUDA_VISIBLE_DEVICES=1 in the environment."),
        ("cuda_visible_devices", "2", "Write nprocs=1. To choose the devices, set CUDA_VISIBLE_DEVICES=2 in the "),
        ("num_gpus", 2, "Write nprocs=2."),
        ("nproc_per_node", 8, "Write nprocs=8."),
        ("nprocs_per_node", 8, "Write nprocs=8."),
        ("world_size", 8, "Write nprocs=8. It counts the processes of one node."),
        ("num_processes", 8, "Write nprocs=8. It counts the processes of one node."),
        ("num_nodes", 2, "Write nnodes=2."),
        ("machine_rank", 1, "Write node_rank=1."),
        ("mixed_precision", "no", 'Write precision="32". It is the default.'),
        ("mixed_precision", "fp16", 'Write precision="fp16".'),
        ("mixed_precision", "bf16", 'Write precision="bf16".'),
        ("mixed_precision", "fp8", 'Write precision="bf16". Nothing here computes in 8 bits.'),
        ("amp", False, 'Write precision="32". It is the default.'),
        ("amp", True, 'Write precision="bf16". Or "fp16", on devices without bfloat16; losses are then scaled.'),
        ("fp16", True, 'Write precision="fp16".'),
        ("accelerator", "tpu", 'Write strategy="xla".'),
        ("accelerator", "mps", 'Write strategy="mps".'),
        (
            "init_method",
            "tcp://node1:29500",
            'Write rdzv_endpoint="node1:29500". Leave it out where there is one node: a ',
        ),
        ("init_method", "env://", "Leave it out: the variables of a launcher are read by themselves."),
        ("master_port", 29500, 'Write rdzv_endpoint="HOST:29500". Leave it out where there is one node: '),
        ("master_addr", "node1", 'Write rdzv_endpoint="node1:29400". '),
        (
            "gradient_accumulation_steps",
            4,
            "It belongs to the loop: for batch, window in accumulate(loader, 4, model).",
        ),
        ("find_unused_parameters", True, "It belongs to wrap_model(model, find_unused_parameters=True), or to "),
        ("start_method", "spawn", 'Write launcher="spawn".'),
        ("fsdp_plugin", object(), 'Write strategy="fsdp".'),
        ("fsdp", False, "Leave it out"),
        ("deepspeed", None, "Leave it out"),
        ("fp16", {"enabled": True}, 'Write precision="fp16".'),
        ("fp16", {"enabled": False}, 'Write precision="32".'),
        ("mixed_precision", "64-true", 'Write precision="32". Types stay: a model in float64'),
        ("dtype", torch.float64, 'Write precision="32". Types stay: a model in float64'),
        ("mixed_precision", "16-true", 'Write precision="fp16". Its weights stay in float32'),
        ("mixed_precision", "tf32", 'Write precision="32". TF32 is torch.set_float32_matmul_precision("high").'),
    ],
)
def test_what_to_write(name: str, value: Any, answer: str) -> None:
    """Each names the option here, with the value that means the same."""
    assert for_option(name, value).startswith(answer)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("accelerator", "gpu", "distwrap takes the accelerator that torch has"),
        ("accelerator", "cpu", "CUDA_VISIBLE_DEVICES="),
        ("cpu", True, "CUDA_VISIBLE_DEVICES="),
        ("plugins", [], "clusters are found by themselves"),
        ("rank", 0, "distwrap numbers the ranks"),
    ],
)
def test_what_is_left_out(name: str, value: Any, words: str) -> None:
    """An option that nothing here needs is answered with why."""
    assert for_option(name, value).startswith("Leave it out")
    assert words in for_option(name, value)


@pytest.mark.parametrize("value", [2, "2", "auto", "no", None, True, [0, 1], object(), "tcp://a:1", 2.5, "x" * 100])
def test_every_row_answers_any_value(value: Any) -> None:
    """Whatever the value is, the answer is sentences; and what it says to write is an option that there is."""
    for name in _TABLE:
        answer = for_option(name, value)
        assert answer.endswith("."), (name, answer)
        assert "None" not in answer or value is None, (name, answer)
        if written := re.match(r"Write (\w+)=(\S+?)\.(?: |$)", answer):
            assert written[1] in DECLARATIONS or written[1] == "log_dir", (name, answer)
        assert name not in DECLARATIONS


def test_what_is_to_be_written_is_taken() -> None:
    """The decorator takes the options that the answers name, with their values."""
    for name, value in [("devices", 2), ("mixed_precision", "no"), ("mixed_precision", "fp16"), ("accelerator", "mps")]:
        found = re.match(r"Write (\w+)=(\S+?)\.(?: |$)", for_option(name, value))
        assert found is not None
        if found[1] != "strategy":  # which needs that device
            Options().updated({found[1]: ast.literal_eval(found[2])})


def test_nobody_brings_a_word_that_is_unknown() -> None:
    """A name that is in no table is left to the nearest name."""
    assert for_option("nproc", 2) == for_variable("DISTWRAP_NPROC", "2", VARIABLES) == ""


def test_the_error_comes_before_anything_starts() -> None:
    """The decorator refuses such an option at once, and lists the options that there are."""
    with pytest.raises(
        OptionError, match=r"^@distributed: unknown option 'devices'\. Write nprocs=4\. Known: backend, "
    ):
        distributed(devices=4)  # type: ignore[call-overload]


@pytest.mark.parametrize("text", ["--1", "²", "", "-"])
def test_a_variable_that_is_no_number(text: str) -> None:
    """What looks like a number to some is answered like any other text."""
    assert for_variable("DISTWRAP_DEVICES", text, VARIABLES).endswith(".")
