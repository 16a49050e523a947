"""C entry points made at run time: what torch, CuPy and the core call by address.

Each is a few lines of LLVM that carry what the compiled core cannot: the table of states (torch's callbacks have no
context argument, and an address baked into numba code would rule out its cache), the exception that an allocation
without memory has to throw (torch takes a NULL silently), and the error indicator of Python, which has to survive
a visit to Python from the middle of somebody else's error handling.

Contract: whatever a .ll file declares is found in one of the libraries named, or set by its name; a declaration that is
neither is an error when the file is linked, not when the code runs. The code lives as long as the process, since torch
and CuPy keep its address, and so do the numbers and objects that it was given.
"""

import ctypes
import platform
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

from stalloc.core.frees import share_entry
from stalloc.core.records import State, offset_of, path_of
from stalloc.core.requests import free_entry, malloc_entry
from stalloc.threads import uninterrupted

Handler = Callable[[int, int, int], int]
Again = Callable[[int, int, int, list[BaseException]], int]

# the constructors of c10::Error and std::string, with the strings of C++11 and with those before: PyTorch's wheels for
# CUDA 12 have the older ones up to 2.6
_ERROR = (
    "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    "_ZN3c105ErrorC2ENS_14SourceLocationESs",
)
_STRING = ("_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcmRKS3_", "_ZNSsC1EPKcmRKSaIcE")

_kept: list[object] = []  # what compiled code calls lives as long as the process
_compiled: dict[tuple[str, str], bytes] = {}  # object code of files: all links of one differ in addresses only


def word(value: int) -> int:
    """The address of a constant word, for a global of a .ll file."""
    constant = ctypes.c_int64(value)
    _kept.append(constant)
    return ctypes.addressof(constant)


def text(value: bytes) -> int:
    """The address of a constant text, for a global of a .ll file."""
    constant = ctypes.create_string_buffer(value)
    _kept.append(constant)
    return ctypes.addressof(constant)


def find(names: tuple[str, ...], libraries: tuple[ctypes.CDLL, ...]) -> tuple[str, int]:
    """The first of these symbols that one of the libraries has, and its address; OSError if there is none."""
    for name in names:
        for library in libraries:
            try:
                return name, ctypes.addressof(ctypes.c_char.in_dll(library, name))
            except ValueError:
                continue
    raise OSError(f"stalloc: this process has no symbol {names[0]}, which an entry point of the allocator needs.")


def link(
    package: str,
    file: str,
    *names: str,
    set_to: dict[str, int],
    libraries: tuple[ctypes.CDLL, ...] = (),
    hot: bool = False,
) -> list[int]:
    """Compile a file of a package, with care if its code is `hot`; the addresses of the functions named.

    `set_to` are addresses of what it declares, by name; the rest is looked up in `libraries`.
    """

    def compiled() -> list[int]:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        module = llvm.parse_assembly(files(package).joinpath(file).read_text(encoding="utf-8"))
        module.verify()
        # the large code model, as numba's: sections of a module may lie more than 2 GiB apart in a crowded address
        # space, and with 32-bit distances between them LLVM aborts the process then
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(opt=2 if hot else 0, codemodel="large", jit=True)
        engine = llvm.create_mcjit_compiler(module, machine)
        where = package, file
        engine.set_object_cache(
            lambda _, code: _compiled.setdefault(where, bytes(code)), lambda _: _compiled.get(where)
        )
        for declared in [*module.functions, *module.global_variables]:
            if declared.is_declaration and not declared.name.startswith("llvm."):
                address = set_to.get(declared.name) or find((declared.name,), libraries)[1]
                engine.add_global_mapping(declared, address)
        engine.finalize_object()
        engine.run_static_constructors()
        _kept.append((engine, module, machine))
        return [engine.get_function_address(name) for name in names]

    return uninterrupted(compiled)


def slow_entry(handler: Handler, again: Again | None = None) -> int:
    """The address of `int64 f(int64 device, int64 request, int64 argument)` that enters Python's `handler`.

    An exception that ends the handler, wherever it comes from (signals are handled at the first line of any function),
    is no answer: then `again(device, request, argument, errors)` is asked, until it answers; each exception is added to
    `errors`. The last one that `again` leaves there is raised where the thread's Python code goes on. Without `again`
    the answer is 0. A thread that has reached the limit of recursion gets some more room.

    Safe on any thread and with a Python error set. When the interpreter has ended there is no entering any more: the
    main thread and threads of others get 0, threads of Python wait for the end of the process, as those that ask for
    the GIL do from Python 3.14 on. Before, such a thread is unwound like by an exception, and the program aborts where
    that meets C++ code which catches all exceptions, as around CuPy's C allocators; so it is stopped here.
    """
    _kept.append((handler, again))
    unwinding = ctypes.CDLL("libgcc_s.so.1")
    set_to = {
        "handler": word(id(handler)),
        "again": word(id(again) if again is not None else 0),
        "format": text(b"LLL"),
        "format_again": text(b"LLLO"),
        "gettid_number": word(178 if platform.machine() == "aarch64" else 186),
        "any_exception": word(id(BaseException)),
        "recursion_error": word(id(RecursionError)),
    }
    libraries = ctypes.pythonapi, ctypes.CDLL(None), unwinding
    return link(__package__, "slow.ll", "slow", set_to=set_to, libraries=libraries)[0]


def core_entries() -> tuple[int, int]:
    """Where requests are served: addresses of `int64 malloc(state, bytes, stream)`, `void free(state, address)`."""
    return malloc_entry.address, free_entry.address


def sited_malloc(
    malloc: int, table: np.ndarray, calls: np.ndarray, num_calls: ctypes.c_int64, name_stack: Handler
) -> int:
    """The address of a malloc like `malloc` that notes which Python stack calls it.

    `table` has pairs of words, as many as a power of two: the hash of a stack (0: empty) and its number from 1 on.
    `calls` has rows of four words: state, address, bytes, stack (0: unknown); `num_calls` counts them, and the last
    ones are there, as many as a power of two. `name_stack(hash, 0, 0)` is called in the thread whose stack the table
    does not have yet, enters it there, and returns its number. All of them live as long as the process.
    """
    _kept.append((table, calls, num_calls))
    set_to = {
        "core_malloc": word(malloc),
        "table": table.ctypes.data,
        "table_mask": word(len(table) - 1),
        "calls": calls.ctypes.data,
        "calls_mask": word(len(calls) - 1),
        "num_calls": ctypes.addressof(num_calls),
        "slow": slow_entry(name_stack),
    }
    return link(__package__, "sites.ll", "malloc", set_to=set_to, libraries=(ctypes.pythonapi,), hot=True)[0]


def free_by(slow: int) -> int:
    """The address of `void free(state, address)` that enters Python by a `slow_entry`."""
    return link(__package__, "checked.ll", "free", set_to={"slow": slow})[0]


def keep_whole_at_fork(states: int, num_states: int) -> None:
    """Let every fork of this process happen while no thread is inside the core, so that the child's tables are whole.

    `states` is the address of a table of `num_states` state addresses, 0 for none. The locks are taken by the C library
    inside fork itself, where no other code of Python's can come between: taking them earlier, in Python, would let
    another thread wait for one with the GIL that the fork needs. Who holds one never waits, so neither does a fork.
    """
    process = ctypes.CDLL(None)
    set_to = {"states": states, "num_states": word(num_states)}
    functions = link(__package__, "fork.ll", "prepare", "release", set_to=set_to, libraries=(process,))
    prepare, release = (ctypes.c_void_p(address) for address in functions)
    # glibc links pthread_atfork into each library and has this in its own; others have it under its name
    register = getattr(process, "pthread_atfork", None)
    status = (
        register(prepare, release, release) if register else process.__register_atfork(prepare, release, release, None)
    )
    if status != 0:
        raise MemoryError("the C library has no memory for what is to be done at a fork")


def torch_entries(
    states: int, torch_folder: Path, entries: tuple[int, int] | None = None, malloc_word: int = 0
) -> tuple[int, int]:
    """The addresses of torch's `void* alloc(ssize_t, int, stream)` and `void free(void*, ssize_t, int, stream)`.

    `states` is the address of a table of state addresses by device, `entries` are where requests are served
    (by default `core_entries`). `malloc_word`, if given, is the address of a word that holds the malloc's address in
    place of `entries`, and may be written at any time. An allocation without memory throws
    c10::OutOfMemoryError with the text that the state points to, which Python sees as torch.OutOfMemoryError; where the
    driver failed c10::Error, a RuntimeError. OSError names the symbol if this torch lacks one that they need.
    """
    malloc, free = entries or core_entries()
    malloc_word = malloc_word or word(malloc)
    set_to = {"states": states, "core_malloc": malloc_word, "core_free": free, "file_name": text(b"stalloc")}
    for name in ("oom_text", "oom_text_length", "driver_error"):
        set_to[name] = word(offset_of(State, path_of(State, name)))
    names = (str(torch_folder / "lib" / "libc10.so"), str(torch_folder / "lib" / "libc10_cuda.so"), "libstdc++.so.6")
    libraries = tuple(ctypes.CDLL(name) for name in names)
    error, set_to["construct_error"] = find(_ERROR, libraries)
    set_to["construct_string"] = find((_STRING[_ERROR.index(error)],), libraries)[1]
    allocate, release = link(__package__, "torch.ll", "allocate", "free", set_to=set_to, libraries=libraries, hot=True)
    return allocate, release


def torch_record_stream(states: np.ndarray) -> int:
    """The address of torch's `void record_stream(void*, stream)`; `states` are the addresses of states, 0 for none."""
    set_to = {"states": states.ctypes.data, "num_states": word(len(states)), "core_share": share_entry.address}
    return link(__package__, "share.ll", "share", set_to=set_to)[0]


def cupy_entries(states: int, entries: tuple[int, int] | None = None, malloc_word: int = 0) -> tuple[int, int]:
    """The addresses of CuPy's `void* malloc(void* stream, size_t, int)` and `void free(void*, void*, int)`.

    Arguments as for `torch_entries`.
    """
    malloc, free = entries or core_entries()
    set_to = {"states": states, "core_malloc": malloc_word or word(malloc), "core_free": free}
    allocate, release = link(__package__, "cupy.ll", "allocate", "free", set_to=set_to, hot=True)
    return allocate, release


def page_entries(driver: ctypes.CDLL) -> tuple[int, int]:
    """For `cupy.cuda.CFunctionAllocator`: addresses of `handle create(properties, bytes, device)` and `release`."""
    create, release = link(__package__, "pages.ll", "create", "release", set_to={}, libraries=(driver,))
    return create, release
