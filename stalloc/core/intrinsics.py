"""What Python cannot say and LLVM can: the lock, the clock, calls by address, bit scans, four words at once.

The state of a device is memory at a fixed address, since torch's callbacks carry no context argument and run on
threads that Python never made. Everything here compiles to one or two instructions. Inline assembly is not used:
numba's code generator aborts on it; LLVM's own intrinsics do the same work.
"""

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from stalloc.compiled import inner, njit
from stalloc.core.records import state_at, word_at

_WORD = ir.IntType(64)
_FOUR = ir.VectorType(_WORD, 4)


def _word_pointer(builder, pointer):
    return builder.bitcast(pointer, _WORD.as_pointer())


def _four(builder, record, first):
    """The address of four words of a record of words, from the word `first` on, as one."""
    return builder.bitcast(builder.gep(_word_pointer(builder, record), [_WORD(first)]), _FOUR.as_pointer())


def _add_four(builder, record, first, amounts):
    pointer, both = _four(builder, record, first), ir.Constant(_FOUR, ir.Undefined)
    for i, amount in enumerate(amounts):
        both = builder.insert_element(both, amount, ir.IntType(32)(i))
    builder.store(builder.add(builder.load(pointer, align=32), both), pointer, align=32)


@intrinsic
def add_now(typingctx, counts, allocated, requested, live, allocs):
    """Add to the counts of now of a Total or a Part, which begins at a multiple of 32."""

    def codegen(context, builder, signature, args):
        _add_four(builder, args[0], 0, args[1:])
        return context.get_dummy_value()

    return types.void(counts, *[types.int64] * 4), codegen


@intrinsic
def raise_peaks(typingctx, counts):
    """Let each peak of a Total or a Part be at least what is counted now."""

    def codegen(context, builder, signature, args):
        now, peaks = _four(builder, args[0], 0), _four(builder, args[0], 4)
        old, new = builder.load(peaks, align=32), builder.load(now, align=32)
        builder.store(builder.select(builder.icmp_signed(">", new, old), new, old), peaks, align=32)
        return context.get_dummy_value()

    return types.void(counts), codegen


@intrinsic
def add_ever(typingctx, part, allocated, requested):
    """Add to what a Part counts for ever."""

    def codegen(context, builder, signature, args):
        _add_four(builder, args[0], 8, [*args[1:], _WORD(0), _WORD(0)])
        return context.get_dummy_value()

    return types.void(part, types.int64, types.int64), codegen


def _count_zeros(builder, word, end):
    """LLVM's count of the zeros below the lowest (`cttz`) or above the highest (`ctlz`) bit of a word that is not 0."""
    kind = ir.FunctionType(_WORD, [_WORD, ir.IntType(1)])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{end}.i64")
    return builder.call(function, [word, ir.IntType(1)(1)])


@intrinsic
def first_bit(typingctx, word):
    """The index of the lowest bit that is set; some bit has to be."""

    def codegen(context, builder, signature, args):
        return _count_zeros(builder, args[0], "cttz")

    return types.int64(types.int64), codegen


@intrinsic
def last_bit(typingctx, word):
    """The index of the highest bit that is set; some bit has to be."""

    def codegen(context, builder, signature, args):
        return builder.sub(_WORD(63), _count_zeros(builder, args[0], "ctlz"))

    return types.int64(types.int64), codegen


@intrinsic
def _exchange(typingctx, state, value):
    """Write the first word of a state, its lock; what it was before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", _word_pointer(builder, args[0]), args[1], "acquire")

    return types.int64(state, types.int64), codegen


@intrinsic
def _load_relaxed(typingctx, state):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word_pointer(builder, args[0]), "monotonic", 8)

    return types.int64(state), codegen


@intrinsic
def _store_release(typingctx, state, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _word_pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(state, types.int64), codegen


@intrinsic
def _spin_hint(typingctx):
    arm = platform.machine() == "aarch64"

    def codegen(context, builder, signature, args):
        if arm:
            hint = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.hint"), [ir.IntType(32)(1)])
        else:
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call3(typingctx, function, a, b, c):
    """Call the C function `int64 f(int64, int64, int64)` at an address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_WORD, [_WORD, _WORD, _WORD])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), list(args[1:]))

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def answer_of(typingctx, function, argument):
    """What a function of the driver `CUresult f(argument, int *answer)` answers, or its status where that is not 0."""

    def codegen(context, builder, signature, args):
        int32 = ir.IntType(32)
        kind = ir.FunctionType(int32, [_WORD, int32.as_pointer()])
        answer = cgutils.alloca_once_value(builder, int32(0))
        status = builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1], answer])
        return builder.zext(builder.or_(status, builder.load(answer)), _WORD)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def address_of(typingctx, record):
    """The address of a record."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(args[0], _WORD)

    return types.int64(record), codegen


@intrinsic
def _c_pointer(typingctx, record):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], cgutils.voidptr_t)

    return types.voidptr(record), codegen


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
