"""C entry points made at run time: what torch, CuPy and the core call by address.

Each is a few lines of LLVM that carry what the compiled core cannot: the table of states (torch's callbacks have no
context argument, and an address baked into numba code would rule out its cache), the exception that an allocation
without memory has to throw (torch takes a NULL silently), and the error indicator of Python, which has to survive
a visit to Python from the middle of somebody else's error handling.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import llvmlite.binding as llvm
import numpy as np

from stalloc.runtime import core
from stalloc.runtime.layout import OOM_TEXT, OOM_TEXT_LENGTH

if TYPE_CHECKING:
    from stalloc.runtime.poison import Watch

_engines: list[object] = []  # compiled code lives as long as the process: torch keeps its address
INTERRUPTED = 2  # a bit that no address and no other answer has
_gate = np.zeros(2, np.int64)  # 1 once the slow path is closed; how many threads are on it


def _compile(source: str, *names: str) -> list[int]:
    """Compile a module and return the addresses of the functions named."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(source)
    module.verify()
    # the large code model, as numba's: sections of a module may lie more than 2 GiB apart in a crowded address space,
    # and with 32-bit distances between them LLVM aborts the process then
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, codemodel="large", jit=True)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    engine.run_static_constructors()
    _engines.append((engine, module, machine))
    return [engine.get_function_address(name) for name in names]


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address
    return address


def _library_symbol(library: ctypes.CDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


_FREE = """
define void @free(ptr %pointer, i64 %size, i32 %device, ptr %stream) {{
  %index = sext i32 %device to i64
  %table = inttoptr i64 {states} to ptr
  %row = getelementptr i64, ptr %table, i64 %index
  %state = load i64, ptr %row
  %address = ptrtoint ptr %pointer to i64
  %core = inttoptr i64 {core} to ptr
  call void %core(i64 %state, i64 %address)
  ret void
}}
"""


def slow_entry(handler: Callable[[int, int, int], int]) -> int:
    """The address of `int64 f(int64 device, int64 request, int64 argument)` that enters Python's `handler`.

    The handler's answer may have the bit INTERRUPTED set: then KeyboardInterrupt is raised where Python goes on.
    Safe on any thread, with a Python error set, and while the interpreter goes down (then 0, without entering): see
    `close_slow_entries`.
    """
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    thunk = kind(handler)
    _engines.append(thunk)
    api = ctypes.pythonapi
    process = ctypes.CDLL(None)
    finalizing = getattr(api, "Py_IsFinalizing", None) or api._Py_IsFinalizing
    source = f"""
define i64 @slow(i64 %device, i64 %request, i64 %argument) {{
entry:
  %closed.word = inttoptr i64 {_gate.ctypes.data} to ptr
  %inside.word = inttoptr i64 {_gate.ctypes.data + 8} to ptr
  %before = atomicrmw add ptr %inside.word, i64 1 seq_cst
  %closed = load atomic i64, ptr %closed.word seq_cst, align 8
  %shut = icmp ne i64 %closed, 0
  br i1 %shut, label %leave, label %check
check:
  %finalizing = inttoptr i64 {_address(finalizing)} to ptr
  %ending = call i32 %finalizing()
  %gone = icmp ne i32 %ending, 0
  br i1 %gone, label %leave, label %open
leave:
  %left = atomicrmw sub ptr %inside.word, i64 1 seq_cst
  %self.function = inttoptr i64 {_address(process.pthread_self)} to ptr
  %self = call i64 %self.function()
  %last = icmp eq i64 %self, {threading.main_thread().ident}
  br i1 %last, label %refuse, label %other
other:
  %state.function = inttoptr i64 {_address(api.PyGILState_GetThisThreadState)} to ptr
  %state = call ptr %state.function()
  %foreign = icmp eq ptr %state, null
  br i1 %foreign, label %refuse, label %daemon
refuse:
  ret i64 0
daemon:
  %check.function = inttoptr i64 {_address(api.PyGILState_Check)} to ptr
  %held = call i32 %check.function()
  %holds = icmp ne i32 %held, 0
  br i1 %holds, label %save, label %wait
save:
  %save.function = inttoptr i64 {_address(api.PyEval_SaveThread)} to ptr
  %saved = call ptr %save.function()
  br label %wait
wait:
  %pause = inttoptr i64 {_address(process.pause)} to ptr
  %interrupted = call i32 %pause()
  br label %wait
open:
  %type = alloca ptr
  %value = alloca ptr
  %trace = alloca ptr
  %ensure = inttoptr i64 {_address(api.PyGILState_Ensure)} to ptr
  %fetch = inttoptr i64 {_address(api.PyErr_Fetch)} to ptr
  %restore = inttoptr i64 {_address(api.PyErr_Restore)} to ptr
  %release = inttoptr i64 {_address(api.PyGILState_Release)} to ptr
  %gil = call i32 %ensure()
  call void %fetch(ptr %type, ptr %value, ptr %trace)
  %thunk = inttoptr i64 {_address(thunk)} to ptr
  %result = call i64 %thunk(i64 %device, i64 %request, i64 %argument)
  %t = load ptr, ptr %type
  %v = load ptr, ptr %value
  %b = load ptr, ptr %trace
  call void %restore(ptr %t, ptr %v, ptr %b)
  call void %release(i32 %gil)
  %done = atomicrmw sub ptr %inside.word, i64 1 seq_cst
  %flag = and i64 %result, {INTERRUPTED}
  %answer = xor i64 %result, %flag
  %again = icmp ne i64 %flag, 0
  br i1 %again, label %interrupt, label %answered
interrupt:
  %set = inttoptr i64 {_address(api.PyErr_SetInterrupt)} to ptr
  call void %set()
  br label %answered
answered:
  ret i64 %answer
}}"""
    return _compile(source, "slow")[0]


def close_slow_entries(timeout_seconds: float = 2.0) -> None:
    """Let no thread enter Python any more, and wait for those that are inside; to be called when Python ends.

    Before Python 3.14 a thread that asks for the GIL of an interpreter which is gone is unwound like by an exception,
    and the program aborts where that meets C++ code which catches all exceptions, as around CuPy's C allocators.
    Threads of Python that come later wait for the end of the process, as those that ask for the GIL do from 3.14 on:
    only daemons are left, and nobody waits for them. The main thread and threads of others get no memory.
    """
    _gate[0] = 1
    end = time.monotonic() + timeout_seconds
    while _gate[1] and time.monotonic() < end:
        time.sleep(0.001)


def core_entries() -> tuple[int, int]:
    """Where requests are served: addresses of `int64 allocate(state, bytes, stream)`, `void free(state, address)`."""
    return core.allocate_entry.address, core.free_entry.address


def checked_entries(watch: "Watch") -> tuple[int, int]:
    """The same by way of Python, for STALLOC_POISON."""
    free = slow_entry(watch.free)
    source = f"""
define void @free(i64 %state, i64 %address) {{
  %slow = inttoptr i64 {free} to ptr
  %nothing = call i64 %slow(i64 %state, i64 %address, i64 0)
  ret void
}}"""
    return slow_entry(watch.allocate), _compile(source, "free")[0]


def keep_whole_at_fork(states: int, num_states: int) -> None:
    """Let every fork of this process happen while no thread is inside the core, so that the child's tables are whole.

    `states` is the address of a table of `num_states` state addresses, 0 for none. The locks are taken by the C library
    inside fork itself, where no other code of Python's can come between: taking them earlier, in Python, would let
    another thread wait for one with the GIL that the fork needs. Who holds one never waits, so neither does a fork.
    """
    process = ctypes.CDLL(None)
    source = f"""
define void @prepare() {{
entry:
  br label %look
look:
  %i = phi i64 [0, %entry], [%following, %next]
  %table = inttoptr i64 {states} to ptr
  %row = getelementptr i64, ptr %table, i64 %i
  %state = load i64, ptr %row
  %none = icmp eq i64 %state, 0
  br i1 %none, label %next, label %take
take:
  %lock = inttoptr i64 %state to ptr
  %before = atomicrmw xchg ptr %lock, i64 1 acquire
  %held = icmp ne i64 %before, 0
  br i1 %held, label %wait, label %next
wait:
  %yield = inttoptr i64 {_address(process.sched_yield)} to ptr
  %ignored = call i32 %yield()
  br label %take
next:
  %following = add i64 %i, 1
  %more = icmp ult i64 %following, {num_states}
  br i1 %more, label %look, label %done
done:
  ret void
}}

define void @release() {{
entry:
  br label %look
look:
  %i = phi i64 [0, %entry], [%following, %next]
  %table = inttoptr i64 {states} to ptr
  %row = getelementptr i64, ptr %table, i64 %i
  %state = load i64, ptr %row
  %none = icmp eq i64 %state, 0
  br i1 %none, label %next, label %give
give:
  %lock = inttoptr i64 %state to ptr
  store atomic i64 0, ptr %lock release, align 8
  br label %next
next:
  %following = add i64 %i, 1
  %more = icmp ult i64 %following, {num_states}
  br i1 %more, label %look, label %done
done:
  ret void
}}
"""
    prepare, release = (ctypes.c_void_p(address) for address in _compile(source, "prepare", "release"))
    # glibc links pthread_atfork into each library and has this in its own; others have it under its name
    register = getattr(process, "pthread_atfork", None)
    status = (
        register(prepare, release, release) if register else process.__register_atfork(prepare, release, release, None)
    )
    if status != 0:
        raise MemoryError("the C library has no memory for what is to be done at a fork")


def torch_entries(states: int, torch_folder: Path, entries: tuple[int, int] | None = None) -> tuple[int, int]:
    """The addresses of torch's `void* alloc(ssize_t, int, stream)` and `void free(void*, ssize_t, int, stream)`.

    `states` is the address of a table of state addresses by device, `entries` are where requests are served
    (by default `core_entries`). An allocation without memory throws
    c10::OutOfMemoryError with the text that the state points to, which Python sees as torch.OutOfMemoryError.
    """
    core_allocate, core_free = entries or core_entries()
    c10 = ctypes.CDLL(str(torch_folder / "lib" / "libc10.so"))
    c10_cuda = ctypes.CDLL(str(torch_folder / "lib" / "libc10_cuda.so"))
    runtime = ctypes.CDLL("libstdc++.so.6")
    make = _library_symbol(
        c10, "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    )
    # a vtable begins with the offset to the top and the type; the pointer in an object leads to what follows:
    # the complete destructor, the deleting one, and so on (Itanium C++ ABI, 2.5.2)
    vtable = _library_symbol(c10_cuda, "_ZTVN3c1016OutOfMemoryErrorE") + 16
    place = ctypes.create_string_buffer(b"stalloc")
    _engines.append(place)
    source = f"""
%location = type {{ ptr, ptr, i32 }}
%string = type {{ ptr, i64, [2 x i64] }}

define ptr @allocate(i64 %size, i32 %device, ptr %stream) uwtable {{
entry:
  %index = sext i32 %device to i64
  %table = inttoptr i64 {states} to ptr
  %row = getelementptr i64, ptr %table, i64 %index
  %state = load i64, ptr %row
  %raw = ptrtoint ptr %stream to i64
  %core = inttoptr i64 {core_allocate} to ptr
  %address = call i64 %core(i64 %state, i64 %size, i64 %raw)
  %none = icmp eq i64 %address, 0
  %wanted = icmp sgt i64 %size, 0
  %failed = and i1 %none, %wanted
  br i1 %failed, label %throw, label %done
done:
  %result = inttoptr i64 %address to ptr
  ret ptr %result
throw:
  call void @throw(i64 %state)
  unreachable
}}

define void @throw(i64 %state) noinline uwtable {{
  %base = inttoptr i64 %state to ptr
  %text.word = getelementptr i64, ptr %base, i64 {OOM_TEXT}
  %length.word = getelementptr i64, ptr %base, i64 {OOM_TEXT_LENGTH}
  %text.address = load i64, ptr %text.word
  %length = load i64, ptr %length.word
  %from = inttoptr i64 %text.address to ptr
  %new = inttoptr i64 {_address(runtime._Znwm)} to ptr
  %room = add i64 %length, 1
  %copy = call ptr %new(i64 %room)
  call void @llvm.memcpy.p0.p0.i64(ptr %copy, ptr %from, i64 %length, i1 false)
  %end = getelementptr i8, ptr %copy, i64 %length
  store i8 0, ptr %end
  %message = alloca %string, align 8
  store ptr %copy, ptr %message
  %message.length = getelementptr %string, ptr %message, i32 0, i32 1
  store i64 %length, ptr %message.length
  %message.capacity = getelementptr %string, ptr %message, i32 0, i32 2
  store i64 %length, ptr %message.capacity
  %where = alloca %location, align 8
  %name = inttoptr i64 {ctypes.addressof(place)} to ptr
  store ptr %name, ptr %where
  %where.file = getelementptr %location, ptr %where, i32 0, i32 1
  store ptr %name, ptr %where.file
  %where.line = getelementptr %location, ptr %where, i32 0, i32 2
  store i32 0, ptr %where.line
  %allocate = inttoptr i64 {_address(runtime.__cxa_allocate_exception)} to ptr
  %error = call ptr %allocate(i64 1024)
  %make = inttoptr i64 {make} to ptr
  call void %make(ptr %error, ptr byval(%location) align 8 %where, ptr %message)
  %vtable = inttoptr i64 {vtable} to ptr
  store ptr %vtable, ptr %error
  %destroy = load ptr, ptr %vtable
  %type = inttoptr i64 {_library_symbol(c10_cuda, "_ZTIN3c1016OutOfMemoryErrorE")} to ptr
  %throw = inttoptr i64 {_address(runtime.__cxa_throw)} to ptr
  call void %throw(ptr %error, ptr %type, ptr %destroy)
  unreachable
}}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
"""
    allocate, free = _compile(source + _FREE.format(states=states, core=core_free), "allocate", "free")
    return allocate, free


def cupy_entries(states: int, entries: tuple[int, int] | None = None) -> tuple[int, int]:
    """The addresses of CuPy's `void* malloc(void* stream, size_t, int)` and `void free(void*, void*, int)`.

    Arguments as for `torch_entries`.

    CuPy hands its `param` through: it carries the current stream. NULL means no memory; the caller raises.
    """
    core_allocate, core_free = entries or core_entries()
    source = f"""
define ptr @allocate(ptr %stream, i64 %size, i32 %device) {{
  %index = sext i32 %device to i64
  %table = inttoptr i64 {states} to ptr
  %row = getelementptr i64, ptr %table, i64 %index
  %state = load i64, ptr %row
  %raw = ptrtoint ptr %stream to i64
  %core = inttoptr i64 {core_allocate} to ptr
  %address = call i64 %core(i64 %state, i64 %size, i64 %raw)
  %result = inttoptr i64 %address to ptr
  ret ptr %result
}}
"""
    free = _FREE.format(states=states, core=core_free)
    free = free.replace("ptr %pointer, i64 %size, i32 %device, ptr %stream", "ptr %stream, ptr %pointer, i32 %device")
    allocate, release = _compile(source + free, "allocate", "free")
    return allocate, release
