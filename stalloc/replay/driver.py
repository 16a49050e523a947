"""The loop that feeds events to a compiled model: one source, compiled for each model with the model's own rules in it.

numba compiles a function with the globals that it names, and keeps it on disk by its name and file. So `driver_of`
makes a copy of the loop whose globals are the model's rules: nothing is looked up or called through a pointer while it
runs, and each copy has a file of its own in the cache, which a closure over compiled functions could not have.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.record_types import Record, record_at
from stalloc.replay.blocks import at as block_at
from stalloc.replay.blocks import give_up as usual_give_up
from stalloc.replay.blocks import has_room as usual_has_room
from stalloc.replay.blocks import hold, store_at
from stalloc.replay.protocol import Kind
from stalloc.replay.treap import free_into


@inner()
def has_room(t, m, size):
    """Whether the model's tables have room for any event, a request of `size` bytes among them."""
    return usual_has_room(t)


@inner()
def empty(t, m, kind, request):
    """Empty the cache; `kind` is EMPTY_CACHE, or a kind of event that only the model knows."""


@inner()
def give_up(t, m, request, kind):
    """Handle a free of either kind; the block that is to become free now, 0 for none."""
    return usual_give_up(t, request, kind)


@inner()
def note(t, m, at, columns):
    """Write the figures after an event: (k, m) columns, of which the first are reserved and allocated."""
    columns[0, at] = t.reserved
    columns[1, at] = t.allocated


def _run(store, own, kind, request, size, stream, keep_going, start, columns):
    """Feed events from `start` on; the position of the first that the tables have no room for, or that was refused.

    With `keep_going` a request that is refused holds nothing, its frees do nothing, and all others are served.
    """
    t, m = store_at(store), own_at(own)
    for at in range(start, len(kind)):
        row, asks = request[at], kind[at] == Kind.ALLOC
        if not has_room(t, m, size[row] if asks else 0):
            return at
        if asks:
            block = allocate(t, m, row, size[row], stream[row]) if size[row] > 0 else 0
            if not hold(t, row, block, size[row]) and not keep_going:
                return at
        elif kind[at] >= Kind.EMPTY_CACHE:
            empty(t, m, kind[at], row)
        else:
            block = give_up(t, m, row, kind[at])
            if block != 0:
                free(t, m, block)
        note(t, m, at, columns)
    return len(kind)


def own_at(pointer):
    """The record that a model keeps beside its store; each model has its own type."""
    raise NotImplementedError


def allocate(t, m, request, size, stream):
    """A block in no tree for a request of `size` bytes, -1 where memory runs out; each model has its own."""
    raise NotImplementedError


@inner()
def free(t, m, block):
    """Free a block: it joins the tree of its stream, and free neighbours there."""
    free_into(t, block_at(t, block).stream, block)


def driver_of(name: str, own: type[Record], **rules: Any) -> Callable[..., int]:
    """The loop for one model, compiled at its first call.

    `own` is the record of what the model keeps beside its store. `rules` are `allocate` and, where the model differs
    from what is usual, `free`, `has_room`, `empty`, `give_up` and `note`: compiled functions that take what those of
    these names here take.
    """
    copy = FunctionType(_run.__code__, _run.__globals__ | rules | {"own_at": record_at(own)}, f"run_{name}")
    copy.__qualname__ = f"run_{name}"
    sources = {rule.py_func.__code__.co_filename for rule in rules.values()}  # this file does not import them
    driver: Callable[..., int] = njit(nogil=True, sources=sources, **BORROWING)(copy)
    return driver
