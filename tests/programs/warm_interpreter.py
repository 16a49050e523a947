"""A Python that has imported the large libraries already, and forks for every program that it is sent.

Most of what a small program takes is `import torch` and `import cupy`. This process has done both, on libraries of the
virtual GPU, and has put their modules aside: a program imports them as ever, so that whatever happens at an import
happens (the choice of the device, hooks, what is looked up in `sys.modules`), but nothing is read or executed again.
So it has done with torch._dynamo, which torch imports for the first optimizer, and takes as long as all the rest.
The GPU is chosen by the program: it is no more than figures in the virtual GPU's library, which the last choice sets.

At its end a program does what it registered for its end, but nothing is taken apart, neither the interpreter nor what
torch made at its import, which take a third of a second: the end of an interpreter is tested in a fresh one.

A request is one line of JSON on the socket whose descriptor is the only argument, with the descriptors of the files
for standard input, output and error. Answered are the number of the process, then its exit code, as lines.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import socket
import sys
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

#: each comes back with all that its import brought, beside what those before it had brought
LIBRARIES = ("torch", "triton", "torch._dynamo", "cupy_backends", "cupy")
#: what most programs import, and where nothing happens at the import
USUAL = (
    *("numba", "rich.console", "networkx", "numpy.ma"),
    *("stalloc.cli.run", "stalloc.cli.shared_options", "stalloc.cli.tables"),
    *("stalloc.analysis", "stalloc.fitting.capping", "stalloc.replay.registry", "stalloc.trace.sources"),
    *("stalloc.device.virtual", "stalloc.integrations.installing", "stalloc.runtime"),
    *("stalloc.lifespans.repeating_schedule", "stalloc.planner.planning"),
)
MADV_COLLAPSE, HUGE_PAGE_BYTES = 25, 2 << 20  # of Linux, from 6.1 on
PACKAGES = ("torch", "functorch", "triton", "cupy", "cupy_backends")

_exit_codes: list[int] = []  # of the program, once it has one


class _Library:
    """What the import of a library brought, put aside; the loader of each of these modules, which brings all back."""

    def __init__(self, name: str, modules: dict[str, ModuleType]) -> None:
        self._name = name
        self._modules = modules
        self._names_in_others: list[tuple[ModuleType, str, ModuleType]] = []

    def put_aside(self) -> None:
        """Forget the modules, until one of them is imported."""
        for name, module in self._modules.items():
            package, _, short = name.rpartition(".")
            if not package:
                self._wait_in(str(Path(module.__file__ or "").parents[1]))
            elif package not in self._modules:
                parent = sys.modules[package]
                for folder in parent.__path__:
                    self._wait_in(folder)
                if vars(parent).get(short) is module:
                    delattr(parent, short)
                    self._names_in_others.append((parent, short, module))
        for name in self._modules:
            del sys.modules[name]

    def _wait_in(self, folder: str) -> None:
        """Be the loader of the modules that are found in a folder."""
        finder = sys.path_importer_cache[folder]
        if not isinstance(finder, _Finder):
            finder = sys.path_importer_cache[folder] = _Finder(finder)  # type: ignore[assignment]
        finder.loaders.update(dict.fromkeys(self._modules, self))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ != self._name:
            importlib.import_module(self._name)
        sys.modules.update(self._modules)
        for parent, short, child in self._names_in_others:
            setattr(parent, short, child)
        rules = self._modules.get("torch._dynamo.trace_rules")
        forget = getattr(rules, "clear_lru_cache", None)  # from 2.3 on
        if forget is not None:  # it has looked up functions, in whose place the virtual GPU puts its own
            forget()


class _Finder:
    """What finds the modules of a folder, with some of them imported before."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder
        self.loaders: dict[str, _Library] = {}

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = self._finder.find_spec(name, target)
        if spec is not None and name in self.loaders:
            spec.loader = self.loaders[name]
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def remember_elf_files() -> None:
    """Let what is read of shared libraries be read once: each virtual GPU reads all of torch's and CuPy's."""
    elf = importlib.import_module("stalloc.device.elf")
    told: dict[tuple[Any, ...], Any] = {}

    class Remembered(elf.ElfFile):  # type: ignore[name-defined, misc]
        def __init__(self, path: Path) -> None:
            status = path.stat()
            self._path, self._sections = path, []
            self._file = str(path), status.st_mtime_ns, status.st_size

        def _of(self, what: str, *arguments: Any) -> Any:
            key = (*self._file, what, *arguments)
            if key not in told:
                with _ELF_FILE(self._path) as file:
                    told[key] = getattr(file, what)(*arguments)
            return told[key]

        def needed_libraries(self) -> Any:
            return self._of("needed_libraries")

        def needed_versions(self) -> Any:
            return self._of("needed_versions")

        def requirements(self) -> Any:
            return self._of("requirements")

        def functions(self, prefixes: tuple[bytes, ...]) -> Any:
            return self._of("functions", prefixes)

    _ELF_FILE = elf.ElfFile
    elf.ElfFile = Remembered


def import_libraries() -> None:
    """Import the libraries on a virtual GPU, then put them aside, and forget that there was a virtual GPU."""
    remember_elf_files()
    finders, variables = list(sys.meta_path), dict(os.environ)
    device = importlib.import_module("stalloc.device")
    device.activate("virtual")
    importlib.import_module("stalloc.device.virtual").redirect(ctypes.CDLL("libstalloc_virtual_gpu.so"))
    sys.meta_path[:] = finders  # what it does at an import, it shall do at the program's
    libraries = []
    for library in LIBRARIES:
        before = set(sys.modules)
        if importlib.util.find_spec(library.partition(".")[0]) is not None:
            importlib.import_module(library)
        new = [name for name in sys.modules if name not in before and name.partition(".")[0] in PACKAGES]
        libraries.append(_Library(library, {name: sys.modules[name] for name in new}))
    os.environ.clear()
    os.environ.update(variables)
    for one in reversed(libraries):
        one.put_aside()
    for name in list(sys.modules):
        if name.partition(".")[0] == "stalloc" and name != "stalloc.device.elf":
            del sys.modules[name]


def load_what_compiling_needs() -> None:
    """Let numba read what it knows of types and functions, which it does when it first compiles."""
    registry = importlib.import_module("numba.core.registry")
    registry.cpu_target.typing_context.refresh()
    registry.cpu_target.target_context.refresh()


def use_huge_pages() -> None:
    """Put what there is into huge pages, where the kernel can: a fork copies an entry for each page, and frees it."""
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if access == "rw-p" and inode == "0":
            begin, end = (int(one, 16) for one in addresses.split("-"))
            first, last = -(-begin // HUGE_PAGE_BYTES), end // HUGE_PAGE_BYTES
            if first < last:
                size = ctypes.c_size_t((last - first) * HUGE_PAGE_BYTES)
                advise(ctypes.c_void_p(first * HUGE_PAGE_BYTES), size, MADV_COLLAPSE)


def serve(connection: socket.socket) -> Callable[[], None] | None:
    """Fork for each request; in the child return what runs the program, at the end of the requests None."""
    while True:
        line, descriptors, _, _ = socket.recv_fds(connection, 1 << 22, 3)
        if not line:
            return None
        while not line.endswith(b"\n"):
            line += connection.recv(1 << 22)
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            connection.close()
            return lambda: become(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run the program of a request as `python -c` would."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = ["-c", *request["arguments"]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(request["source"], "<string>", "exec"), main.__dict__)
        _exit_codes.append(0)
    except SystemExit as ending:
        _exit_codes.append(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
        raise
    except Exception:
        _exit_codes.append(1)
        raise


def end_at_once() -> None:
    """Leave the process with the program's code; where there is none, or output cannot be written, as Python would."""
    if _exit_codes:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_exit_codes[0] & 0xFF)


if __name__ == "__main__":
    atexit.register(end_at_once)  # the first that is registered is the last that is called
    sys.path[0] = ""  # as for `python -c`
    import_libraries()
    for name in USUAL:
        importlib.import_module(name)
    load_what_compiling_needs()
    importlib.import_module("stalloc.sandbox.ways").way()  # which takes as long as a fork: it tries one
    gc.collect()
    for one in gc.get_objects():
        if type(one) is weakref.finalize:  # isinstance would ask proxies, which import what they stand for
            one.atexit = False
    gc.freeze()
    use_huge_pages()
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        program()
