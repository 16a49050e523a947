"""A process whose writes leave every file of the user's as it is, and runs of a verb's program in one.

Contract: what the process and its children write goes to a layer, which they read as if it were the files themselves,
or, where the machine allows none, is refused; see `ways`. The layer is gone once `end` returns, and what was written
with it, unless what is new is to be kept. Real are: `folder`, stalloc's own caches, devices, sockets in /run, and
whatever is no file, as requests to other machines.

A `SandboxedRun` forks this process, which waits, and tells what became of the fork. It goes on where this was called,
in the same group of processes, with the same standard streams. A signal that ends programs (Ctrl-C, SIGTERM) reaches it
once, whether it is sent to this process, as by kill, or to the whole group, as by a terminal: a second one would end it
before it has reported.
"""

import atexit
import contextlib
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import stalloc
from stalloc import files, private
from stalloc.errors import SetupError
from stalloc.figures import human_bytes
from stalloc.files import write_whole
from stalloc.live_file import be_known_as, live_folder
from stalloc.notices import say
from stalloc.private import SANDBOX_VARIABLE
from stalloc.sandbox import landlock, overlay, trackers
from stalloc.sandbox.overlay import LIBC
from stalloc.sandbox.ways import LAYER_PREFIX, layer_place, way
from stalloc.sandbox.written import Files, Layer, merged, named, remove, size_bytes

_DEATH_SIGNAL = 1  # an option of prctl(2)
_LEAST_GROWTH_BYTES = 256 << 20
_OLD_SECONDS = 600.0  # before that a layer may be one that is not locked yet
_PLACES = ("HF_HOME", "XDG_CACHE_HOME", "TORCH_HOME", "SCRATCH", "WORK", "OUTPUT_DIR")


class Sandbox:
    """That of one process, made before it is forked."""

    def __init__(self, command: Sequence[str] = (), outputs: Sequence[str | os.PathLike[str]] = ()) -> None:
        """Get ready. `command`: the program's words, among which may be places that it writes to.

        `outputs`: files that stalloc itself will write in the process; they are written for real when it has ended.
        Raises SetupError where nothing keeps writes from files.
        """
        self.way = way()
        self.way.check()
        self.folder = Path(tempfile.mkdtemp(prefix="stalloc-run-"))
        self._here = os.getcwd()
        self._command = command
        self._outputs = {os.path.abspath(one): self.folder / f"output-{i}" for i, one in enumerate(outputs)}
        self._layer: Path | None = None
        self._limit_bytes = self._free_bytes = 0
        if self.way.kind == "overlay":
            place = layer_place()
            _remove_left_over(place)
            self._layer = Path(tempfile.mkdtemp(prefix=LAYER_PREFIX, dir=place))
            self._lock = os.open(self._layer, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # who finds a layer that nobody holds may remove it
            self._free_bytes = _free_bytes(self._layer)
            self._limit_bytes = self._free_bytes // 2
        self._ours, self._theirs = socket.socketpair()

    def enter(self) -> None:
        """From now on, in the process: it has one thread. Whoever waits for it outlives it."""
        self._ours.close()
        LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.environ[private.SANDBOX_VARIABLE] = self.way.kind
        trackers.silence(self.folder)
        files.redirect(self._outputs)
        if self._layer is not None:
            view = overlay.enter(self._layer, self._real(), self._own())
            if view.is_user_namespace:
                _copy_folders_to_rename()
            socket.send_fds(self._theirs, [json.dumps(view.covered).encode()], [view.layer])
            os.close(view.layer)
        else:
            temporary = self.folder / "temporary"
            temporary.mkdir()
            os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
            landlock.deny_writes([one for one in self._real() if one.is_dir()])
        self._theirs.close()

    def _real(self) -> list[Path]:
        found = [self.folder, private.user_cache("")]
        ours = Path(stalloc.__file__).resolve().parent
        if not private.is_installed(ours):  # where a checkout keeps compiled code, which each run would compile anew
            found += [file.parent / "__pycache__" for file in ours.rglob("__init__.py")]
        named = os.environ.get("STALLOC_CACHE", "off")
        if named != "off":
            found.append(Path(named))
        for one in found:
            with contextlib.suppress(OSError):
                one.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, SetupError):
            found.append(live_folder())
        return found

    def _own(self) -> list[Path]:
        words = [word.partition("=")[2] or word for word in self._command]
        places = [os.environ[name] for name in _PLACES if name in os.environ]
        homes = (os.path.expanduser("~"), tempfile.gettempdir(), "/var/tmp")
        return [Path(one) for one in (self._here, *homes, *places, *words)]

    def overrun(self) -> str:
        """Why the process has to be ended: what it writes takes too much room; empty if it does not."""
        least = min(self._limit_bytes, _LEAST_GROWTH_BYTES)
        if self._layer is None or self._free_bytes - _free_bytes(self._layer) < least:
            return ""
        if size_bytes(self._layer) <= self._limit_bytes:
            return ""
        return (
            f"the program's files take more than {human_bytes(self._limit_bytes)}, half of what was free in "
            f"{self._layer.parent}: point TMPDIR at a folder with more room, or use --keep-files"
        )

    def end(self, *, keep_new: bool = False) -> Files:
        """After the process and all that it started: what it wrote, which is discarded but for new files if wanted.

        What stalloc itself wrote for the user is put in its place.
        """
        try:
            for path, written in self._outputs.items():
                if written.exists():
                    with files.whole(path) as file, written.open("rb") as source:
                        shutil.copyfileobj(source, file)
            self._theirs.close()
            self._ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                said, handles, _, _ = socket.recv_fds(self._ours, 1 << 20, 1)
                if handles:
                    try:
                        layer = Layer(Path(f"/proc/self/fd/{handles[0]}"), json.loads(said))
                        return self._told(layer, keep_new=keep_new)
                    finally:
                        os.close(handles[0])
            return Files(self.way.kind)
        finally:
            self.remove()

    def _told(self, layer: Layer, *, keep_new: bool) -> Files:
        ours = [str(self.folder), *([str(self._layer)] if self._layer else [])]
        changes = [
            change
            for change in layer.changes()
            if not any(change.path == one or change.path.startswith(f"{one}/") for one in ours)
        ]
        removed = [one for one in changes if one.kind == "removed"]
        written = [one for one in changes if one.kind != "removed"]
        gone = named(removed, self._here)
        if not keep_new:
            return Files(self.way.kind, named(written, self._here), removals=gone)
        # what goes with a file that stays as it was, as a database's journal, would change what is read from it, and of
        # a folder that was renamed only a part is in the layer
        stay = tuple(f"{one.path}{'' if one.source else '/'}" for one in written if one.kind == "changed")
        new = [one for one in written if one.kind == "new" and not (stay and one.path.startswith(stay))]
        named_new = named(new, self._here)  # before they are there
        kept = {one: None for one in new if layer.publish(one)}
        layer.publish_folders()
        discarded = named([one for one in written if one not in kept], self._here)
        return Files(self.way.kind, discarded, named_new if len(kept) == len(new) else named([*kept], self._here), gone)

    def remove(self) -> None:
        for one in (self._ours, self._theirs):
            one.close()
        if self._layer is not None:
            remove(self._layer)
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._layer = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _remove_left_over(place: Path) -> None:
    """Layers of processes that were killed."""
    for one in place.glob(f"{LAYER_PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(one, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(handle)
                if status.st_uid == os.geteuid() and status.st_mtime < time.time() - _OLD_SECONDS:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(one)
            finally:
                os.close(handle)


def _copy_folders_to_rename() -> None:
    """Let Python's renames copy a folder where the kernel refuses: in an ordinary user's layer, one that was there."""

    def copying(rename: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, **folders: Any) -> None:
            try:
                rename(source, target, **folders)
            except OSError as error:
                if error.errno != errno.EXDEV or folders or not os.path.isdir(source) or os.path.islink(source):
                    raise
                if os.path.isdir(target):
                    os.rmdir(target)  # as the call does: only an empty one gives way
                shutil.copytree(source, target, symlinks=True)
                shutil.rmtree(source)

        return renamed

    os.rename, os.replace = copying(os.rename), copying(os.replace)


class ProgramFiles:
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
        self._seen.append(files)

    def all(self) -> Files:
        return merged(self._seen)


_RESULT = "result.json"
_WATCH_SECONDS = 0.5
_NOTICE_SECONDS = 0.1
_FROM_KERNEL = 0x80  #: SI_KERNEL, which the signal module does not name
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


_is_fork = False


def is_fork() -> bool:
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
    def __init__(self, command: Sequence[str], outputs: Sequence[str] = ()) -> None:
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
            result = self._sandbox.folder / _RESULT
            told = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
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
