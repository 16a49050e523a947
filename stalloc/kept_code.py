"""Compiled code on disk, in place of numba's own cache.

Contract: what is read back is machine code that will run, so it comes from a private folder only (see private.py),
from files that nobody else can write, or from the package itself, and only if it is whole and was made by these
versions, from these sources, for exactly this function, signature and processor. Anything else is compiled anew. A
cache that cannot be read or written costs time and one sentence, nothing more.

Most of what a file holds is LLVM's code of the function, for others that are compiled later and call it. numba parses
it at once, which takes longer than all the rest; here it is parsed when it is needed.

numba's cache keeps an index and numbered files of code: where the disk fills up between the two, or two processes
save at once, an index may lead to code of other sources. Here each file says itself what it holds.

A wheel may bring compiled code of its own (see integrations/build_backend.py), made for every processor of its
architecture; it is looked for first.
"""

import contextlib
import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba.core import config
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from stalloc.errors import BadInputError, SetupError
from stalloc.files import write_whole
from stalloc.notices import say
from stalloc.private import is_installed, private_folder, read_private, user_cache

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
    """A compiled function as it was, of `_names_in` its library and `CompileResult._reduce`."""
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
