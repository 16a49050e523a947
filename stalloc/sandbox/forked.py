"""A verb's program in a fork of this process, which is in a sandbox; this process waits, and tells what became of it.

Contract: the fork goes on where this was called, in the same group of processes, with the same standard streams. A
signal that ends programs (Ctrl-C, SIGTERM) reaches it once, whether it is sent to this process, as by kill, or to the
whole group, as by a terminal: a second one would end it before it has reported.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from stalloc.errors import SetupError
from stalloc.files import write_whole
from stalloc.live_file import be_known_as
from stalloc.notices import say
from stalloc.sandbox.sandbox import Sandbox
from stalloc.sandbox.written import Files

_RESULT = "result.json"
_WATCH_SECONDS = 0.5
_NOTICE_SECONDS = 0.1
_FROM_KERNEL = 0x80  #: SI_KERNEL, which the signal module does not name
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


_is_fork = False


def is_fork() -> bool:
    """Whether this process is one that runs a program in a sandbox."""
    return _is_fork


def leave(code: int) -> int:
    """In the fork: end it as Python ends a program, and never go back to who called the verb. Else just the code."""
    if _is_fork:
        end_as_python(code)
    return code


def end_as_python(code: int) -> NoReturn:
    """End this process, a fork, as Python ends a program, without taking anything apart."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, or None, where there was none to begin with
            stream.flush()


@dataclass(frozen=True)
class Ended:
    """What became of the fork."""

    exit_code: int  #: 128 + N after signal N
    signal: int  #: that ended it; 0 if none did
    told: dict[str, Any] | None  #: what it told, None if it did not come so far
    files: Files

    def finish(self) -> int:
        """The exit code for this process, which is ended by the same signal if the fork was."""
        if self.signal:
            with contextlib.suppress(OSError):  # SIGKILL takes no other action anyway
                signal.signal(self.signal, signal.SIG_DFL)
            os.kill(os.getpid(), self.signal)
        return self.exit_code


class SandboxedRun:
    """One run of a program by a verb."""

    def __init__(self, command: Sequence[str], outputs: Sequence[str] = ()) -> None:
        """Get ready; arguments and errors as in `Sandbox`."""
        self._sandbox = Sandbox(command, outputs)
        self._program = -1

    def fork(self, *, keep_new: bool) -> Ended | None:
        """None in the fork, which has to end by `leave`; what became of it in this process, after its end."""
        global _is_fork
        _flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._noticed, noticing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            os.close(self._noticed)
            signal.set_wakeup_fd(noticing, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _is_fork = True
            be_known_as(os.getppid())
            self._program = os.getpid()
            try:
                self._sandbox.enter()
            except OSError as error:
                raise SetupError(
                    f"the program's files could not be kept from it ({error}): see stalloc info."
                ) from error
            return None
        os.close(noticing)
        try:
            status, overrun = self._wait(child)
            told = self._told()
            files = self._sandbox.end(keep_new=keep_new and not overrun)
        except BaseException:
            self._sandbox.remove()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if overrun:
            say(overrun)
        code = os.waitstatus_to_exitcode(status)
        by_signal = 0 if overrun or code >= 0 else -code
        return Ended(1 if overrun else abs(code) + 128 * (code < 0), by_signal, told, files)

    def tell(self, result: dict[str, Any]) -> None:
        """In the fork: hand a result to the process that waits. A process that the fork has made has none."""
        if os.getpid() == self._program:
            write_whole(self._sandbox.folder / _RESULT, json.dumps(result))

    def _wait(self, child: int) -> tuple[int, str]:
        """Its status, and why it was ended if this process did so."""
        overrun = ""
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status, overrun
            came = signal.sigtimedwait(_SIGNALS, _WATCH_SECONDS)
            if came is not None and came.si_signo != signal.SIGCHLD:
                # one of a terminal reaches the whole group; of others a notice tells, which asyncio may have taken
                if came.si_code != _FROM_KERNEL and not self._has_noticed(came.si_signo):
                    os.kill(child, came.si_signo)  # it has not been waited for, so it is there
            elif came is None and not overrun and (overrun := self._sandbox.overrun()):
                os.kill(child, signal.SIGKILL)

    def _has_noticed(self, number: int) -> bool:
        """Whether the fork has got a signal that this process got too, which Python notes in a pipe."""
        if not select.select([self._noticed], [], [], _NOTICE_SECONDS)[0]:
            return False
        return number in os.read(self._noticed, 4096)

    def _told(self) -> dict[str, Any] | None:
        file = self._sandbox.folder / _RESULT
        with contextlib.suppress(FileNotFoundError):
            told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return told
        return None
