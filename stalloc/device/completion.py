"""When work on the virtual GPU is done, by choice."""

from typing import Literal, get_args

VARIABLE = "STALLOC_VIRTUAL_COMPLETION"  #: for a process and those that it starts
Completion = Literal["at-once", "timeline", "at-waits"]
"""By the time anybody asks; when it would be on a GPU, by estimated times; not before the host waits for it."""
COMPLETIONS: tuple[Completion, ...] = get_args(Completion)
