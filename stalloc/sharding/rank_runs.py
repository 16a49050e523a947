"""Runs of a program for sharding, each in a fork: as it is, with marks; and as the first of many ranks.

Contract: this process is on the virtual GPU and has not used it. A rank runs alone, on a process group whose others are
not there (`sizing/fake_ranks.py`). What a program cannot do is a sentence, never an exception of the child's.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from stalloc.errors import SetupError
from stalloc.forked_child import ForkedChild, first_ended
from stalloc.sandbox import ProgramFiles
from stalloc.sharding.rank_work import RESULT, RankWork, perform
from stalloc.sharding.step_marks import StepMarks


@dataclass(frozen=True)
class RankSeen:
    """What one rank held."""

    failure: str = ""  #: why there is nothing else
    step_bytes: int = 0  #: asked for at the most, in a step that makes no state
    making_bytes: int = 0  #: the same until the model was divided
    step_allocated: int = 0  #: allocated at the most, as PyTorch counts blocks, in the step
    making_allocated: int = 0  #: the same before
    reserved_bytes: int = 0  #: by PyTorch's own allocator

    @property
    def needed_bytes(self) -> int:
        """Allocated at any time."""
        return max(self.step_allocated, self.making_allocated)


class ShardRuns:
    """Runs of one program, a function that gives its exit code."""

    def __init__(self, program: Callable[[], int], files: ProgramFiles, limit_seconds: float) -> None:
        self._program, self._files, self._limit_seconds = program, files, limit_seconds

    def marks(self, work: RankWork) -> StepMarks:
        """The marks of a step as it is. Raises SetupError where the program cannot be recorded."""
        text, output = self._run(work)
        if text is None:
            raise SetupError(f"the program failed before its steps were recorded: {_why(output)}")
        found = StepMarks.from_json(json.loads(text))
        if not found.marks:
            raise SetupError(
                "no step could be recorded: the program needs a model that it calls, an optimizer of torch.optim and "
                "three steps."
            )
        return found

    def rank(self, work: RankWork) -> RankSeen:
        """What one rank, run by itself, was seen to need."""
        text, output = self._run(work)
        if text is None:
            return RankSeen(_why(output))
        told = json.loads(text)
        if not told["steps"]:
            return RankSeen("it made no step")
        (step, step_allocated), (making, making_allocated) = told["steps"][-1], told["making"]
        return RankSeen("", step, making, step_allocated, making_allocated, told["reserved_bytes"])

    def _run(self, work: RankWork) -> tuple[str | None, str]:
        variables = {"STALLOC": "", "STALLOC_CACHE": "off", "STALLOC_TRIAL": "1"}
        if work.rank is not None:
            variables |= work.rank.variables()
        with ForkedChild(
            lambda folder: perform(folder, self._program, work), variables, self._files.sandbox()
        ) as child:
            ended = first_ended([child], self._limit_seconds)
            child.end()
            result = child.folder / RESULT
            text = result.read_text(encoding="utf-8") if result.exists() else None
            output = child.output() if ended else f"it took more than {self._limit_seconds:g} s (--trial-seconds)"
        self._files.note(child.files)
        return text, output


def _why(output: str) -> str:
    """The last error of a program's output."""
    errors = re.findall(r"^(?:[\w.]*Error|[\w.]*Exception): (.*)", output, re.MULTILINE)
    lines = [line for line in output.splitlines() if line.strip()]
    return (errors or lines or ["it said nothing"])[-1]
