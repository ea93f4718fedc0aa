"""`distwrap.testing.prove`: a proof that fails a test where a loop differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distwrap.errors import ProofError
from distwrap.prove.proof import Proof, prove as proven
from distwrap.prove.world import Program


def prove(
    fn: Callable[..., Any],
    *args: Any,
    keywords: Mapping[str, Any] | None = None,
    ranks: Sequence[int] = (2, 3, 4),
    steps: int = 12,
    batch: int | None = None,
    epochs: int = 0,
    resume: bool = False,
    real: bool = False,
) -> Proof:
    """Prove that a loop computes on several simulated ranks what it computes in one process.

    Args:
        fn: a function with the loop, decorated or not.
        *args: its arguments.
        keywords: its arguments by name.
        ranks: numbers of ranks to compare with one process.
        steps: of optimizers, after which a rank has been seen enough.
        batch: size of the batch of all ranks together, which all numbers of ranks divide.
        epochs: in the place of steps: so many epochs, of ``steps`` batches at most.
        resume: whether it stops after its steps on the first number of ranks, goes on with the second from what it
            has saved in its folder, and is compared from there on.
        real: whether the ranks are processes, rather than simulated.

    Returns:
        The proof, which says what was compared.

    Raises:
        ProofError: something differs, or there was nothing to compare; the message names it.
        OptionError: a number of ranks does not divide the batch, or is below 2.

    Example:
        >>> import distwrap, torch
        >>> def train():
        ...     torch.manual_seed(0)
        ...     model = distwrap.wrap_model(torch.nn.Linear(1, 1))
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     model(torch.ones(12, 1)).mean().backward()
        ...     optimizer.step()
        >>> prove(train, ranks=[2]).verdict
        'equal'
    """
    program = Program("", args, keywords or {}, function=fn, real=real, steps=steps, epochs=epochs, batch=batch)
    proof = proven(program, ranks=ranks, resume=resume)
    if proof.exit_code:
        raise ProofError(str(proof))
    return proof
