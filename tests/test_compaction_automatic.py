"""Compaction that happens by itself: only where it is allowed, only at marks, and then memory suffices."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

_PROLOGUE = """
import gc, json, os, sys, weakref
import stalloc, stalloc.integrations
from stalloc.device import VirtualGPU
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=int(os.environ["MEMORY"])))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import torch
MIB = 1 << 20
def new(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
def with_holes(count):
    blocks = [new(3 * MIB) for _ in range(count)]
    del blocks[1::2]
    return blocks
"""

# 300 MiB live in segments of 600, and a step's arena is 500: in 1,000 MiB there is room for it only after moving
_ARENA = (
    _PROLOGUE.replace("install(", "install(settings=stalloc.integrations.Settings(arena='pool'), ")
    + """
kept = with_holes(200)
if sys.argv[1] == "allowed":
    allowed = stalloc.allow_compaction(lambda: kept)
for nth in range(14):
    small = [new(3 * MIB) for _ in range(100)]
    large = new(200 * MIB)
    del small, large
    if sys.argv[2] == "marks":
        stalloc.step()
moved = len(allowed.relocations) if sys.argv[1] == "allowed" else 0
print(json.dumps([CONTROLLER.status.phase.name, moved, CONTROLLER.status.note,
    STATE.record.total.allocated_bytes // MIB, STATE.record.statistics.num_ooms]))
"""
)


@pytest.mark.parametrize(
    ("allowed", "marks", "phase"),
    [
        ("allowed", "marks", "PLANNED"),
        pytest.param("forbidden", "marks", "RESTING", marks=pytest.mark.slow),
        pytest.param("allowed", "none", "RESTING", marks=pytest.mark.slow),
    ],
)
def test_room_is_made_for_an_arena_at_a_mark_if_that_is_allowed(
    run_checks: Any, allowed: str, marks: str, phase: str
) -> None:
    found, moved, note, allocated, errors = run_checks(_ARENA, allowed, marks, MEMORY=str(1000 << 20))
    assert found == phase
    assert moved == (phase == "PLANNED")
    assert ("does not fit beside" in note) == (phase == "RESTING")
    assert (allocated, errors) == (300, 0)


@pytest.mark.slow
def test_after_a_refusal_the_next_mark_makes_room_and_no_move_happens_between_marks(run_checks: Any) -> None:
    found = run_checks(
        _PROLOGUE
        + """
kept = with_holes(320)
module = torch.nn.ParameterList([torch.nn.Parameter(t, requires_grad=False) for t in kept])
del kept
addresses = lambda: [p.data_ptr() for p in module]
before = addresses()
def attempt():
    try:
        new(460 * MIB)
        return "served"
    except torch.OutOfMemoryError:
        return "refused"
results = [attempt()]
stalloc.step()
results.append(attempt())          # nothing was allowed yet
allowed = stalloc.allow_compaction(module)
results.append(attempt())
results.append(addresses() == before)
stalloc.step()
results += [attempt(), addresses() == before, len(allowed.relocations)]
moved = addresses()
stalloc.step()
results += [addresses() == moved]  # nothing was lacking: nothing moves
results += [attempt() == "served", allowed.refusals]
new(2 << 30) if len(sys.argv) > 1 else None
alive = weakref.ref(module)
del module
gc.collect()
results += [alive() is None]       # allowing it keeps nothing alive
results += [STATE.record.total.allocated_bytes, STATE.record.statistics.num_unknown_frees]
print(json.dumps(results))
""",
        MEMORY=str(1 << 30),
    )
    assert found[:3] == ["refused"] * 3
    assert found[3] is True
    assert found[4:7] == ["served", False, 1]
    assert found[7:] == [True, True, [], True, 0, 0]


@pytest.mark.slow
def test_what_cannot_be_made_room_for_is_a_note_and_moves_nothing(run_checks: Any) -> None:
    same, refusals, relocations, stopped = run_checks(
        _PROLOGUE
        + """
kept = with_holes(320)
allowed = stalloc.allow_compaction(lambda: kept, exclude=kept[:3])
before = [t.data_ptr() for t in kept]
def refused(size):
    try:
        new(size)
    except torch.OutOfMemoryError:
        return True
assert refused(900 * MIB)
stalloc.step()
same = before == [t.data_ptr() for t in kept]
refusals, relocations = allowed.refusals[:], len(allowed.relocations)
allowed.stop()
assert refused(460 * MIB)
stalloc.step()
print(json.dumps([same, refusals, relocations, before == [t.data_ptr() for t in kept]]))
""",
        MEMORY=str(1 << 30),
    )
    assert same
    assert len(refusals) == 1
    assert "cannot be freed in one piece" in refusals[0]
    assert relocations == 0
    assert stopped


@pytest.mark.slow
def test_a_limit_of_the_program_counts_like_the_end_of_the_device(run_checks: Any) -> None:
    refused, served, limit, reserved = run_checks(
        _PROLOGUE
        + """
torch.cuda.set_per_process_memory_fraction(0.5)
kept = with_holes(160)
try:
    new(230 * MIB)
    refused = False
except torch.OutOfMemoryError:
    refused = True
stalloc.compact(kept, needed_bytes=230 * MIB)
large = new(230 * MIB)
limit = CONTROLLER.memory.source.limit_bytes
print(json.dumps([refused, large.numel() // MIB, limit, STATE.record.statistics.reserved_peak.total]))
""",
        MEMORY=str(1 << 30),
    )
    assert refused
    assert served == 230
    assert reserved <= limit


def test_only_what_can_be_watched_is_taken(run_checks: Any) -> None:
    texts = run_checks(
        """
import json
import stalloc
texts = []
try:
    stalloc.allow_compaction()
except stalloc.SetupError as error:
    texts.append(str(error))
stalloc.install(device="virtual")
import torch
try:
    stalloc.allow_compaction([torch.empty(3)])
except stalloc.BadInputError as error:
    texts.append(str(error))
print(json.dumps(texts))
"""
    )
    assert "not installed" in texts[0]
    assert "a list cannot be watched" in texts[1]
