"""What of the conformance suite holds for peers: all but the exact numbers of each step, which peers do not promise."""

from __future__ import annotations

import torch

from distwrap.strategies.hivemind import HivemindStrategy
from tests.conformance.base import check
from tests.conformance.behaviours import ALL

HOLDS = (
    "an_exception_ends_all_ranks",
    "averages_go_by_share",
    "bf16_outputs",
    "deepcopy",
    "evaluation_on_one_share",
    "is_an_instance",
    "load_plain_keys",
    "load_prefixed_keys",
    "loaders_go_by_share",
    "no_step_within_a_window",
    "no_trainable_parameters",
    "objects_go_by_rank",
    "parameter_names",
    "pickling",
    "ranks_are_in_sync",
    "state_dict_has_plain_keys",
    "state_is_the_plain_one",
    "submodules",
    "training_flag",
    "uneven_evaluation",
    "unwrapping",
    "wrapping_twice",
)
REFUSES = {
    "lbfgs": "it needs a closure in each step, and a global step comes without",
    "never_prepared": "the step of an optimizer that is not wrapped would train the ranks apart",
    **dict.fromkeys(("fp16", "fp16_overflow", "fp16_clip"), "each peer would scale its losses on its own"),
}
# Not asked: every behaviour that compares weights with one process after some steps, since a global step takes the
# samples that are there when peers meet, and the sample that comes a moment later counts for the next; `batch_norm`,
# whose statistics are each rank's own until weights are averaged; and `float64`, which is refused: the suite is in
# float32 here.


def test_it_conforms() -> None:
    """On two ranks, in float32, in which peers average."""
    strategy = HivemindStrategy(batch_size=1, matchmaking_seconds=0.5, averaging_seconds=5.0)
    only = {*HOLDS, *REFUSES}
    assert only <= ALL
    check(strategy, 2, only, REFUSES, torch.float32)
