"""Tables that are full: the error names the table and what to do, and what is freed can be used again."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

_PROLOGUE = """
import gc, json
from operator import attrgetter
import stalloc
from stalloc.device import VirtualGPU, virtual
from stalloc.integrations import Settings
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=16 << 30))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import cupy as cp
MIB = 1 << 20
alloc, Full = cp.cuda.alloc, cp.cuda.memory.OutOfMemoryError
texts, held = [], []
def fill(sizes, most=20_000):
    '''Hold blocks until one is refused; how many there are.'''
    count = 0
    for size, _ in zip(sizes, range(most)):
        try:
            held.append(alloc(size))
            count += 1
        except Full as error:
            texts.append(str(error))
            break
    return count
def apart():
    '''Whether no two blocks overlap.'''
    spans = sorted((block.ptr, block.ptr + block.mem.size) for block in held)
    return all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))
def left_over():
    held.clear()
    gc.collect()
    RUNTIME.rest()
    names = ("total.allocated_bytes", "total.requested_bytes", "total.num_live", "statistics.reserved_bytes",
        "lookup.live_count", "statistics.num_unknown_frees", "lock")
    return [attrgetter(name)(STATE.record) for name in names] + [virtual.used_bytes()]
def show(*values):
    print(json.dumps(values))
"""

_NOTHING = [0] * 8


@pytest.mark.parametrize(
    ("table", "sizes"),
    [
        ("max_live_mask=8191", "[512] * 20_000"),
        ("blocks_capacity=500", "[512] * 20_000"),
        ("segments_capacity=100", "[32 * MIB] * 200"),
    ],
)
def test_a_full_table_is_named_and_what_is_freed_serves_again(run_checks: Any, table: str, sizes: str) -> None:
    blocks = table.startswith("segments")  # there are hardly any of them where memory comes by pages
    first, second, texts, whole, left = run_checks(
        (_PROLOGUE.replace("install(", "install(settings=Settings(arena='pool'), ") if blocks else _PROLOGUE)
        + f"""
STATE.write({table})
first = fill({sizes})
whole = apart()
small = [len(text) for text in texts]
del held[::2]
second = fill({sizes})
show(first, second, texts, [whole, apart()], left_over())
"""
    )
    assert 90 <= first < 20_000
    assert 0.4 * first < second <= first, "what was freed can be used again"
    name = {"max_live_mask": "live blocks", "blocks_capacity": "blocks", "segments_capacity": "segments"}[
        table.split("=")[0]
    ]
    assert len(texts) == 2
    for text in texts:
        assert f"table of {name} is full" in text
        assert text.endswith(".")
    assert whole == [True, True]
    assert left == _NOTHING


def test_a_full_table_of_pools_is_named(run_checks: Any) -> None:
    texts, count, left = run_checks(
        _PROLOGUE
        + """
STATE.write(pools_mask=31)  # no request came before
streams = [cp.cuda.Stream(non_blocking=True) for _ in range(40)]
count = 0
for stream in streams:
    with stream:
        count += fill([600], 1)
for stream in streams[:20]:
    with stream:
        assert fill([600], 1) == 1, "the pools that there are serve"
assert apart()
show(texts, count, left_over())
"""
    )
    assert 25 <= count < 40
    assert len(texts) == 40 - count
    assert all("table of pools is full" in text for text in texts)
    assert left == _NOTHING


@pytest.mark.slow
def test_programs_that_use_ever_new_streams_are_served(run_checks: Any) -> None:
    """A stream that holds no memory any more makes room for another one."""
    texts, count, left = run_checks(
        _PROLOGUE
        + """
kept = []
count = 0
for i in range(2500):
    stream = cp.cuda.Stream(non_blocking=True)
    kept.append(stream)  # their handles are all different
    with stream:
        blocks = [alloc(100_000), alloc(3 * MIB)]
        count += blocks[0].ptr != blocks[1].ptr
        if i % 50 == 0:
            held.append(blocks[0])  # and some memory lives on
        del blocks

assert apart()
show(texts, count, left_over())
"""
    )
    assert texts == []
    assert count == 2500
    assert left == _NOTHING


def test_too_many_streams_that_all_hold_memory_are_named(run_checks: Any) -> None:
    count, texts, again, whole, left = run_checks(
        _PROLOGUE
        + """
streams = [cp.cuda.Stream(non_blocking=True) for _ in range(1100)]
count = 0
for stream in streams:
    with stream:
        count += fill([600], 1)
first = texts[0]
del held[100:200]
again = 0
for stream in streams[-90:]:
    with stream:
        again += fill([600], 1)
show(count, [first, len(texts)], again, apart(), left_over())
"""
    )
    assert 1000 < count < 1100
    assert "table of streams is full" in texts[0]
    assert texts[1] == 1100 - count
    assert again >= 85
    assert whole
    assert left == _NOTHING


def test_a_plan_is_given_up_for_further_streams_and_nothing_is_lost(run_checks: Any) -> None:
    phases, texts, left = run_checks(
        _PROLOGUE
        + """
def step():
    blocks = [alloc(MIB + 4096 * i) for i in range(8)]
    del blocks
    stalloc.step()
for _ in range(8):
    step()
phases = [CONTROLLER.status.phase.value]
kept = []
for i in range(1500):
    kept.append(cp.cuda.Stream(non_blocking=True))
    with kept[-1]:
        block = alloc(5000)
    del block
    if i % 100 == 0:
        step()
for _ in range(12):
    step()
phases.append(CONTROLLER.status.phase.value)
show(phases, texts, left_over())
"""
    )
    assert phases[0] == "running on the plan"
    assert phases[1] == "running on the plan", "the program is watched and planned anew"
    assert texts == []
    assert left == _NOTHING
