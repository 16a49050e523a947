"""Raw 64-bit words for compiled code: read, write, lock and call by address, with no Python object in sight.

The runtime's state is NumPy memory at fixed addresses, since torch's callbacks carry no context argument and run
on threads that Python never made. Everything here compiles to one or two instructions. Inline assembly is not used:
numba's code generator aborts on it; LLVM's own intrinsics do the same work.
"""

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from stalloc.compiled import njit

_WORD = ir.IntType(64)


def _pointer(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


def _indexed(builder, address, index):
    return _pointer(builder, builder.add(address, builder.shl(index, _WORD(3))))


@intrinsic
def peek(typingctx, address, index):
    """The word at `address + 8 * index`."""

    def codegen(context, builder, signature, args):
        return builder.load(_indexed(builder, args[0], args[1]))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def poke(typingctx, address, index, value):
    """Write the word at `address + 8 * index`."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], _indexed(builder, args[0], args[1]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _four(builder, address):
    return builder.inttoptr(address, ir.VectorType(_WORD, 4).as_pointer())


@intrinsic
def add_four(typingctx, address, a, b, c, d):
    """Add to four words in a row at once; `address` is a multiple of 32."""

    def codegen(context, builder, signature, args):
        amounts = ir.Constant(ir.VectorType(_WORD, 4), ir.Undefined)
        for i in range(4):
            amounts = builder.insert_element(amounts, args[i + 1], ir.IntType(32)(i))
        pointer = _four(builder, args[0])
        builder.store(builder.add(builder.load(pointer, align=32), amounts), pointer, align=32)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def raise_four(typingctx, peaks, now):
    """Let each of four words in a row be at least what the one of four others is; addresses are multiples of 32."""

    def codegen(context, builder, signature, args):
        pointer = _four(builder, args[0])
        old, new = builder.load(pointer, align=32), builder.load(_four(builder, args[1]), align=32)
        builder.store(builder.select(builder.icmp_signed(">", new, old), new, old), pointer, align=32)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


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
def _exchange(typingctx, address, value):
    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "acquire")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _load_relaxed(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0]), "monotonic", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _store_release(typingctx, address, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


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
def as_pointer(typingctx, address):
    """An address as a C pointer."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


# Symbols of the C library are looked up when the code is linked, so that compiled code can be cached on disk.
_sched_yield = types.ExternalFunction("sched_yield", types.intc())
_clock_gettime = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.voidptr))
_CLOCK_MONOTONIC = 1
_MOST_PAUSES = 64  # between two looks at a lock that is held, after which other threads are let on


@njit(inline="always")
def first_at_least(table, low, high, value):
    """The first row of [low, high) whose word is at least `value`, in a table of ascending words; `high` if none is."""
    while low < high:
        middle = (low + high) >> 1
        if peek(table, middle) < value:
            low = middle + 1
        else:
            high = middle
    return low


@njit(inline="always")
def lock(address):
    """Take the spin lock at `address`. The holder never waits for anything, the GIL least of all."""
    pauses = 1
    while _exchange(address, 1) != 0:
        while _load_relaxed(address) != 0:
            for _ in range(pauses):
                _spin_hint()
            if pauses < _MOST_PAUSES:
                pauses *= 2
            else:
                _sched_yield()


@njit(inline="always")
def unlock(address):
    """Give the spin lock back."""
    _store_release(address, 0)


@njit(inline="always")
def now_ns(scratch):
    """Monotonic time in nanoseconds; `scratch` is the address of two words."""
    _clock_gettime(_CLOCK_MONOTONIC, as_pointer(scratch))
    return peek(scratch, 0) * 1_000_000_000 + peek(scratch, 1)


@njit(inline="always")
def add(state, word, amount):
    """Add to a word of a state."""
    poke(state, word, peek(state, word) + amount)


@njit(inline="always")
def raise_to(state, word, value):
    """Let a word of a state be at least `value`."""
    if value > peek(state, word):
        poke(state, word, value)
