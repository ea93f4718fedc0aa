"""Mistakes that a loop on several ranks can have without a word, each with an id and what helps."""

from __future__ import annotations

import re
from typing import NamedTuple


class Mistake(NamedTuple):
    """One kind of mistake.

    Attributes:
        id: by which it is known everywhere.
        name: in short.
        what: what it is.
        rule: what helps.
    """

    id: str
    name: str
    what: str
    rule: str


_TEXTS = {
    "DW101 multiplied-by-ranks": (
        "the gradients of all ranks were added, or a loss was multiplied by the number of ranks",
        "let the loss be a mean over the rank's samples: the exchange takes the mean over the ranks",
    ),
    "DW102 divided-by-ranks": (
        "each rank's gradient is 1/n of one process's: the loss is a sum over the batch, or is divided once too often",
        "take the mean over the rank's samples, or multiply a sum by distwrap.world_size()",
    ),
    "DW103 uneven-mean": (
        "the mean over the ranks is not that over the samples: uneven parts weigh alike, or a loss is over pairs",
        "weigh each rank's loss by its part with distwrap.scale_loss(), or gather() what the loss compares",
    ),
    "DW104 not-exchanged": (
        "the ranks step with gradients of their own",
        "call the wrapped model itself, and leave the last backward before a step out of no_sync()",
    ),
    "DW105 gradients-changed": (
        "the gradients were changed beside their exchange, and not as in one process",
        "clip, scale or reduce gradients after their exchange, by a number that all ranks share",
    ),
    "DW201 samples-twice": (
        "several ranks train on the same samples",
        "give the loader to distwrap.shard_loader(), or cut each batch with distwrap.split()",
    ),
    "DW202 samples-missing": (
        "some samples of the step are trained on by no rank",
        "shard the data once: no slice, sampler or batch size by rank before shard_loader()",
    ),
    "DW203 other-samples": (
        "the ranks together train on other samples than one process does in this step",
        "let all ranks shuffle alike, by one seed, and call set_epoch() on a sampler of your own",
    ),
    "DW204 number-of-a-part": (
        "a number that is printed or returned is of one rank's part, or adds up what a mean should weigh",
        "take distwrap.mean(value, count), the mean over all ranks' samples",
    ),
    "DW301 learning-rate": (
        "the learning rate depends on the number of ranks",
        "scale it, and count the steps of a schedule, by what does not change with the ranks",
    ),
    "DW302 steps": (
        "the number of optimizer steps depends on the number of ranks",
        "let no rank skip a step, or leave a loop, by itself: distwrap.agree() or distwrap.lockstep()",
    ),
    "DW401 weights-apart": (
        "the weights differ although the gradients and learning rates are alike",
        "change weights, optimizer state and buffers on all ranks alike",
    ),
    "DW402 batch-statistics": (
        "layers normalize by the statistics of the rank's part of the batch",
        "say wrap_model(model, sync_batchnorm=True), or take GroupNorm",
    ),
    "DW403 state-lost": (
        "what goes on from a checkpoint is not what was cut off",
        "save and resume all that changes: model, optimizer, scheduler, loader, and numbers of the loop's own",
    ),
    "DW501 failed": ("the loop fails on several ranks, and not in one process", "see the error"),
}
CATALOGUE = tuple(Mistake(*known.partition(" ")[::2], *texts) for known, texts in _TEXTS.items())
BY_NAME = {mistake.name: mistake for mistake in CATALOGUE}


def is_ignored(line: str, mistake: str = "") -> bool:
    """Return whether a comment on a line of code ignores all findings, or those with an id.

    Example:
        >>> [is_ignored("f()  # distwrap: ignore[DW101, DW204]", each) for each in ("DW204", "DW103", "")]
        [True, False, False]
        >>> is_ignored("f()  # distwrap: ignore", "DW103")
        True
    """
    found = re.search(r"#\s*distwrap:\s*ignore\b(?:\[([^]]*)\])?", line)
    return found is not None and (found[1] is None or mistake in re.split(r"[\s,]+", found[1]))
