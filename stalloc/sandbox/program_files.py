"""The files of a program that a verb runs, once or many times: in a sandbox each, unless the user wants real writes."""

import os
from collections.abc import Sequence

from stalloc.private import SANDBOX_VARIABLE
from stalloc.sandbox.sandbox import Sandbox
from stalloc.sandbox.ways import way
from stalloc.sandbox.written import Files, merged


class ProgramFiles:
    """Where a program's writes go, and what became of its files in each run."""

    def __init__(self, command: Sequence[str], *, keep: bool) -> None:
        """`keep`: writes are real. Raises SetupError where nothing keeps them from files otherwise."""
        self._command = command
        self._seen: list[Files] = []
        self.is_real = keep or bool(os.environ.get(SANDBOX_VARIABLE))  # an outer sandbox takes what is written in ours
        if not self.is_real:
            way().check()

    def sandbox(self) -> Sandbox | None:
        """For the next run; None where writes are real."""
        return None if self.is_real else Sandbox(self._command)

    def note(self, files: Files) -> None:
        """Remember what became of the files of a run."""
        self._seen.append(files)

    def all(self) -> Files:
        """What became of the files of all runs together."""
        return merged(self._seen)
