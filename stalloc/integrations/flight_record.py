"""A flight recorder: the last events of a program's memory, written to a file when it dies, or when somebody asks.

Contract: nothing here raises into the program, and nothing that it had set up is lost: handlers of signals and the hook
for exceptions that were there before are called afterwards, and SIGTERM still ends it. A child of fork writes nothing.
The file is a snapshot of torch's kind, which `stalloc explain` and `top` read.
"""

import atexit
import os
import pickle
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from stalloc.errors import StallocError
from stalloc.figures import human_bytes
from stalloc.files import write_whole
from stalloc.integrations.installation import installation
from stalloc.integrations.native_history import NativeHistory
from stalloc.notices import say
from stalloc.printable import printable
from stalloc.trace.sites import Frame, site_name

MAX_EVENTS = 100_000
_MOST_FILES = 5  # at errors that the program goes on after: searching a batch size makes hundreds
_HOLDERS = 5
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class FlightRecorder:
    def __init__(self, folder: Path, max_events: int, *, stacks: bool) -> None:
        self.folder = folder
        self._process = os.getpid()
        self._history = NativeHistory(max_events, stacks=stacks, out_of_memory=self._ran_out, begun=self._end_first)
        self._previous: dict[int, Any] = {}
        self._is_writing = self._has_failed = False
        self._num_errors = 0
        self._file: Path | None = None

    def begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._history.begin()
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._at_signal)
        else:
            say("the flight recorder was begun in a thread, so it does not hear of signals: begin it in the main one.")
        self._watch_ending()

    def write(self, why: str) -> Path | None:
        """Write what was recorded, and say who holds most; None if there is nothing, or it cannot be written."""
        if os.getpid() != self._process or self._is_writing:
            return None
        self._is_writing = True
        try:
            if (snapshot := self._history.snapshot()) is None:
                return None
            rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or ""
            file = self.folder / (f"rank{rank}.pickle" if rank.isdecimal() else f"process{os.getpid()}.pickle")
            write_whole(file, pickle.dumps(snapshot), "name another folder for the flight recorder")
            self._file = file
            total, holders = _holders(snapshot)
            say(f"{why}: wrote the last events of this process's memory, {human_bytes(total)} allocated, of which")
            for num_bytes, site in holders[:_HOLDERS]:
                say(f"  {human_bytes(num_bytes):>12}  {printable(site, 100)}")
            say(f"next: stalloc explain {printable(str(file), 500)}")
            return file
        except Exception as error:
            named = "" if isinstance(error, StallocError) else f"{type(error).__name__}: "
            say(f"the flight recorder could not write: {named}{str(error).rstrip('.')}.")
            return None
        finally:
            self._is_writing = False

    def _ran_out(self) -> None:
        self._num_errors += 1
        if self._num_errors <= _MOST_FILES:
            self.write("out of memory")

    def _at_signal(self, number: int, frame: FrameType | None) -> None:
        self.write(f"{signal.Signals(number).name} arrived")
        before = self._previous.get(number)
        if callable(before):
            before(number, frame)
        elif number == signal.SIGTERM and before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch_ending(self) -> None:
        hook, leave = sys.excepthook, sys.exit

        def at_exception(kind: Any, error: Any, trace: Any) -> None:
            hook(kind, error, trace)
            if self._file is None:
                self.write(f"the program failed ({kind.__name__})")  # while its frames hold what they held

        def at_exit(code: Any = None, /) -> Any:
            self._has_failed = code not in (None, 0, False)
            leave(code)

        sys.excepthook = at_exception
        sys.exit = at_exit
        self._end_first()

    def _end_first(self) -> None:
        """At the end be called before what was registered so far, such as the end of call sites."""
        atexit.unregister(self._at_end)
        atexit.register(self._at_end)

    def _at_end(self) -> None:
        if self._has_failed and self._file is None:
            self.write("the program ended with a failure")


def _holders(snapshot: dict[str, Any]) -> tuple[int, list[tuple[int, str]]]:
    """What is allocated in all, and by call site, most first."""
    held: Counter[str] = Counter()
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["state"] != "inactive":
            frames = [Frame(one["filename"], one["line"], one["name"]) for one in block.get("frames") or []]
            held[site_name(frames)] += block["size"]
    return held.total(), sorted(((num_bytes, name) for name, num_bytes in held.items()), reverse=True)


def flight_recorder(
    folder: str | os.PathLike[str], *, max_events: int = MAX_EVENTS, stacks: bool = True
) -> FlightRecorder | None:
    """Keep the last events of this process's memory, and write them to a file in `folder` when something goes wrong.

    That is: when memory runs out, at SIGTERM and SIGUSR1, and when the program ends with a failure. One file a rank.
    `stacks`: with the lines that asked for memory, for up to 2 µs a request. A second call changes nothing. It never
    raises; None if the recorder could not begin.
    """
    if installation.flight_recorder is None:
        made = FlightRecorder(Path(folder), max_events, stacks=stacks)
        try:
            made.begin()
        except Exception as error:
            named = type(error).__name__
            say(f"the flight recorder could not begin: {named}: {error}. The program goes on without it.")
            return None
        installation.flight_recorder = made
    return installation.flight_recorder
