"""Every error that stalloc raises on purpose: one sentence of what happened, where, and what to do next.

Sentences quote files, names and arguments of strangers; whoever shows one shows printable characters only.
"""

from stalloc.printable import MAX_SENTENCE, printable


class StallocError(Exception):
    """Base of all errors that stalloc raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__(), MAX_SENTENCE)


class BadInputError(StallocError, ValueError):
    """A file or an argument is not what it has to be; the command line ends with exit code 2."""


class NotATraceError(BadInputError):
    """A file cannot be read as a trace; `file` is its name, as it was given."""

    def __init__(self, sentence: str, file: str) -> None:
        super().__init__(sentence)
        self.file = file


class SetupError(StallocError, RuntimeError):
    """Something this machine lacks (a compiler, a library, a device) stops the work; exit code 2."""


class CorruptionError(StallocError, RuntimeError):
    """STALLOC_POISON=1 found memory that was written by somebody who did not own it."""


class EndlessLoopError(StallocError, RuntimeError):
    """A loop of the program waits for a value that the virtual GPU does not compute."""


class MissingRankError(StallocError, RuntimeError):
    """A program of several ranks waits for what another one sends, which a dry run of one rank does not have."""


class PlanError(StallocError, ValueError):
    """A plan does not fit the trace or the device that it is used for."""


class RecomputeError(StallocError, RuntimeError):
    """A block cannot be computed a second time with the same result, so its gradients would be wrong."""


class GradientError(StallocError, RuntimeError):
    """A gradient is needed that the optimizer's step in the backward pass has used up already."""


class GraphMemoryError(StallocError, RuntimeError):
    """A CUDA graph would overwrite what the program borrowed of its memory, and was not replayed or captured."""


class StreamError(StallocError, RuntimeError):
    """A layer whose parameters are streamed is used in a way in which its values would not be right."""


class DiskError(StallocError, RuntimeError):
    """State of an optimizer cannot be read from its file, or written to it; what was committed is whole."""


class OffloadError(StallocError, RuntimeError):
    """What backward needs was changed after it was saved, so gradients would be wrong."""
