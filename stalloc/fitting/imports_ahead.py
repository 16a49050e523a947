"""Libraries that a program imports before it does anything else, so that its trials can start with them imported.

Contract: what is imported ahead is what each run of the program would import, in the same order and to the same effect.
That is so of statements at the head of its files, before any that does more than define, name or import (variables that
are set in os.environ are set ahead too), for installed packages whose import wrote no file, began no process, thread or
connection and did not use the GPU. The first that is otherwise is the end. (Threads of Python's, that is; those of a
linear algebra library outlive a fork, as they do one for a DataLoader's workers.)
"""

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

_INSTALLED = ("site-packages", "dist-packages")
_NOT_THE_PROGRAM = (sysconfig.get_path("stdlib") + os.sep, str(Path(__file__).parents[1]) + os.sep)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EFFECTS = (
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec", "socket.connect", "sqlite3.connect"),
)
_HARMLESS = ("warnings", "logging", "environ")  #: whose functions change nothing that an import looks at, or are seen


class Group(TypedDict):
    modules: list[tuple[str, str]]  #: names and files, in the order in which they came
    environment: dict[str, str]  #: variables that the program had set by then
    num_devices: int  #: what torch said when it was asked for GPUs; 0 if it was not


class ImportWatch:
    """Notes what the program of this process imports at the head of its files; to be made before it begins."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._environment = dict(os.environ)
        self._known = set(sys.modules)
        self._inside = False  # of a library's import
        self._has_effects = False
        self._is_over = False
        self._import = builtins.__import__
        sys.addaudithook(self._audited)
        builtins.__import__ = self._imported

    def end(self) -> None:
        self._is_over = True
        if builtins.__import__ == self._imported:
            builtins.__import__ = self._import

    def _imported(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        asks = globals or {}
        if self._is_over or self._inside or _is_library(str(asks.get("__file__", ""))):
            return self._import(name, globals, locals, fromlist, level)
        frame = sys._getframe(1)
        if not _is_at_head(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno) or not self._is_as_left():
            self.end()
        elif not level and _is_library(_file_of(name.partition(".")[0])):
            return self._noted(name, globals, locals, fromlist)
        result = self._import(name, globals, locals, fromlist, level)
        file = str(getattr(sys.modules.get(name), "__file__", None) or "")
        if file and not _is_library(file) and not _is_at_head("<module>", file, sys.maxsize):
            self.end()  # a file of the program's own has run beyond its head
        return result

    def _noted(self, name: str, globals: Any, locals: Any, fromlist: Any) -> Any:
        threads, self._inside, self._has_effects = threading.active_count(), True, False
        counts = [0]

        def count(ask: Callable[[], int]) -> int:
            counts.append(ask())
            return counts[-1]

        try:
            with _counting(count):
                return self._import(name, globals, locals, fromlist, 0)
        finally:
            self._inside = False
            modules = [(one, _origin(module)) for one, module in list(sys.modules.items()) if one not in self._known]
            modules = [(one, file) for one, file in modules if os.path.isabs(file) and not one.startswith("stalloc")]
            self._known.update(sys.modules)
            torch = sys.modules.get("torch")
            uses_gpu = torch is not None and torch.cuda.is_initialized()
            acts = self._has_effects or threading.active_count() != threads or uses_gpu
            if acts or not all(_is_library(file) for _, file in modules):
                self.end()
            elif modules:
                changed = {key: value for key, value in os.environ.items() if self._environment.get(key) != value}
                self.groups.append({"modules": modules, "environment": changed, "num_devices": max(counts)})

    def _is_as_left(self) -> bool:
        """Whether all modules present were imported, and none was put in place by hand."""
        added = {name: _spec(one) for name, one in list(sys.modules.items()) if name not in self._known}
        self._known.update(sys.modules)
        return all(spec is not None and spec.name == name for name, spec in added.items())

    def _audited(self, event: str, args: Any) -> None:
        if not self._inside:
            return
        if event == "open":
            path, mode, flags = args
            is_write = bool(flags & _WRITES) if isinstance(flags, int) else any(one in (mode or "") for one in "wax+")
            if is_write and not isinstance(path, int):  # a descriptor was opened before
                self._has_effects |= "__pycache__" not in str(path) and path != os.devnull
        elif event in _EFFECTS:
            self._has_effects |= "__pycache__" not in str(args[:1])


def import_ahead(groups: Sequence[Group]) -> None:
    """Import in this process what a run of the program was seen to import first."""
    for group in groups:
        os.environ.update(group["environment"])
        with _counting(lambda _: group["num_devices"]):  # noqa: B023  (it is called in here alone)
            for name, file in (one for one in group["modules"] if one[0] not in sys.modules):
                try:
                    spec = importlib.util.find_spec(name)
                    if spec is None or spec.origin != file:  # another lies before it on the path of this process
                        return
                    importlib.import_module(name)
                except Exception:  # the trials will say what is wrong
                    return


@contextlib.contextmanager
def _counting(count: Callable[[Callable[[], int]], int]) -> Iterator[None]:
    """Let torch count GPUs by `count`, which is given torch's own way: after that one no child can use a GPU."""
    module = getattr(sys.modules.get("torch"), "_C", None)
    ask = getattr(module, "_cuda_getDeviceCount", None)
    if module is None or ask is None:
        yield
        return
    module._cuda_getDeviceCount = functools.partial(count, ask)
    try:
        yield
    finally:
        module._cuda_getDeviceCount = ask


def _is_library(file: str) -> bool:
    installed = any(one in Path(file).parts for one in _INSTALLED)
    return file in ("", "built-in", "frozen") or installed or file.startswith(_NOT_THE_PROGRAM)


def _file_of(package: str) -> str:
    module = sys.modules.get(package)
    if module is not None:
        return _origin(module) or "none"
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return "none"
    return "none" if spec is None or not spec.origin else spec.origin


def _origin(module: Any) -> str:
    """The file that a module was imported from; empty for a namespace, or a module that no import made."""
    return str(getattr(_spec(module), "origin", None) or "")


def _spec(module: Any) -> Any:
    """How a module was found; a lazily loaded module stays unloaded."""
    try:
        return object.__getattribute__(module, "__dict__").get("__spec__")
    except AttributeError:
        return None


def _is_at_head(function: str, file: str, line: int) -> bool:
    """Whether a line of a file comes before all that does more than define, name or import."""
    return function == "<module>" and line < _end_of_head(file)


@functools.cache
def _end_of_head(file: str) -> int:
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return 0
    return next((one.lineno for one in body if not _only_names(one)), sys.maxsize + 1)


def _only_names(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return _root(function) in _HARMLESS
        case ast.Assign(targets=targets, value=value):
            named = all(isinstance(one, ast.Name) or _root(one) == "environ" for one in targets)
            return named and _is_harmless(value)
        case ast.AnnAssign(target=ast.Name(), value=value):
            return value is None or _is_harmless(value)
        case ast.If(test=test, body=body, orelse=others):
            return _is_harmless(test) and all(map(_only_names, (*body, *others)))
        case ast.Try(body=body, handlers=handlers, orelse=others, finalbody=last):
            return all(map(_only_names, (*body, *(one for each in handlers for one in each.body), *others, *last)))
    return False


def _is_harmless(value: ast.expr) -> bool:
    return all(_root(one.func) in _HARMLESS for one in ast.walk(value) if isinstance(one, ast.Call))


def _root(expression: ast.expr) -> str:
    """The module whose function or variable it is: `environ` of `os.environ`, `warnings` of `warnings.simplefilter`."""
    while isinstance(expression, ast.Subscript | ast.Attribute | ast.Call):
        if isinstance(expression, ast.Attribute) and expression.attr == "environ":
            return "environ"
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else ""
