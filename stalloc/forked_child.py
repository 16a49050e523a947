"""A fork of this process that does one piece of work, watched from outside.

Contract: the child starts from what this process has imported, so that it costs what its work costs; it has an empty
standard input, what it prints is kept away, and it ends without what Python does at its end. It, and whatever it has
started in its process group, is gone once `end` returns. In a sandbox it changes no file of the user's.
"""

import contextlib
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self

from stalloc.errors import StallocError
from stalloc.notices import say
from stalloc.sandbox import Files, Sandbox

_WATCH_SECONDS = 0.5


class ForkedChild:
    """One child; a context manager that ends it and removes its folder."""

    def __init__(
        self, work: Callable[[Path], None], variables: Mapping[str, str], sandbox: Sandbox | None = None
    ) -> None:
        """Fork. `work` gets a folder that both see; `variables` of the child, those that are empty are unset."""
        self._sandbox = sandbox
        self.folder = sandbox.folder if sandbox is not None else Path(tempfile.mkdtemp(prefix="stalloc-trial-"))
        self.files = Files()
        """The files that the child wrote, once it has ended."""
        self.exit_code = 0
        """Its own, or -N if signal N has ended it, once it has ended."""
        self.overrun = ""
        """Why it was ended before it had done its work, if what it wrote took too much room."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _become_child(self.folder, work, variables, sandbox)
        self._has_ended = False
        self._watched = os.pidfd_open(self._pid)

    def fileno(self) -> int:
        return self._watched

    def starved_seconds(self) -> float:
        """How long its threads waited for a processor that others had, all together; 0 if that is not known."""
        waited = 0
        for thread in Path(f"/proc/{self._pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited += int(thread.read_text(encoding="ascii").split()[1])
        return 1e-9 * waited

    def end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        for kill, target in ((os.killpg, self._pid), (os.kill, self._pid)):  # the group may not be there yet
            try:
                kill(target, signal.SIGKILL)
                break
            except (ProcessLookupError, PermissionError):
                continue
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._watched)

    def check_room(self) -> None:
        if self._sandbox is not None and not self.overrun and (overrun := self._sandbox.overrun()):
            self.overrun = overrun
            os.kill(self._pid, signal.SIGKILL)

    def output(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "output").read_text(encoding="utf-8", errors="replace")
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        if self._sandbox is not None:
            self.files = self._sandbox.end()
            self._sandbox = None
        shutil.rmtree(self.folder, ignore_errors=True)


def first_ended(children: Sequence[ForkedChild], limit_seconds: float | None = None) -> list[ForkedChild]:
    until = math.inf if limit_seconds is None else time.monotonic() + limit_seconds
    while True:
        left = max(0.0, min(until - time.monotonic(), _WATCH_SECONDS))
        ended: list[ForkedChild] = select.select(children, [], [], left)[0]
        if ended or time.monotonic() >= until:
            return ended
        for child in children:
            child.check_room()


def _become_child(
    folder: Path, work: Callable[[Path], None], variables: Mapping[str, str], sandbox: Sandbox | None
) -> NoReturn:
    """Never comes back, whatever happens."""
    code = 1
    try:
        os.setpgid(0, 0)
        for name, value in variables.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value else {})
        nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(folder / "output", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (it lives as long as the process)
        if sandbox is not None:
            sandbox.enter()
        work(folder)
        code = 0
    except SystemExit:
        pass  # what the program said of its failure is in its output
    except StallocError as error:
        say(str(error))
        code = 2
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
