"""Classes of named words as one piece of memory that compiled code and Python both read and write.

A record is declared once, as a class of annotated fields. Compiled code gets it as a numba `Record`, which is a
pointer, so that `state.hits += 1` is one load, one addition and one store, inside other records too; Python gets the
same memory as an object with the same attributes. A misspelt field is an error in both, and for mypy.

Contract: each field is a 64-bit word, a record, or a number of words in a row. Where a field begins in its line of the
cache is computed here, so that a field may be added anywhere. Never return a record from a compiled function that is
not inlined: numba copies what it returns.
"""

import ctypes
import inspect
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Words = NDArray[np.int64]

WORD = ir.IntType(64)
_LINE_BYTES = 64  # of the cache


class _LineStart:
    """Marks a word."""


LineStart = Annotated[int, _LineStart]
"""A word that begins a line of the cache."""


class Record:
    """Named words; a subclass declares them."""

    begins_line = False  #: whether it begins a line of the cache wherever it is, and has whole ones

    def __init_subclass__(cls, *, begins_line: bool = False) -> None:
        cls.begins_line = begins_line


_structures: dict[type[Record], type[ctypes.Structure]] = {}  # made once each: numba and ctypes compare types
_dtypes: dict[type[Record], np.dtype[Any]] = {}

AnyRecord = TypeVar("AnyRecord", bound=Record)


def shares_word(name: str) -> Any:
    """The default of a field that lies in the word of another, which is meaningless while this one is not."""
    return name


def _num_words(kind: Any) -> int:
    """Words of a field that is several in a row; 0: it is one word, or a record."""
    return get_args(kind)[1] if get_origin(kind) is Annotated and kind is not LineStart else 0


def _is_word(kind: Any) -> bool:
    return kind is int or kind is LineStart


def _starts_line(kind: Any) -> bool:
    return kind is LineStart or (isinstance(kind, type) and issubclass(kind, Record) and kind.begins_line)


def _aligned(offset: int) -> int:
    return -(-offset // _LINE_BYTES) * _LINE_BYTES


def structure(record: type[Record]) -> type[ctypes.Structure]:
    """A record as Python's own view of memory: attributes are numbers."""
    if record in _structures:
        return _structures[record]
    fields: list[tuple[str, Any]] = []
    end, dtype = 0, dtype_of(record)
    assert dtype.fields is not None
    places = {name: dtype.fields[name][1] for name in inspect.get_annotations(record) if not hasattr(record, name)}
    for name, offset in [*places.items(), ("", dtype.itemsize)]:
        if offset > end:
            fields.append((f"_{end}", ctypes.c_uint8 * (offset - end)))
        if name:  # ctypes knows no second name for a word
            kind = inspect.get_annotations(record)[name]
            words = _num_words(kind)
            of_field = ctypes.c_int64 * words if words else ctypes.c_int64 if _is_word(kind) else structure(kind)
            fields.append((name, of_field))
            end = offset + ctypes.sizeof(of_field)
    _structures[record] = type(record.__name__, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})
    return _structures[record]


def dtype_of(record: type[Record]) -> np.dtype[Any]:
    """A record as a NumPy dtype, of which tables are made."""
    if record in _dtypes:
        return _dtypes[record]
    names: list[str] = []
    formats: list[Any] = []
    offsets: list[int] = []
    end = 0
    for name, kind in inspect.get_annotations(record).items():
        words = _num_words(kind)
        form: Any = (np.int64, words) if words else np.int64 if _is_word(kind) else dtype_of(kind)
        names.append(name)
        formats.append(form)
        other = getattr(record, name, None)
        begin = _aligned(end) if _starts_line(kind) else end
        offsets.append(begin if other is None else offsets[names.index(other)])
        end = max(end, offsets[-1] + np.dtype(form).itemsize)
    size = _aligned(end) if record.begins_line else end
    columns: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
    _dtypes[record] = np.dtype(columns, align=True)
    return _dtypes[record]


@cache
def offset_of(record: type[Record], path: str) -> int:
    """The bytes from the start of a record to a field (`name`, or `name.name` in a record inside it)."""
    offset, dtype = 0, dtype_of(record)
    for name in path.split("."):
        assert dtype.fields is not None
        dtype, more = dtype.fields[name][:2]
        offset += more
    return offset


@cache
def path_of(record: type[Record], name: str) -> str:
    """The path of the only word of this name in a record and the records inside it; a path is its own.

    Raises AttributeError if there is none, or several.
    """
    if "." in name:
        return name
    found = [] if name not in inspect.get_annotations(record) else [name]
    for field, kind in inspect.get_annotations(record).items():
        if isinstance(kind, type) and issubclass(kind, Record) and name in inspect.get_annotations(kind):
            found.append(f"{field}.{name}")
    if len(found) != 1:
        raise AttributeError(f"{record.__name__} has {len(found)} fields {name}, not one")
    return found[0]


def view_at(record: type[AnyRecord], address: int) -> AnyRecord:
    """The record at an address, for Python; whoever holds the memory has to outlive it."""
    return structure(record).from_address(address)  # type: ignore[return-value]


def table(record: type[Record], rows: int) -> np.ndarray:
    """Records of zeros that begin at a line of the cache; pages that are never touched cost nothing."""
    dtype, line = dtype_of(record), 64
    data = np.zeros(rows * dtype.itemsize + line, np.uint8)
    first = -data.ctypes.data % line
    return data[first : first + rows * dtype.itemsize].view(dtype)


def instruction(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiled: a function of records and 64-bit numbers, by what emits its LLVM: `emit(builder, kinds, *values)`.

    `kinds` are numba's types of the values. Where the result is a record it emits the address, a pointer or a number.
    """

    def of(emit: Callable[..., Any]) -> Any:
        def typed(typingctx, *given):
            kinds = [kind if isinstance(kind, types.Record) else types.int64 for kind in given]

            def codegen(context, builder, signature, values):
                emitted = emit(builder, kinds, *values)
                if result == types.void:
                    return context.get_dummy_value()
                if isinstance(result, types.Record):
                    cast = builder.bitcast if isinstance(emitted.type, ir.PointerType) else builder.inttoptr
                    return cast(emitted, context.get_value_type(result))
                return emitted

            return result(*kinds), codegen

        typed.__name__ = emit.__name__
        shape = inspect.signature(emit)
        typed.__signature__ = shape.replace(parameters=list(shape.parameters.values())[1:])  # type: ignore[attr-defined]
        return intrinsic(typed)

    return of


def _kind(record: type[Record]) -> Any:
    return numba.from_dtype(dtype_of(record))


def _field(builder: Any, owner: Any, pointer: Any, path: str) -> Any:
    offset = 0
    for name in path.split("."):
        offset, owner = offset + owner.offset(name), owner.typeof(name)
    return cgutils.get_record_member(builder, pointer, offset, WORD)


def _row(builder: Any, begin: Any, row: Any, record: type[Record]) -> Any:
    return builder.add(begin, builder.mul(row, WORD(dtype_of(record).itemsize)))


def record_at(record: type[Record]) -> Any:
    """Compiled: the record at an address."""

    @instruction(_kind(record))
    def at(builder, kinds, address):
        return address

    return at


def row_at(record: type[Record]) -> Any:
    """Compiled: a row of the table at an address."""

    @instruction(_kind(record))
    def at(builder, kinds, address, row):
        return _row(builder, address, row, record)

    return at


def row_of(table_name: str, record: type[Record]) -> Any:
    """Compiled: a row of the table whose address is in a field of an owner."""

    @instruction(_kind(record))
    def at(builder, kinds, owner, row):
        return _row(builder, builder.load(_field(builder, kinds[0], owner, table_name), align=8), row, record)

    return at


def word_of(name: str, record: type[Record]) -> Any:
    """Compiled: one of the words in a row that a field of an owner is, as a record of one word."""

    @instruction(_kind(record))
    def at(builder, kinds, owner, index):
        return builder.gep(_field(builder, kinds[0], owner, name), [index])

    return at


def field_of(name: str, record: type[Record]) -> Any:
    """Compiled: a field of an owner, as a record of one word that can be kept and written later."""

    @instruction(_kind(record))
    def at(builder, kinds, owner):
        return _field(builder, kinds[0], owner, name)

    return at
