"""The matrix of equality: strategies, optimizers, kinds of step, precisions and ways of launch, in rows by pairs.

What does not go together stands in `FORBIDDEN`, with the reason. All other pairs come up in some row of `ROWS`.
"""

from __future__ import annotations

from typing import NamedTuple

from distwrap import FSDPStrategy, Strategy
from tests.conformance.cells import NodesOfOne
from tests.equality.pairs import Pair, covering_rows
from tests.plans import TP, TWO_BY_TWO

STRATEGIES: dict[str, str | Strategy] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "pipeline": "pipeline",
    "zero1": "zero1",
    "zero2": "zero2",
    "tp": TP,
    "ddp2": NodesOfOne(),
    "auto": "auto",
    "hsdp": FSDPStrategy(shard=2),
    "fsdp+tp": TWO_BY_TWO,
    "dp": "dp",
}
OPTIMIZERS = ("sgd", "adam", "groups", "adagrad", "rmsprop", "lbfgs")
STEPS = (
    "plain", "helpers", "accumulate", "count", "clip", "closure", "two optimizers", "two models", "frozen", "retrofit",
    "uneven", "overflow",
)  # fmt: skip
PRECISIONS = ("float64", "float32", "bf16", "fp16")
LAUNCHES = ("forkserver", "fork", "spawn", "script", "torchrun", "elastic", "one rank", "four ranks")
RANKS = {"one rank": 1, "four ranks": 4}  # else two

DIMENSIONS = {
    "strategy": tuple(STRATEGIES),
    "step": STEPS,
    "launch": LAUNCHES,
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
}


class Row(NamedTuple):
    """One training, which must end with the weights of one process."""

    strategy: str
    step: str
    launch: str
    optimizer: str
    precision: str

    def __str__(self) -> str:
        return ", ".join(self)

    @property
    def is_fast(self) -> bool:
        """Whether it is part of `make test`."""
        return self.launch == "forkserver" and self.strategy in ("ddp", "fsdp", "pipeline")


# What does not go together: one value, the others, and why.
_FORBIDDEN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("hsdp", tuple(each for each in LAUNCHES if each != "four ranks"), "it is divided twice, over four ranks"),
    ("fsdp+tp", tuple(each for each in LAUNCHES if each != "four ranks"), "it is divided twice, over four ranks"),
    (
        "four ranks",
        tuple(each for each in STRATEGIES if each not in ("hsdp", "fsdp+tp")),
        "two ranks show it, and those of the forkserver come again on three and four in `make nightly`",
    ),
    ("dp", tuple(each for each in LAUNCHES if each != "one rank"), "it is one process"),
    ("lbfgs", ("zero1", "zero2", "fsdp", "hsdp", "tp", "fsdp+tp", "pipeline"), "refused: it needs one whole vector"),
    ("lbfgs", ("four ranks",), "refused by both that need them"),
    ("lbfgs", ("clip", "overflow", "bf16", "fp16"), "it makes of a rounded gradient another direction altogether"),
    ("lbfgs", ("two optimizers", "two models"), "it computes the gradients again, and the other one's with them"),
    ("pipeline", ("two models",), "refused: no gradient goes back to what its model is given"),
    ("fp16", ("plain", "closure", "retrofit"), "the loss is scaled by distwrap.backward, which they do not call"),
    ("overflow", ("float64", "float32", "bf16"), "they have no scale"),
)
FORBIDDEN: dict[Pair, str] = {frozenset((one, other)): why for one, others, why in _FORBIDDEN for other in others}

ROWS = [Row(*values) for values in covering_rows(DIMENSIONS, FORBIDDEN)]


def group(launch: str, is_fast: bool) -> list[Row]:
    """Return the rows of a launch that are part of `make test`, or the others."""
    return [row for row in ROWS if (row.launch, row.is_fast) == (launch, is_fast)]
