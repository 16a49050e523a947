"""A private view of the file system, in which whatever this process and its children write goes to a layer.

Contract: after `enter` each file system is covered by an overlay whose writes go to the layer, or cannot be written to.
Kernel interfaces (/proc, /sys, devices), sockets in /run and what lies below `real` stay those of the machine. Other
processes see no difference. It works as root and, where the kernel lets ordinary users make user namespaces, for them:
there an overlay cannot change files of other owners or groups (EOVERFLOW), nor rename a folder that was there before
(EXDEV). The calling process has one thread and is of no other use if OSError is raised.

The mechanism is that of rootless containers: mount_namespaces(7), user_namespaces(7), pivot_root(2), and the kernel's
Documentation/filesystems/overlayfs.rst.
"""

import contextlib
import ctypes
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
LIBC.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]

_PIVOT_ROOT = 41 if os.uname().machine == "aarch64" else 155


def checked(result: int, what: str) -> int:
    """The result of a call. Raises OSError with `what` for a file name if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 1 << 12, 1 << 14, 1 << 18
_DETACH = 2
#: of a mount, which an ordinary user may not take away; _RELATIME is the one that mount(2) has under another number
_KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
_RELATIME = 1 << 21
_KERNEL_KINDS = frozenset(
    (
        *("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "cpuset", "mqueue", "securityfs", "debugfs"),
        *("tracefs", "bpf", "pstore", "configfs", "fusectl", "hugetlbfs", "autofs", "binfmt_misc", "efivarfs"),
        *("rpc_pipefs", "nsfs", "selinuxfs"),
    )
)
_REAL = ("/proc", "/sys", "/dev", "/run", "/var/run")
_SHARED_MEMORY = "/dev/shm"
_MEMORY_KINDS = ("tmpfs", "ramfs")
_MAX_COPIED_BYTES = 1 << 20


@dataclass
class View:
    layer: int = -1  #: a descriptor of the folder of the layer, which the view does not show
    is_user_namespace: bool = False
    #: folders of the layer with what was written, and the folders that they cover
    covered: list[tuple[str, str]] = field(default_factory=list)
    read_only: dict[str, str] = field(default_factory=dict)  #: what could not be covered, and why


def enter(layer: Path, real: Sequence[Path] = (), own: Sequence[Path] = ()) -> View:
    """Enter the view. `layer` is an empty folder of this user, for the caller to remove after the last process ended.

    `own`: places that the program is likely to write to, which are looked for folders of this user's that lie in
    somebody else's.
    """
    return _Entry(layer, real).enter([os.path.realpath(path) for path in own])


class _Entry:
    def __init__(self, layer: Path, real: Sequence[Path]) -> None:
        self._layer = os.path.realpath(layer)
        self._real = [os.path.realpath(path) for path in real]
        self._view = View()
        self._user, self._group = os.geteuid(), os.getegid()
        self._root = os.path.join(self._layer, "root")
        self._mounts: dict[str, tuple[str, bool]] = {}
        self._num_overlays = 0
        self._done: set[str] = set()

    def enter(self, own: list[str]) -> View:
        here = os.getcwd()
        self._unshare()
        self._mounts = mounts()
        _mount("none", "/", flags=_REC | _PRIVATE)
        self._prepare_layer()
        self._cover("/")
        for path in sorted(self._mounts, key=lambda one: one.count("/")):
            is_below = any(path.startswith(f"{one}/") for one in self._real)  # a mount that stays as it is
            if path not in self._done and not is_below and os.path.lexists(path):  # else another one hides it
                self._cover(path)
        if self._view.is_user_namespace:
            for path in own:
                self._cover_own(path)
        self._view.layer = os.open(self._layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _mount("tmpfs", self._root + self._layer, "tmpfs", data="mode=700")  # the program does not find its own layer
        for path in self._real:
            if os.path.exists(path):
                self._bind(path)
        os.chdir(self._root)
        if LIBC.syscall(_PIVOT_ROOT, b".", b".") == 0:
            checked(LIBC.umount2(b".", _DETACH), "umount")
        else:  # the root is the initial ramfs, which nothing can take the place of
            _mount(".", "/", flags=1 << 13)
            os.chroot(".")
        os.chdir(here)
        return self._view

    def _unshare(self) -> None:
        if LIBC.unshare(_NEWNS) == 0:
            return
        checked(LIBC.unshare(_NEWUSER | _NEWNS), "unshare")
        self._view.is_user_namespace = True
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{self._user} {self._user} 1")
        _write("/proc/self/gid_map", f"{self._group} {self._group} 1")

    def _prepare_layer(self) -> None:
        """Where the file system of the layer can hold none (it is an overlay itself), the layer is in memory."""
        os.makedirs(self._root)
        try:
            probe = self._new_overlay(self._folder("probe"), self._folder("probed"))
        except OSError:
            with open("/proc/meminfo", encoding="ascii") as file:
                free = next((int(line.split()[1]) for line in file if line.startswith("MemAvailable:")), 1 << 20)
            _mount("tmpfs", self._layer, "tmpfs", data=f"mode=700,size={free * 1024 // 2}")
            os.makedirs(self._root)
        else:
            checked(LIBC.umount2(os.fsencode(probe), _DETACH), "umount")
        self._view.covered.clear()
        _mount("tmpfs", self._root, "tmpfs", data="mode=755")  # for folders between mount points

    def _folder(self, name: str) -> str:
        path = os.path.join(self._layer, name)
        os.makedirs(path, exist_ok=True)
        return path

    def _new_overlay(self, lower: str, target: str) -> str:
        self._num_overlays += 1
        name = f"{self._num_overlays}/upper"
        upper, work = self._folder(name), self._folder(f"{self._num_overlays}/work")
        status = os.stat(lower)
        os.chmod(upper, stat.S_IMODE(status.st_mode))
        if not self._view.is_user_namespace:
            os.chown(upper, status.st_uid, status.st_gid)
        os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))
        options = f"lowerdir={_escaped(lower)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
        # `userxattr` is what an ordinary user may have; without `redirect_dir`, which it excludes, a folder that was
        # there before cannot be renamed. `metacopy` would leave files in the layer without their content
        options += ",userxattr" if self._view.is_user_namespace else ",redirect_dir=on,metacopy=off"
        try:
            _mount("overlay", target, "overlay", data=options + ",volatile")  # no waiting for the disk
        except OSError:
            _mount("overlay", target, "overlay", data=options)
        self._view.covered.append((name, lower))
        return target

    def _cover(self, path: str) -> None:
        """Give the new root what is at a path of the machine, at the same path, covered."""
        self._done.add(path)
        kind, is_read_only = self._mounts.get(path, ("", False))
        target = self._root + path.rstrip("/")
        is_in_real = any(path.startswith(f"{one}/") for one in _REAL) and path != _SHARED_MEMORY
        if is_in_real and kind in (*_KERNEL_KINDS, *_MEMORY_KINDS):
            return  # came with the folder above; a disk, as in /run/media, holds files like any other
        if kind in _KERNEL_KINDS or path in _REAL:
            self._bind(path)
        elif not os.path.isdir(path):
            self._place_file(path)
        elif is_read_only and path != "/":
            self._bind(path)
        elif self._view.is_user_namespace and self._has_mounts_below(path):
            self._take_apart(path)  # an ordinary user may not cover it as a whole: it could show what the mounts hide
        else:
            try:
                self._new_overlay(path, target or "/")
            except OSError as error:
                if self._has_mounts_below(path):
                    self._take_apart(path)
                else:
                    self._bind(path, read_only=error.strerror or str(error))

    def _take_apart(self, path: str) -> None:
        target = self._root + path.rstrip("/")
        if os.path.ismount(path) and path != "/" and os.stat(target).st_dev != os.stat(self._root).st_dev:
            _mount("tmpfs", target, "tmpfs")
        os.chmod(target or "/", stat.S_IMODE(os.stat(path).st_mode))
        for entry in os.scandir(path):
            name = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), name)
            elif entry.is_dir():
                os.mkdir(name)
                self._cover(entry.path)
            else:
                self._place_file(entry.path)

    def _place_file(self, path: str) -> None:
        """A file beside a mount point: an overlay covers folders only, so it is copied, or read-only if it is large."""
        target = self._root + path
        status = os.stat(path)
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and status.st_size <= _MAX_COPIED_BYTES and not os.path.exists(target):
            with contextlib.suppress(OSError):
                shutil.copy2(path, target)
                return
        if not os.path.exists(target):
            _write(target, "")
        self._bind(path, read_only="a large file beside a mount point" if is_file else "")

    def _cover_own(self, path: str) -> None:
        """Cover the first folder of this user's on the way to a path, and those of others that this user may write to.

        What is above the first, and a folder of another owner or group, cannot be copied to a layer, which a write
        below it takes; but it can be what an overlay covers.
        """
        parts, has_own = Path(path).parts, False
        for depth in range(2, len(parts) + 1):
            here = os.path.join(*parts[:depth])
            is_real = any(here == one or here.startswith(f"{one}/") for one in (*self._real, *_REAL))
            if is_real or not os.path.isdir(here):
                return
            status = os.stat(here)
            is_own = status.st_uid == self._user
            can_copy = is_own and status.st_gid == self._group
            is_lower = (is_own and not has_own) or (not can_copy and os.access(here, os.W_OK))
            if is_lower and here not in self._done:
                self._cover(here)
            has_own = has_own or is_own

    def _has_mounts_below(self, path: str) -> bool:
        return any(one.startswith(path.rstrip("/") + "/") for one in self._mounts)

    def _bind(self, path: str, read_only: str = "") -> None:
        target = self._root + path
        if not os.path.lexists(target):
            os.makedirs(target)
        _mount(path, target, flags=_BIND | _REC)
        if read_only:
            self._view.read_only[path] = read_only
            shown = os.statvfs(path).f_flag
            kept = shown & _KEPT_FLAGS | (_RELATIME if shown & os.ST_RELATIME else 0)
            _mount("none", target, flags=_BIND | _REMOUNT | _RDONLY | kept)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = [os.fsencode(word) or None for word in (source, target, kind)]
    checked(LIBC.mount(*words, flags, os.fsencode(data) or None), f"{kind or 'bind'} at {target}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _escaped(path: str) -> str:
    for character in "\\,:":
        path = path.replace(character, "\\" + character)
    return path


def mounts() -> dict[str, tuple[str, bool]]:
    """Mount points: the kind of each, and whether it is read-only; of several at one place the last, which is seen."""
    found = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            fields, kinds = before.split(" "), after.split()
            path = os.fsdecode(os.fsencode(fields[4]).decode("unicode_escape").encode("latin-1"))
            is_read_only = "ro" in fields[5].split(",") or "ro" in kinds[-1].split(",")
            found[path] = (kinds[0], is_read_only)
    return found
