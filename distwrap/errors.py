"""The errors of distwrap.

DistwrapError
├── OptionError (ValueError)              an option of @distributed, or its environment variable, is wrong
├── RemovedError (ImportError)            a function that distwrap had, with what to write instead
├── PlacementError (RuntimeError)         the environment says half of the rank and world size, or contradicts itself
├── LaunchError (RuntimeError)            the ranks cannot be started this way
│   ├── ForkError                         forking this process now would not be safe
│   ├── MainGuardError                    a fresh interpreter would import the script and launch again
│   └── SerializationError (TypeError)    the function, an argument or a result cannot be pickled
├── WorkerError (RuntimeError)            a rank failed: knows rank, host, exitcode and signal
│   ├── WorkerTraceback                   the cause of an exception that a rank raised: the traceback on that rank
│   ├── WorkerDiedError                   the process of a rank ended without a report
│   └── WorkerTimeoutError (TimeoutError) the ranks were not done in time
├── ArrivalError (TimeoutError)           not all ranks arrived at the rendezvous in time
├── CollectiveError (RuntimeError)        the ranks disagree about what they exchange
│   ├── CollectiveTimeoutError (TimeoutError) not all ranks called a collective in time
│   ├── DeadlockError                     no simulated rank can go on
│   └── CollectiveInRankZeroError         a collective in code that only some ranks run, so that it would never end
├── LoaderError (ValueError)              a loader cannot be sharded safely, or all ranks get the same data
├── ModelError (RuntimeError)             a model cannot be wrapped, or is used in a way that would train wrongly
│   └── DriftError                        the ranks hold other weights, so that something has trained wrongly already
├── PrecisionError (RuntimeError)         a step that would be wrong in this precision
├── StateDictError (ValueError)           keys collide, or do not fit the model
├── CheckpointError (RuntimeError)        a checkpoint could not be written, or holds what is not safe to load
├── ConversionError (ValueError)          a script cannot be read, or not be converted or checked
├── ConformanceError (AssertionError)     a strategy does not behave as distwrap's helpers need it
└── ProofError (AssertionError)           a loop does not compute on several ranks what it does in one process

Each leaf is also the builtin error of the same meaning, so code that catches ``ValueError`` goes on working.
"""

from distwrap.frames import hide_from_pytest


class DistwrapError(Exception):
    """Base class of all errors that distwrap raises.

    Attributes:
        secondary: whether a rank raises this only because another rank has failed, whose failure explains it.
    """

    secondary = False

    def __init__(self, *args: object, secondary: bool = False) -> None:
        super().__init__(*args)
        if secondary:
            self.secondary = True
        hide_from_pytest()  # now, since many modules are imported only when they are needed


class OptionError(DistwrapError, ValueError):
    """An option of ``@distributed``, or the environment variable that overrides it, is wrong."""


class RemovedError(DistwrapError, ImportError):
    """A function that distwrap had before is asked for.

    It is an `ImportError`, so that ``from distwrap import`` shows it, and no `AttributeError`: `hasattr` raises it too.
    """


class PlacementError(DistwrapError, RuntimeError):
    """The environment gives this process only half of its rank and world size, or contradicts itself."""


class LaunchError(DistwrapError, RuntimeError):
    """The ranks cannot be started this way."""


class ForkError(LaunchError):
    """Forking this process now would not be safe."""


class MainGuardError(LaunchError):
    """The script would launch its ranks again in each of them, since the call is not under a main guard."""


class SerializationError(LaunchError, TypeError):
    """The function, an argument or a result cannot be pickled."""


class WorkerError(DistwrapError, RuntimeError):
    """A rank failed.

    Attributes:
        rank: the rank that failed first.
        host: the name of its host.
        exitcode: the exit code of its process, or ``None`` if the process was still running.
        signal: the number of the signal that ended it, or ``None``.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        exitcode: int | None = None,
        signal: int | None = None,
        secondary: bool = False,
    ) -> None:
        super().__init__(message, secondary=secondary)
        self.rank, self.host, self.exitcode, self.signal = rank, host, exitcode, signal


class WorkerTraceback(WorkerError):
    """The traceback of an exception on its rank, which is the ``__cause__`` of the same exception in the caller.

    Attributes:
        text: the traceback alone.
    """

    text = ""

    def __str__(self) -> str:
        return "\n" + super().__str__()


class WorkerDiedError(WorkerError):
    """The process of a rank died without raising an exception, as when it was killed."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The ranks did not finish in time."""


class ArrivalError(DistwrapError, TimeoutError):
    """Not all ranks arrived at the rendezvous in time."""


class CollectiveError(DistwrapError, RuntimeError):
    """The ranks disagree about what they exchange."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Not all ranks called a collective in time; the message says where each of them was."""


class DeadlockError(CollectiveError):
    """No rank of a simulation can go on: the message says for what each waits, and where."""


class CollectiveInRankZeroError(CollectiveError):
    """A collective was called in code that only some ranks run, as in ``rank_zero_only``, and would never end."""


class LoaderError(DistwrapError, ValueError):
    """A loader cannot be sharded safely."""


class ModelError(DistwrapError, RuntimeError):
    """A model cannot be wrapped, or is used in a way that would train wrongly."""


class DriftError(ModelError):
    """The ranks do not hold the same weights, so the training has gone wrong already."""


class PrecisionError(DistwrapError, RuntimeError):
    """A step would be wrong in this precision."""


class StateDictError(DistwrapError, ValueError):
    """Keys of a state dict collide, or do not fit the model."""


class CheckpointError(DistwrapError, RuntimeError):
    """A checkpoint could not be written, or is not safe to load."""


class ConversionError(DistwrapError, ValueError):
    """A script cannot be read, converted or checked."""


class ConformanceError(DistwrapError, AssertionError):
    """A strategy does not behave as the helpers of a hand-written loop need it; the message lists what failed."""


class ProofError(DistwrapError, AssertionError):
    """A loop does not compute on several ranks what it computes in one process; the message names the difference."""
