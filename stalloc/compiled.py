"""numba's njit and cfunc, kept on disk in a way that cannot go stale between files.

numba ties a cached function to the file that defines it. Our compiled functions inline constants and functions of
other files, so a cached function here is tied to all files that its own leads to by imports (source_stamps.py): when
one of them changes it is compiled anew, and nothing else is.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numba
from numba import types
from numba.core import event, sigutils
from numba.core.ccallback import CFunc
from numba.extending import typeof_impl

from stalloc.compiler import PartCompiler, WholeCompiler
from stalloc.held_signals import uninterrupted
from stalloc.kept_code import KeptCode, folder_for
from stalloc.notices import say
from stalloc.source_stamps import stamp_of

#: for functions that make no arrays: numba then counts no references to those that they are given, which takes up to
#: half the time where many arrays are passed on
BORROWING: dict[str, Any] = {"_nrt": False}
#: numba hands `forceinline` on to what a function calls, and so on down, which makes one function of the whole core:
#: each of ours says for itself whether it is always inlined
_OWN = {"forceinline": False}
_WITHOUT_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class CompileTime(NamedTuple):
    """How long a thread has compiled, which is once for a machine and no part of anyone's work."""

    wall_seconds: float = 0.0
    processor_ns: int = 0


class _Compiling(event.Listener):
    """Counts what compiling takes, and says once, on standard error, why a program stands still meanwhile."""

    _PATIENCE = 1.0  # seconds of compiling, before anything is said

    def __init__(self) -> None:
        self._thread = threading.local()
        self._told = sys.stderr is None

    @property
    def time(self) -> CompileTime:
        return getattr(self._thread, "time", CompileTime())

    def on_start(self, started: event.Event) -> None:
        if not _is_ours(started):
            return
        thread, now = self._thread, time.monotonic()
        depth = getattr(thread, "depth", 0)
        if depth == 0:
            thread.began, thread.began_ns = now, time.thread_time_ns()
        thread.depth = depth + 1
        if not self._told and self.time.wall_seconds + now - thread.began > self._PATIENCE:
            self._told = True
            kept = "" if folder_for(Path(__file__).parent) is None else "; the result is kept"
            say(f"compiling for this machine, up to half a minute{kept}.")

    def on_end(self, ended: event.Event) -> None:
        thread = self._thread
        if getattr(thread, "depth", 0) == 0 or not _is_ours(ended):
            return
        thread.depth -= 1
        if thread.depth == 0:
            wall_seconds, processor_ns = self.time
            thread.time = CompileTime(
                wall_seconds + time.monotonic() - thread.began, processor_ns + time.thread_time_ns() - thread.began_ns
            )


def _is_ours(seen: event.Event) -> bool:
    return str(seen.data["dispatcher"].py_func.__module__).startswith("stalloc.")


_compiling = _Compiling()
event.register("numba:compile", _compiling)


def compile_time() -> CompileTime:
    return _compiling.time


def _tie(compiled: Any, function: Callable[..., Any], sources: Collection[str] = ()) -> None:
    source = function.__code__.co_filename
    stamps = {stamp_of(one) for one in {source, *sources}}
    compiled._cache = KeptCode(function, Path(source).parent, " ".join(sorted(stamps)))


def _compile_once(dispatcher: Any) -> None:
    """Let a constant argument be a number like any other: numba compiles a function anew for each constant."""
    template = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: template(
        tuple(types.unliteral(arg) for arg in args), {name: types.unliteral(arg) for name, arg in kws.items()}
    )


def njit(*, sources: Collection[str] = (), **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(**options)`, cached and tied to its sources.

    `sources` are files of what the function calls beside those that its own file leads to: of what its globals hold.
    """

    def compile_later(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(pipeline_class=WholeCompiler, no_cfunc_wrapper=True, **_OWN | options)(function)
        _compile_once(dispatcher)
        _tie(dispatcher, function, sources)
        compile_or_load = dispatcher.compile
        dispatcher.compile = lambda signature: uninterrupted(compile_or_load, signature)
        return dispatcher

    return compile_later


class _Inner:
    """A function that only compiled code calls: numba gets to know it when that is compiled, not at every start."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.py_func = function
        self._options = options

    @cached_property
    def dispatcher(self) -> Any:
        made = numba.njit(pipeline_class=PartCompiler, **_WITHOUT_WRAPPERS, **_OWN | self._options)(self.py_func)
        _compile_once(made)
        return made


@typeof_impl.register(_Inner)
def _type_of_inner(function: _Inner, context: object) -> Any:
    return types.Dispatcher(function.dispatcher)


def inner(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(**options)` for what only compiled code calls; it is cached as a part of what calls it."""
    return lambda function: _Inner(function, options)


def cfunc(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """`numba.cfunc(signature, nopython=True)`, cached and tied to its sources; compiled at once."""

    def compile_now(function: Callable[..., Any]) -> Any:
        compiled = CFunc(
            function,
            sigutils.normalize_signature(signature),
            locals={},
            options={"nopython": True},
            pipeline_class=WholeCompiler,
        )
        _tie(compiled, function)
        uninterrupted(compiled.compile)
        return compiled

    return compile_now
