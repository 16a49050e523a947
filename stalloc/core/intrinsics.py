"""What Python cannot say and LLVM can: the lock, the clock, calls by address, bit scans, four words at once.

The state of a device is memory at a fixed address, since torch's callbacks carry no context argument and run on
threads that Python never made. Everything here compiles to one or two instructions. Inline assembly is not used:
numba's code generator aborts on it; LLVM's own intrinsics do the same work.
"""

import inspect
import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils

from stalloc.compiled import inner, njit
from stalloc.core.record_types import WORD, instruction
from stalloc.core.records import state_at, word_at

_FOUR = ir.VectorType(WORD, 4)
_BIT, _INT32 = ir.IntType(1), ir.IntType(32)


def _word_pointer(builder, pointer):
    return builder.bitcast(pointer, WORD.as_pointer())


def _four(builder, record, first):
    """The address of four words of a record of words, from the word `first` on, as one."""
    return builder.bitcast(builder.gep(_word_pointer(builder, record), [WORD(first)]), _FOUR.as_pointer())


def _add_four(builder, record, first, amounts):
    pointer, both = _four(builder, record, first), ir.Constant(_FOUR, ir.Undefined)
    for i, amount in enumerate(amounts):
        both = builder.insert_element(both, amount, _INT32(i))
    builder.store(builder.add(builder.load(pointer, align=32), both), pointer, align=32)


def _call(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@instruction(types.void)
def add_now(builder, kinds, counts, allocated, requested, live, allocs):
    """Add to the counts of now of a Total or a Part, which begins at a multiple of 32."""
    _add_four(builder, counts, 0, (allocated, requested, live, allocs))


@instruction(types.void)
def raise_peaks(builder, kinds, counts):
    """Let each peak of a Total or a Part be at least what is counted now."""
    now, peaks = _four(builder, counts, 0), _four(builder, counts, 4)
    old, new = builder.load(peaks, align=32), builder.load(now, align=32)
    builder.store(builder.select(builder.icmp_signed(">", new, old), new, old), peaks, align=32)


@instruction(types.void)
def add_ever(builder, kinds, part, allocated, requested):
    """Add to what a Part counts for ever."""
    _add_four(builder, part, 8, (allocated, requested, WORD(0), WORD(0)))


@instruction(types.int64)
def first_bit(builder, kinds, word):
    """The index of the lowest bit that is set; some bit has to be."""
    return _call(builder, "llvm.cttz.i64", WORD, word, _BIT(1))


@instruction(types.int64)
def last_bit(builder, kinds, word):
    """The index of the highest bit that is set; some bit has to be."""
    return builder.sub(WORD(63), _call(builder, "llvm.ctlz.i64", WORD, word, _BIT(1)))


@instruction(types.int64)
def _exchange(builder, kinds, state, value):
    """Write the first word of a state, its lock; what it was before."""
    return builder.atomic_rmw("xchg", _word_pointer(builder, state), value, "acquire")


@instruction(types.int64)
def _load_relaxed(builder, kinds, state):
    return builder.load_atomic(_word_pointer(builder, state), "monotonic", 8)


@instruction(types.void)
def _store_release(builder, kinds, state, value):
    builder.store_atomic(value, _word_pointer(builder, state), "release", 8)


@instruction(types.void)
def _spin_hint(builder, kinds):
    if platform.machine() == "aarch64":
        _call(builder, "llvm.aarch64.hint", ir.VoidType(), _INT32(1))
    else:
        _call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@instruction(types.int64)
def call3(builder, kinds, function, a, b, c):
    """Call the C function `int64 f(int64, int64, int64)` at an address."""
    kind = ir.FunctionType(WORD, [WORD, WORD, WORD])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [a, b, c])


@instruction(types.int64)
def answer_of(builder, kinds, function, argument):
    """What a function of the driver `CUresult f(argument, int *answer)` answers, or its status where that is not 0."""
    kind = ir.FunctionType(_INT32, [WORD, _INT32.as_pointer()])
    answer = cgutils.alloca_once_value(builder, _INT32(0))
    status = builder.call(builder.inttoptr(function, kind.as_pointer()), [argument, answer])
    return builder.zext(builder.or_(status, builder.load(answer)), WORD)


@instruction(types.int64)
def address_of(builder, kinds, record):
    """The address of a record."""
    return builder.ptrtoint(record, WORD)


@instruction(types.voidptr)
def _c_pointer(builder, kinds, record):
    return builder.bitcast(record, cgutils.voidptr_t)


# Symbols of the C library are looked up when the code is linked, so that compiled code can be cached on disk.
_sched_yield = types.ExternalFunction("sched_yield", types.intc())
_pthread_self = types.ExternalFunction("pthread_self", types.int64())
_clock_gettime = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.voidptr))
_MAX_PAUSES = 64  # between two looks at a lock that is held, after which other threads are let on


@inner(forceinline=True)
def first_at_least(table, low, high, value):
    """The first of the words [low, high) that is at least `value`, in a table in ascending order; `high` if none is."""
    while low < high:
        middle = (low + high) >> 1
        if word_at(table, middle).value < value:
            low = middle + 1
        else:
            high = middle
    return low


@inner()
def copy_words(source, target, count):
    """Copy words from one address to another."""
    for i in range(count):
        word_at(target, i).value = word_at(source, i).value


@inner(forceinline=True)
def lock(state):
    """Take the spin lock of a state. The holder never waits for anything, the GIL least of all."""
    pauses = 1
    while _exchange(state, 1) != 0:
        while _load_relaxed(state) != 0:
            for _ in range(pauses):
                _spin_hint()
            if pauses < _MAX_PAUSES:
                pauses *= 2
            else:
                _sched_yield()


@njit(inline="always")
def locked(address):
    """The state at an address, with its lock taken."""
    state = state_at(address)
    lock(state)
    return state


@inner(forceinline=True)
def unlock(state):
    """Give the spin lock of a state back."""
    _store_release(state, 0)


def under_lock(**options):
    """As `stalloc.compiled.njit`, for what Python calls with the address of a state: the function gets it locked."""

    def compile_later(function):
        given = ", ".join(list(inspect.signature(function).parameters)[1:])
        steps = f"state = locked(device); answer = body(state, {given}); unlock(state); return answer"
        source = f"def {function.__name__}(device, {given}): {steps}"
        names = {"__name__": function.__module__, "locked": locked, "unlock": unlock}
        names["body"] = inner(**options)(function)
        exec(compile(source, function.__code__.co_filename, "exec"), names)  # since numba names arguments
        return njit(**options)(names[function.__name__])

    return compile_later


@inner(forceinline=True)
def this_thread():
    """The thread that runs, as the C library calls it: a number that no other one has meanwhile."""
    return _pthread_self()


@inner(forceinline=True)
def now_ns(state, which):
    """The time of a clock of the C library in nanoseconds; with the lock held."""
    clock = state.driver.clock
    _clock_gettime(which, _c_pointer(clock))
    return clock.seconds * 1_000_000_000 + clock.nanoseconds
