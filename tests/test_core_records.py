"""Records: one declaration, of which compiled code and Python see the same memory, with the same names."""

import ctypes

import numba
import numpy as np
import pytest

from stalloc.core import records
from stalloc.core.record_types import Record, shares_word, structure
from stalloc.core.records import Block, Part, State, Total, dtype_of, offset_of, state_at, table, view_at

LINE = 64  # bytes of a line of the cache
RECORDS = [
    kind
    for kind in vars(records).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
]


@numba.njit
def count_up(device):
    state = state_at(device)
    state.follow.hits += 2
    state.small.num_live = state.follow.hits + 1


def test_compiled_code_and_python_write_the_same_words():
    memory = table(State, 1)
    view = view_at(State, memory.ctypes.data)
    view.follow.hits = 40
    count_up(memory.ctypes.data)
    assert (view.follow.hits, view.small.num_live) == (42, 43)
    assert (int(memory["follow"]["hits"][0]), int(memory["small"]["num_live"][0])) == (42, 43)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_a_record_is_whole_words_and_has_one_size_everywhere(kind):
    size = dtype_of(kind).itemsize
    assert size % 8 == 0
    assert size == ctypes.sizeof(structure(kind))
    assert numba.from_dtype(dtype_of(kind)).size == size


def test_a_misspelt_field_is_an_error_when_it_is_read_and_when_it_is_written():
    memory = table(State, 1)
    view = view_at(State, memory.ctypes.data)
    with pytest.raises(AttributeError, match="num_live_blocks"):
        _ = view.num_live_blocks
    with pytest.raises(AttributeError, match="hitz"):
        view.hitz = 1
    with pytest.raises(KeyError, match="hitz"):
        offset_of(State, "hitz")

    @numba.njit
    def misspelt(device):
        return state_at(device).hitz

    with pytest.raises((KeyError, numba.TypingError), match="hitz"):
        misspelt(memory.ctypes.data)


def test_what_threads_and_vectors_need_lies_where_they_need_it():
    assert offset_of(State, "lock") == 0
    assert offset_of(State, "hot.mode") == LINE, "the lock is alone in its line"
    assert dtype_of(Block).itemsize == LINE
    for name in ("total", "large", "small"):
        assert offset_of(State, name) % 32 == 0, "four counts change in one instruction"
    for kind in (Total, Part):
        assert [offset_of(kind, name) // 8 for name in ("allocated_bytes", "allocated_peak")] == [0, 4]
    assert offset_of(Part, "allocated_ever") // 8 == 8


def test_tables_begin_at_a_line_and_are_empty():
    rows = table(Block, 1000)
    assert rows.ctypes.data % LINE == 0
    assert not rows.view(np.ndarray).view(np.uint8).any()


def test_two_fields_may_share_a_word():
    class Either(Record):
        first: int
        left: int
        requested_bytes: int = shares_word("left")
        last: int

    assert [offset_of(Either, name) for name in ("first", "left", "requested_bytes", "last")] == [0, 8, 8, 16]
