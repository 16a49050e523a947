"""numba's njit and cfunc, kept on disk in a way that cannot go stale between files.

numba ties a cached function to the file that defines it. Our compiled functions inline constants and functions of
other files, so a cached function here is tied to all files that its own leads to by imports (source_stamps.py): when
one of them changes it is compiled anew, and nothing else is.

Contract of the cache: what is read back is machine code that will run, so it comes from a private folder only (see
private.py), from files that nobody else can write, or from the package itself, and only if it is whole and was made by
these versions, from these sources, for exactly this function, signature and processor. Anything else is compiled anew.
A cache that cannot be read or written costs time and one sentence, nothing more. A wheel may bring compiled code of its
own (see integrations/build_backend.py), made for every processor of its architecture; it is looked for first.

Most of what a file holds is LLVM's code of the function, for others that are compiled later and call it. numba parses
it at once, which takes longer than all the rest; here it is parsed when it is needed. Each file says itself what it
holds, since numba's index of numbered files may lead to code of other sources where the disk fills up, or two processes
save at once.
"""

import contextlib
import hashlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
from llvmlite import binding
from numba import types
from numba.core import config, event, sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.extending import typeof_impl

from stalloc.compiler import PartCompiler, WholeCompiler
from stalloc.errors import BadInputError, SetupError
from stalloc.files import write_whole
from stalloc.notices import say
from stalloc.private import is_installed, private_folder, read_private, user_cache
from stalloc.source_stamps import stamp_of
from stalloc.threads import uninterrupted

_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".compiled"
_ADVICE = "name another folder in NUMBA_CACHE_DIR"
_SHIPPED = Path(__file__).parent / "compiled_code"  #: what came with the wheel
_ANY_PROCESSOR = "generic", ""  #: what numba calls the processor and its features for which the wheel's code is made


@cache
def _say_once(sentence: str) -> None:
    say(sentence)


@cache
def folder_for(sources: Path) -> Path | None:
    """Where the compiled code of a folder of sources is kept; None if there is no place for it.

    That is below $NUMBA_CACHE_DIR, beside the sources of a checkout, or in the user's cache: the first that can be
    written and is private. Beside installed sources nothing is kept: uninstalling would leave it, and so a package
    that can still be imported. Only a folder that the user named is refused aloud; the others give way to the next.
    """
    name = f"{sources.name}_{hashlib.sha256(os.fsencode(sources)).hexdigest()[:40]}"
    if config.CACHE_DIR:
        found = _usable(Path(config.CACHE_DIR) / name)
        if isinstance(found, Path):
            return found
        if found:
            _say_once(f"compiled code is kept elsewhere: {_of(Path(config.CACHE_DIR), found)}")
    if not is_installed(sources):
        found = _usable(sources / "__pycache__", mode=0o755)  # other users may read Python's own files in it
        if isinstance(found, Path):
            return found
    place = user_cache("compiled")
    found = _usable(place / name)
    if isinstance(found, Path):
        return found
    if found:
        _say_once(f"compiled code is not kept, so every start compiles again: {_of(place, found)}")
    else:
        _say_once(
            f"compiled code is not kept, so every start compiles again: {place} cannot be written: "
            "set XDG_CACHE_HOME to a folder that can."
        )
    return None


def _usable(place: Path, mode: int = 0o700) -> Path | str:
    """The private folder at a place, or why it is refused; empty if it cannot be made or written."""
    try:
        folder = private_folder(place, _ADVICE, mode=mode)
    except SetupError as error:
        return str(error)
    except OSError:
        return ""
    return folder if os.access(folder, os.W_OK | os.X_OK) else ""


def _of(place: Path, sentence: str) -> str:
    _, _, rest = sentence.partition(" is not used")
    return f"{place} is not used{rest}"


@cache
def _shipped() -> Path | None:
    return _SHIPPED if _SHIPPED.is_dir() else None


@cache
def _no_code() -> bytes:
    empty: bytes = binding.parse_assembly("").as_bitcode()
    return empty


def _names_in(library: Any) -> set[str]:
    module = library._get_module_for_linking()
    return {one.name for one in (*module.functions, *module.global_variables) if not one.is_declaration}


def _rebuilt(target_context: Any, names: set[str], reduced: tuple[Any, ...]) -> Any:
    (library, kind, (machine_code, code)), *rest = reduced
    codegen = target_context.codegen()
    codegen._engine._defined_symbols.update(names)  # numba would ask the parsed code for them
    result = CompileResult._rebuild(target_context, (library, kind, (machine_code, _no_code())), *rest)
    result.library._get_module_for_linking = cache(lambda: binding.parse_bitcode(code))
    return result


class KeptCode(FunctionCache):
    """What numba asks for compiled code of one function before it compiles, and gives it to afterwards."""

    def __init__(self, function: Callable[..., Any], sources: Path, stamp: object) -> None:
        self._py_func = function
        self._sources = sources
        version = f"{numba.__version__} {llvmlite.__version__} {sys.implementation.cache_tag}"
        self._made_of = (version, stamp, function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        name = function.__qualname__.replace("<", "").replace(">", "")
        self._any = f"{Path(function.__code__.co_filename).stem}.{name}.{sys.implementation.cache_tag}."
        self._ours = self._any + hashlib.sha256(repr(self._made_of).encode()).hexdigest()[:16]
        self.enable()

    @property
    def cache_path(self) -> str:
        return str(folder_for(self._sources) or "")

    def _file_name(self, key: object) -> str:
        return f"{self._ours}.{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}{_SUFFIX}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # what compiled code calls; numba loads here what it needs to compile, too
        key = self._index_key(sig, target_context.codegen())
        triple, *_ = key[1]
        for_any = (key[0], (triple, *_ANY_PROCESSOR), key[2])
        # it lies in the package, so that whoever could write it could as well write the sources, which Python runs
        found = self._load(_shipped(), for_any, Path.read_bytes, target_context)
        return found or self._load(folder_for(self._sources), key, read_private, target_context)

    def _load(self, folder: Path | None, key: object, read: Callable[[Path], bytes], target_context: Any) -> Any:
        if folder is None:
            return None
        with contextlib.suppress(OSError, SetupError):
            content = read(folder / self._file_name(key))
            digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(data).digest() == digest:
                with contextlib.suppress(Exception):  # of many kinds, if two builds call themselves the same version
                    made_of, made_for, *made = pickle.loads(data)
                    if (made_of, made_for) == (self._made_of, key):
                        return _rebuilt(target_context, *made)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        folder = folder_for(self._sources)
        if folder is None or data.library.has_dynamic_globals or not all(lifted.can_cache for lifted in data.lifted):
            return
        key = self._index_key(sig, data.codegen)
        content = dumps((self._made_of, key, _names_in(data.library), data._reduce()))
        try:
            write_whole(folder / self._file_name(key), hashlib.sha256(content).digest() + content, private=True)
        except BadInputError as error:
            reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
            _say_once(f"compiled code cannot be kept in {folder} ({reason}): the next start compiles again.")
            return
        self._remove_stale(folder)

    def _remove_stale(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith(self._any) and name.endswith(_SUFFIX) and not name.startswith(self._ours):
                    with contextlib.suppress(OSError):
                        os.unlink(folder / name)


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
