"""A process whose writes leave every file of the user's as it is.

Contract: what the process and its children write goes to a layer, which they read as if it were the files themselves,
or, where the machine allows none, is refused; see `ways`. The layer is gone once `end` returns, and what was written
with it, unless what is new is to be kept. Real are: `folder`, stalloc's own caches, devices, sockets in /run, and
whatever is no file, as requests to other machines.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import stalloc
from stalloc import files, private
from stalloc.errors import SetupError
from stalloc.figures import human_bytes
from stalloc.live_file import live_folder
from stalloc.sandbox import landlock, overlay, trackers
from stalloc.sandbox.layer import Change, Layer, remove, size_bytes
from stalloc.sandbox.system_calls import DEATH_SIGNAL, LIBC
from stalloc.sandbox.ways import LAYER_PREFIX, layer_place, way
from stalloc.sandbox.written import Files, named

_SIGKILL = 9
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
        LIBC.prctl(DEATH_SIGNAL, _SIGKILL)
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
        found = [self.folder, private.user_cache(""), *_compiled_folders()]
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
        if self._layer is None or self._free_bytes - _free_bytes(self._layer) < min(
            self._limit_bytes, _LEAST_GROWTH_BYTES
        ):
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
            return self._written(keep_new=keep_new)
        finally:
            self.remove()

    def _written(self, *, keep_new: bool) -> Files:
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

    def _told(self, layer: Layer, *, keep_new: bool) -> Files:
        changes = [one for one in layer.changes() if not self._is_ours(one.path)]
        removed = [one for one in changes if one.kind == "removed"]
        written = [one for one in changes if one.kind != "removed"]
        kept: list[Change] = []
        if keep_new:
            # what goes with a file that stays as it was, as a database's journal, would change what is read from it,
            # and of a folder that was renamed only a part is in the layer
            stay = tuple(f"{one.path}{'' if one.source else '/'}" for one in written if one.kind == "changed")
            new = [one for one in written if one.kind == "new" and not (stay and one.path.startswith(stay))]
            named_new = named(new, self._here)  # before they are there
            kept = [one for one in new if layer.publish(one)]
            layer.publish_folders()
            published = set(kept)
            discarded = [one for one in written if one not in published]
            return Files(
                self.way.kind,
                named(discarded, self._here),
                named_new if len(kept) == len(new) else named(kept, self._here),
                named(removed, self._here),
            )
        return Files(self.way.kind, named(written, self._here), removals=named(removed, self._here))

    def _is_ours(self, path: str) -> bool:
        ours = [str(self.folder), *([str(self._layer)] if self._layer else [])]
        return any(path == one or path.startswith(f"{one}/") for one in ours)

    def remove(self) -> None:
        """Remove the layer and the folder, whatever became of the process."""
        for one in (self._ours, self._theirs):
            one.close()
        if self._layer is not None:
            remove(self._layer)
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._layer = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _compiled_folders() -> list[Path]:
    """Where a checkout of stalloc keeps compiled code (compiled.py), which would be compiled anew by each run."""
    ours = Path(stalloc.__file__).resolve().parent
    if private.is_installed(ours):
        return []
    return [file.parent / "__pycache__" for file in ours.rglob("__init__.py")]


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
