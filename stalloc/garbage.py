"""Fewer of Python's collections of garbage, while much is made that stays: imports, compiling, columns of a trace.

Python looks for garbage whenever some hundred objects more were made than freed, and now and then through all there
are: a tenth of the time of such work, for nothing. Memory that is not part of a cycle is freed as ever.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FEWER = 250_000  # objects that are made between two looks
_USUAL = gc.get_threshold()


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Collect garbage less often until the end of the block, unless somebody else chooses otherwise meanwhile."""
    before = gc.get_threshold()
    changed = 0 < before[0] < _FEWER
    if changed:
        gc.set_threshold(_FEWER, *before[1:])
    try:
        yield
    finally:
        if changed and gc.get_threshold() == (_FEWER, *before[1:]):
            gc.set_threshold(*before)


def collect_for_program() -> None:
    """Collect as often as usual from now on, but never look through what there is so far, such as imported modules."""
    gc.freeze()
    if gc.get_threshold()[0] == _FEWER:
        gc.set_threshold(*_USUAL)
