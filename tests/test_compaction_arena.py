"""Programs in a capped arena: what only fragmentation stops goes on once live blocks may move."""

import numpy as np
import pytest
from recordings import each, path_of

from stalloc.compaction import run_in_arena
from stalloc.trace import Trace, load_traces

REAL = [
    "fragmented.pickle.gz",
    "octree_nca_train.pickle.gz",
    "lm27b_ctx128_fullstep.pickle.gz",
    "llm_quantize_sqattn.pickle.gz",
]


def _peak_load(trace: Trace) -> int:
    """The most bytes that are live at once, rounded up to 512 each."""
    size = trace.aligned_size(512)
    change = np.concatenate([-size, size])
    order = np.lexsort((np.repeat([0, 1], len(size)), np.concatenate([trace.end, trace.start])))
    return int(np.cumsum(change[order]).max())


@pytest.mark.parametrize("name", each(REAL, always=("octree",)))
def test_a_recorded_program_fits_into_its_own_peak_if_blocks_may_move(name: str) -> None:
    trace = load_traces(path_of(name))[0]
    capacity = _peak_load(trace)
    still = run_in_arena(trace, capacity, compact=False)
    assert still.failed_event >= 0
    assert (still.num_compactions, still.moved_bytes) == (0, 0)
    moving = run_in_arena(trace, capacity, compact=True)
    assert moving.failed_event == -1
    assert moving.num_compactions > 0
    assert moving.moved_bytes > 0


def test_what_is_too_large_fails_either_way() -> None:
    trace = load_traces(path_of("leak.pickle.gz"))[0]
    capacity = _peak_load(trace) - 512
    assert run_in_arena(trace, capacity, compact=True).failed_event >= 0
    roomy = run_in_arena(trace, 4 * capacity, compact=True)
    assert (roomy.failed_event, roomy.num_compactions) == (-1, 0)
