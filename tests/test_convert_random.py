"""Random recordings through convert: what a recording of our own says, a snapshot of it says as well."""

import random

import numpy as np
import pytest

from stalloc.cli import main
from stalloc.lifespans import peak_load
from stalloc.trace import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, Action, load_traces, save_traces
from stalloc.trace.record import COLUMNS
from stalloc.trace.recorder import from_recorded

BASE, SLOT_BYTES, SLOTS = 0x7F00_0000_0000, 4096, 24


def random_trace(seed, device=0):
    """Requests in slots of two segments that are there from the start and of one that comes and goes."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows = []  # action, address, size, stream
    old = {slot: rng.randrange(1, SLOT_BYTES) for slot in rng.sample(range(SLOTS), 5)}
    live, asked, marks, third = {}, {}, [], False
    for _ in range(rng.randrange(20, 400)):
        free = [slot for slot in range(SLOTS) if slot not in live | asked | old]
        choice = rng.random()
        if choice < 0.45 and free:
            slot, size, stream = rng.choice(free), rng.randrange(1, SLOT_BYTES + 1), rng.randrange(3)
            rows.append((Action.ALLOC, BASE + slot * SLOT_BYTES, size, stream))
            live[slot] = size, stream
        elif choice < 0.6 and live:
            slot = rng.choice(sorted(live))
            size, stream = asked[slot] = live.pop(slot)
            rows.append((Action.FREE_REQUESTED, BASE + slot * SLOT_BYTES, size, stream))
        elif choice < 0.8 and asked:
            slot = rng.choice(sorted(asked))
            rows.append((Action.FREE_COMPLETED, BASE + slot * SLOT_BYTES, *asked.pop(slot)))
        elif choice < 0.84 and old:
            slot = rng.choice(sorted(old))
            size = old.pop(slot)
            rows += [
                (action, BASE + slot * SLOT_BYTES, size, 0) for action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
            ]
        elif choice < 0.88:
            rows.append((Action.SEGMENT_FREE if third else Action.SEGMENT_ALLOC, BASE + (1 << 30), 1 << 20, 1))
            third = not third
        elif choice < 0.9:
            rows.append((Action.OOM, rng.randrange(1 << 30), 1 << 33, 0))
        elif choice < 0.95:
            kind = rng.choice([MARK_STEP, MARK_PHASE_BEGIN, MARK_PHASE_END])
            marks.append((len(rows), kind, rng.choice(["a", "b", "step"])))
    rows.append((Action.ALLOC, BASE + (2 << 30), 100, 2))
    half = SLOTS // 2 * SLOT_BYTES
    segments = [(BASE, half, 0), (BASE + half, half, 2), (BASE + (2 << 30), 512, 2)]
    segments += [(BASE + (1 << 30), 1 << 20, 1)] if third else []
    action, address, size, stream = (np.array(column) for column in zip(*rows, strict=True))
    streams = list(dict.fromkeys(stream.tolist() + [segment[2] for segment in segments]))
    index = {raw: number for number, raw in enumerate(streams)}
    place, length, owner = (np.array(column) for column in zip(*segments, strict=True))
    return from_recorded(
        device,
        action,
        address,
        size,
        np.array([index[raw] for raw in stream.tolist()]),
        np.cumsum([rng.choice([0, 0, 1, 5000]) * 1000 for _ in rows]) + 10**15,
        marks,
        streams,
        reserved_start_bytes=2 * half + 512,
        segments=(place.astype(np.uint64), length, np.array([index[raw] for raw in owner.tolist()])),
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_random_recording_comes_back_from_a_snapshot(tmp_path, seed):
    traces = [random_trace(seed), random_trace(1000 + seed, device=2)]
    save_traces(tmp_path / "r.trace.npz", traces)
    assert main(["convert", str(tmp_path / "r.trace.npz"), str(tmp_path / "s.pickle.gz")]) == 0
    for first, second in zip(traces, load_traces(tmp_path / "s.pickle.gz"), strict=True):
        for name in COLUMNS:
            assert np.array_equal(getattr(first, name), getattr(second, name)), name
        assert (first.device, first.streams, first.names) == (second.device, second.streams, second.names)
        assert first.reserved_start_bytes == second.reserved_start_bytes
        blocks = second.extra["block_request"]
        assert sorted(blocks[blocks >= 0]) == np.flatnonzero(second.end == second.num_events).tolist()
        assert second.extra["block_size"].sum() == second.segment_size.sum()


@pytest.mark.parametrize("seed", range(30))
def test_a_random_recording_comes_back_from_a_chrome_trace(tmp_path, seed):
    first = random_trace(seed)
    save_traces(tmp_path / "r.trace.npz", [first])
    assert main(["convert", str(tmp_path / "r.trace.npz"), str(tmp_path / "p.json")]) == 0
    (second,) = load_traces(tmp_path / "p.json")
    assert first.size.tolist() == second.size.tolist()
    assert peak_load(first.start, first.end, first.size) == peak_load(second.start, second.end, second.size)

    def deaths(trace):
        freed = trace.end < trace.num_events
        return np.flatnonzero(freed)[np.argsort(trace.end[freed])].tolist()

    assert deaths(first) == deaths(second)
    assert np.count_nonzero(first.mark_kind == MARK_STEP) == np.count_nonzero(second.mark_kind == MARK_STEP)
    assert np.count_nonzero(first.action == Action.OOM) == np.count_nonzero(second.action == Action.OOM)
