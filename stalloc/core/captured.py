"""Graphs that somebody captures, maybe without a word to stalloc: what the driver forbids meanwhile is left undone.

Contract: no event is recorded on a captured stream, since one of a capture can never be asked, and who waits for it is
captured too. Events are asked for with this thread's mode relaxed: then no capture minds. The lock is not held.
"""

from stalloc.compiled import inner
from stalloc.core.intrinsics import address_of, answer_of, call3
from stalloc.core.records import mode_of_asker
from stalloc.device.capture import HANDLE_BITS, PER_THREAD

_RELAXED = 2


@inner()
def is_captured(state, handle):
    """Whether a stream is being captured, or (the default one) may not be asked since another one is."""
    if state.driver.is_capturing == 0:
        return False
    return answer_of(state.driver.is_capturing, PER_THREAD if handle & HANDLE_BITS == PER_THREAD else handle) != 0


@inner()
def relax(state):
    """Let no capture mind what this thread asks, until `restore`; one thread at a time."""
    state.driver.mode_of_asker = _RELAXED
    restore(state)


@inner()
def restore(state):
    """Have this thread heed captures as it did."""
    if state.driver.exchange_mode != 0:
        call3(state.driver.exchange_mode, address_of(mode_of_asker(state)), 0, 0)
