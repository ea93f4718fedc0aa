"""Which behaviours of the conformance suite DeepSpeed's engine refuses, by stage, and why."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

REFUSES = {
    "torchs_own_clip": "the engine has the gradients",
    "lbfgs": "it steps along one direction for all parameters together",
    "two_optimizers": "an engine steps one",
    "group_added_later": "an engine cannot add one",
    "float64": "an engine trains a copy in float32",
    "dropout_goes_by_share": "it computes gradients without an optimizer, and an engine takes both",
    "never_prepared": "wrap_optimizer makes the engine",
    "plain_backward_and_step": "the engine has a backward of its own",
    **(
        {}
        if get_accelerator().is_fp16_supported()
        else dict.fromkeys(("fp16", "fp16_overflow", "fp16_clip"), "DeepSpeed has no float16 on this processor")
    ),
}
REFUSES_IN_STAGE_3 = {
    **REFUSES,
    "changed_by_hand": "the weights are divided: they are changed within gathered_weights()",
}
DTYPE = torch.float32  # of an engine's own copy of the weights


def refuses(stage: int) -> dict[str, str]:
    """Return what a stage refuses, each with the reason."""
    return REFUSES_IN_STAGE_3 if stage == 3 else REFUSES
