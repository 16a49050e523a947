"""C entry points made at run time: what torch, CuPy and the core call by address.

Each is a few lines of LLVM that carry what the compiled core cannot: the table of states (torch's callbacks have no
context argument, and an address baked into numba code would rule out its cache), the exception that an allocation
without memory has to throw (torch takes a NULL silently), and the error indicator of Python, which has to survive
a visit to Python from the middle of somebody else's error handling.
"""

import builtins
import ctypes
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import llvmlite.binding as llvm

from stalloc.core.records import State, offset_of
from stalloc.core.requests import free_entry, malloc_entry
from stalloc.runtime.interruptions import is_interruption

if TYPE_CHECKING:
    from stalloc.runtime.poison import Watch

_engines: list[object] = []  # compiled code lives as long as the process: torch keeps its address


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


_Handler = Callable[[int, int, int], int]
_Again = Callable[[int, int, int, list[BaseException]], int]

_FORMATS = ctypes.create_string_buffer(b"LLL"), ctypes.create_string_buffer(b"LLLO")
_MOST_FAILURES = 100  # until the answer is 0: errors that come again whatever is done
_MORE_ROOM = 200  # calls
_OF_PYTHON = (
    "Py_IsInitialized",
    "PyGILState_GetThisThreadState",
    "PyGILState_Check",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyEval_SaveThread",
    "PyErr_Fetch",
    "PyErr_Restore",
    "PyErr_Clear",
    "PyErr_NormalizeException",
    "PyErr_GivenExceptionMatches",
    "PyErr_SetObject",
    "PyErr_SetInterrupt",
    "PyException_SetTraceback",
    "PyList_New",
    "PyList_Append",
    "PyList_GetItem",
    "PyList_Size",
    "PyList_SetSlice",
    "PyObject_CallFunction",
    "PyObject_Type",
    "PyLong_AsLongLong",
    "Py_IncRef",
    "Py_DecRef",
    "Py_AddPendingCall",
    "Py_GetRecursionLimit",
    "Py_SetRecursionLimit",
    "PyThreadState_SetAsyncExc",
    "PyThread_get_thread_ident",
)

_SLOW = """
declare i32 @__gcc_personality_v0(...)

define i64 @slow(i64 %device, i64 %request, i64 %argument) personality ptr @__gcc_personality_v0 {{
entry:
  %initialized = inttoptr i64 {Py_IsInitialized} to ptr
  %there = call i32 %initialized()
  %system = inttoptr i64 {syscall} to ptr
  %pid.function = inttoptr i64 {getpid} to ptr
  %tid.long = call i64 (i64, ...) %system(i64 {number})
  %tid = trunc i64 %tid.long to i32
  %pid = call i32 %pid.function()
  %main = icmp eq i32 %tid, %pid
  %state.function = inttoptr i64 {PyGILState_GetThisThreadState} to ptr
  %gone = icmp eq i32 %there, 0
  br i1 %gone, label %late, label %open
late:
  br i1 %main, label %refuse, label %other
other:
  %late.state = call ptr %state.function()
  %late.foreign = icmp eq ptr %late.state, null
  br i1 %late.foreign, label %refuse, label %daemon
refuse:
  ret i64 0
daemon:
  %check.function = inttoptr i64 {PyGILState_Check} to ptr
  %held = call i32 %check.function()
  %holds = icmp ne i32 %held, 0
  br i1 %holds, label %save, label %wait
save:
  %save.function = inttoptr i64 {PyEval_SaveThread} to ptr
  %saved = call ptr %save.function()
  br label %wait
wait:
  %pause = inttoptr i64 {pause} to ptr
  %interrupted = call i32 %pause()
  br label %wait
open:
  %state = call ptr %state.function()
  %foreign = icmp eq ptr %state, null
  %raises.later = or i1 %main, %foreign
  %answer = invoke i64 @enter(i64 %device, i64 %request, i64 %argument, i1 %raises.later)
    to label %answered unwind label %unwound
answered:
  ret i64 %answer
unwound:
  %unwinding = landingpad {{ ptr, i32 }} cleanup
  br label %wait
}}

define i64 @enter(i64 %device, i64 %request, i64 %argument, i1 %raises.later) noinline uwtable {{
entry:
  %type = alloca ptr
  %value = alloca ptr
  %trace = alloca ptr
  %error.type = alloca ptr
  %error.value = alloca ptr
  %error.trace = alloca ptr
  %ensure = inttoptr i64 {PyGILState_Ensure} to ptr
  %fetch = inttoptr i64 {PyErr_Fetch} to ptr
  %restore = inttoptr i64 {PyErr_Restore} to ptr
  %clear = inttoptr i64 {PyErr_Clear} to ptr
  %release = inttoptr i64 {PyGILState_Release} to ptr
  %normalize = inttoptr i64 {PyErr_NormalizeException} to ptr
  %set.trace = inttoptr i64 {PyException_SetTraceback} to ptr
  %matches = inttoptr i64 {PyErr_GivenExceptionMatches} to ptr
  %call = inttoptr i64 {PyObject_CallFunction} to ptr
  %number = inttoptr i64 {PyLong_AsLongLong} to ptr
  %forget = inttoptr i64 {Py_DecRef} to ptr
  %keep = inttoptr i64 {Py_IncRef} to ptr
  %list.new = inttoptr i64 {PyList_New} to ptr
  %list.append = inttoptr i64 {PyList_Append} to ptr
  %list.item = inttoptr i64 {PyList_GetItem} to ptr
  %list.size = inttoptr i64 {PyList_Size} to ptr
  %limit = inttoptr i64 {Py_GetRecursionLimit} to ptr
  %set.limit = inttoptr i64 {Py_SetRecursionLimit} to ptr
  %gil = call i32 %ensure()
  call void %fetch(ptr %type, ptr %value, ptr %trace)
  %handler = inttoptr i64 {handler} to ptr
  %again = inttoptr i64 {again} to ptr
  %format = inttoptr i64 {format} to ptr
  %format.first = inttoptr i64 {format_first} to ptr
  %any = inttoptr i64 {BaseException} to ptr
  %recursion = inttoptr i64 {RecursionError} to ptr
  %errors = call ptr %list.new(i64 0)
  %no.list = icmp eq ptr %errors, null
  br i1 %no.list, label %no.memory, label %first
no.memory:
  call void %clear()
  br label %left
first:
  %first.result = call ptr (ptr, ptr, ...) %call(
    ptr %handler, ptr %format.first, i64 %device, i64 %request, i64 %argument)
  br label %look
retry:
  %more = call ptr (ptr, ptr, ...) %call(
    ptr %again, ptr %format, i64 %device, i64 %request, i64 %argument, ptr %errors)
  br label %look
look:
  %failures = phi i64 [0, %first], [%failures.now, %retry]
  %room = phi i32 [0, %first], [%room.now, %retry]
  %result = phi ptr [%first.result, %first], [%more, %retry]
  %failed = icmp eq ptr %result, null
  br i1 %failed, label %caught, label %served
caught:
  call void %fetch(ptr %error.type, ptr %error.value, ptr %error.trace)
  call void %normalize(ptr %error.type, ptr %error.value, ptr %error.trace)
  %error = load ptr, ptr %error.value
  %its.type = load ptr, ptr %error.type
  %its.trace = load ptr, ptr %error.trace
  %traced = icmp ne ptr %its.trace, null
  br i1 %traced, label %attach, label %note
attach:
  %attached = call i32 %set.trace(ptr %error, ptr %its.trace)
  br label %note
note:
  %noted = call i32 %list.append(ptr %errors, ptr %error)
  call void %clear()
  %deep = call i32 %matches(ptr %error, ptr %recursion)
  call void %forget(ptr %its.type)
  call void %forget(ptr %error)
  call void %forget(ptr %its.trace)
  %failures.now = add i64 %failures, 1
  %is.deep = icmp ne i32 %deep, 0
  %no.room = icmp eq i32 %room, 0
  %wants.room = and i1 %is.deep, %no.room
  br i1 %wants.room, label %give.room, label %on
give.room:
  %now = call i32 %limit()
  %higher = add i32 %now, {room}
  call void %set.limit(i32 %higher)
  br label %on
on:
  %room.now = phi i32 [%room, %note], [{room}, %give.room]
  %few = icmp ult i64 %failures.now, {most}
  %can = icmp ne i64 {has_again}, 0
  %goes.on = and i1 %few, %can
  br i1 %goes.on, label %retry, label %ended
served:
  %answer.served = call i64 %number(ptr %result)
  call void %forget(ptr %result)
  call void %clear()
  br label %ended
ended:
  %answer = phi i64 [0, %on], [%answer.served, %served]
  %room.given = phi i32 [%room.now, %on], [%room, %served]
  %had.room = icmp ne i32 %room.given, 0
  br i1 %had.room, label %take.room, label %tell
take.room:
  %then = call i32 %limit()
  %lower = sub i32 %then, {room}
  call void %set.limit(i32 %lower)
  br label %tell
tell:
  %size = call i64 %list.size(ptr %errors)
  %some = icmp sgt i64 %size, 0
  br i1 %some, label %last, label %told
last:
  %index = sub i64 %size, 1
  %item = call ptr %list.item(ptr %errors, i64 %index)
  %raisable = call i32 %matches(ptr %item, ptr %any)
  %is.raisable = icmp ne i32 %raisable, 0
  br i1 %is.raisable, label %choose, label %told
choose:
  br i1 %raises.later, label %pending, label %here
pending:
  call void %keep(ptr %item)
  %add = inttoptr i64 {Py_AddPendingCall} to ptr
  %added = call i32 %add(ptr @raise_later, ptr %item)
  %full = icmp ne i32 %added, 0
  br i1 %full, label %no.pending, label %told
no.pending:
  call void %forget(ptr %item)
  %set = inttoptr i64 {PyErr_SetInterrupt} to ptr
  call void %set()
  br label %told
here:
  %type.of = inttoptr i64 {PyObject_Type} to ptr
  %its.class = call ptr %type.of(ptr %item)
  %ident = inttoptr i64 {PyThread_get_thread_ident} to ptr
  %self = call i64 %ident()
  %async = inttoptr i64 {PyThreadState_SetAsyncExc} to ptr
  %threads = call i32 %async(i64 %self, ptr %its.class)
  call void %forget(ptr %its.class)
  br label %told
told:
  %slice = inttoptr i64 {PyList_SetSlice} to ptr
  %emptied = call i32 %slice(ptr %errors, i64 0, i64 %size, ptr null)
  call void %forget(ptr %errors)
  br label %left
left:
  %answer.left = phi i64 [0, %no.memory], [%answer, %told]
  %t = load ptr, ptr %type
  %v = load ptr, ptr %value
  %b = load ptr, ptr %trace
  call void %restore(ptr %t, ptr %v, ptr %b)
  call void %release(i32 %gil)
  ret i64 %answer.left
}}

define i32 @raise_later(ptr %error) {{
  %type.of = inttoptr i64 {PyObject_Type} to ptr
  %set = inttoptr i64 {PyErr_SetObject} to ptr
  %forget = inttoptr i64 {Py_DecRef} to ptr
  %type = call ptr %type.of(ptr %error)
  call void %set(ptr %type, ptr %error)
  call void %forget(ptr %type)
  call void %forget(ptr %error)
  ret i32 -1
}}
"""


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


def slow_entry(handler: _Handler, again: _Again | None = None) -> int:
    """The address of `int64 f(int64 device, int64 request, int64 argument)` that enters Python's `handler`.

    An exception that ends the handler, wherever it comes from (signals are handled at the first line of any function),
    is no answer: then `again(device, request, argument, errors)` is asked, until it answers; each exception is added to
    `errors`. The last one that `again` leaves there is raised where the thread's Python code goes on. Without `again`
    the answer is 0. Who has reached the limit of recursion gets some more room.

    Safe on any thread and with a Python error set. When the interpreter has ended there is no entering any more: the
    main thread and threads of others get 0, threads of Python wait for the end of the process, as those that ask for
    the GIL do from Python 3.14 on. Before, such a thread is unwound like by an exception, and the program aborts where
    that meets C++ code which catches all exceptions, as around CuPy's C allocators; so it is stopped here.
    """
    _engines.append((handler, again))
    api = ctypes.pythonapi
    process = ctypes.CDLL(None)
    llvm.add_symbol("__gcc_personality_v0", _address(ctypes.CDLL("libgcc_s.so.1").__gcc_personality_v0))
    functions = {name: _address(getattr(api, name)) for name in _OF_PYTHON}
    functions |= {name: _address(getattr(process, name)) for name in ("syscall", "getpid", "pause")}
    source = _SLOW.format(
        **functions,
        handler=id(handler),
        again=id(again),
        has_again=int(again is not None),
        format_first=ctypes.addressof(_FORMATS[0]),
        format=ctypes.addressof(_FORMATS[1]),
        **{name: id(getattr(builtins, name)) for name in ("BaseException", "RecursionError")},
        number=178 if platform.machine() == "aarch64" else 186,  # gettid, which the C library has from 2.30 on only
        most=_MOST_FAILURES,
        room=_MORE_ROOM,
    )
    return _compile(source, "slow")[0]


def lasting_entry(handler: _Handler) -> int:
    """The same for what has to be done as a whole, whatever interrupts it, and may be done twice.

    An error of its own is raised where the thread's Python code goes on.
    """

    def again(first: int, second: int, third: int, errors: list[BaseException]) -> int:
        return handler(first, second, third) if is_interruption(errors[-1]) else 0

    return slow_entry(handler, again)


def core_entries() -> tuple[int, int]:
    """Where requests are served: addresses of `int64 allocate(state, bytes, stream)`, `void free(state, address)`."""
    return malloc_entry.address, free_entry.address


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
    c10::OutOfMemoryError with the text that the state points to, which Python sees as torch.OutOfMemoryError; where the
    driver failed c10::Error, a RuntimeError.
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
    usual_vtable = _library_symbol(c10, "_ZTVN3c105ErrorE") + 16
    type_of = _library_symbol(c10_cuda, "_ZTIN3c1016OutOfMemoryErrorE")
    usual_type = _library_symbol(c10, "_ZTIN3c105ErrorE")
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
  %text.word = getelementptr i8, ptr %base, i64 {offset_of(State, "oom_text")}
  %length.word = getelementptr i8, ptr %base, i64 {offset_of(State, "oom_text_length")}
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
  %failed.word = getelementptr i8, ptr %base, i64 {offset_of(State, "driver_error")}
  %status = load i64, ptr %failed.word
  %failed = icmp ne i64 %status, 0
  %vtable.address = select i1 %failed, i64 {usual_vtable}, i64 {vtable}
  %vtable = inttoptr i64 %vtable.address to ptr
  store ptr %vtable, ptr %error
  %destroy = load ptr, ptr %vtable
  %type.address = select i1 %failed, i64 {usual_type}, i64 {type_of}
  %type = inttoptr i64 %type.address to ptr
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
