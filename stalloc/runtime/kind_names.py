"""Short names for kinds of steps: what two steps of one kind ask for is the same, request by request."""

import hashlib
import itertools
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.constants import TINY

if TYPE_CHECKING:
    from stalloc.trace import Trace
    from stalloc.trace.record import Column


def name_of(size: "Column", stream: "Column") -> bytes:
    """A short name for the kind of step that asks for these sizes on these streams."""
    name = hashlib.blake2b(np.ascontiguousarray(size, np.int64).data, digest_size=16)
    name.update(np.ascontiguousarray(stream, np.int64).data)
    return name.digest()


def recurring_names(trace: "Trace") -> set[bytes]:
    """The names of the steps between a trace's marks that come twice."""
    rows = np.flatnonzero(trace.size > TINY)
    bounds = np.searchsorted(trace.start[rows], trace.mark_event).tolist()
    size, stream = trace.size[rows], trace.stream[rows]
    names = Counter(name_of(size[begin:end], stream[begin:end]) for begin, end in itertools.pairwise(bounds))
    return {name for name, count in names.items() if count > 1}
