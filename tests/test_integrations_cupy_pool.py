"""What programs rely on in CuPy's memory pool holds when stalloc serves CuPy: sizes, reuse, streams, limits, hooks."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

_PROLOGUE = """
import gc, io, json, threading
import stalloc
from stalloc.device import VirtualGPU, virtual
GPU = VirtualGPU(total_bytes=1 << 30, num_devices=2, copy_limit_bytes=None)
RUNTIME = stalloc.install(device="virtual", gpu=GPU, settings=stalloc.integrations.Settings(plan=False))
STATE = RUNTIME.controllers[0].state
import cupy as cp
from cupy.cuda import memory_hooks
from cupy.cuda.memory import OutOfMemoryError
MIB, UNIT = 1 << 20, 512
pool = cp.get_default_memory_pool()
alloc = cp.cuda.alloc
def show(*values):
    print(json.dumps(values))
"""


def test_sizes_are_counted_in_units_and_return_to_nothing(run_checks: Any) -> None:
    counts, zero, end = run_checks(
        _PROLOGUE
        + """
counts = []
held = []
for size in (1, 512, 513, 1024, 4 * MIB + 1):
    held.append(alloc(size))
    counts.append([pool.used_bytes(), pool.total_bytes() - pool.used_bytes() == pool.free_bytes()])
empty = alloc(0)
zero = [empty.mem.size, pool.used_bytes() == counts[-1][0]]
del held, empty
before = pool.total_bytes() > 0 and pool.free_bytes() == pool.total_bytes() and pool.n_free_blocks() > 0
pool.free_all_blocks()
show(counts, zero, [before, pool.used_bytes(), pool.total_bytes(), pool.n_free_blocks(), virtual.used_bytes()])
"""
    )
    assert [used for used, _ in counts] == [512, 1024, 2048, 3072, 3072 + (4 << 20) + 512]
    assert all(consistent for _, consistent in counts)
    assert zero == [0, True]
    assert end == [True, 0, 0, 0, 0]


def test_memory_is_reused_split_and_merged(run_checks: Any) -> None:
    reused, split, merged, live_kept = run_checks(
        _PROLOGUE
        + """
a = alloc(MIB)
address = a.ptr
del a
a = alloc(MIB)
reused = a.ptr == address
del a
# a freed block serves two smaller ones, which do not overlap
first, second = alloc(UNIT * 3), alloc(UNIT * 5)
split = first.ptr + UNIT * 3 <= second.ptr or second.ptr + UNIT * 5 <= first.ptr
total = pool.total_bytes()
# head, middle and tail in every order of freeing: the whole is there again
import itertools
merged = []
for order in itertools.permutations(range(3)):
    parts = {i: alloc(UNIT * 100) for i in range(3)}
    addresses = {i: part.ptr for i, part in parts.items()}
    for i in order:
        del parts[i]
    whole = alloc(UNIT * 300)
    merged.append(whole.ptr <= min(addresses.values()) and pool.total_bytes() == total)
    del whole
# an array and a view keep memory alive
array = cp.arange(1000)
view = array[10:20]
address = array.data.ptr
del array
other = [alloc(8000) for _ in range(50)]
live_kept = all(not address <= o.ptr < address + 8000 for o in other)
show(reused, split, merged, live_kept)
"""
    )
    assert reused
    assert split
    assert merged == [True] * 6
    assert live_kept


def test_each_stream_has_memory_of_its_own(run_checks: Any) -> None:
    result = run_checks(
        _PROLOGUE
        + """
one, two = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
with one:
    a = alloc(MIB)
    address = a.ptr
    del a
with two:
    b = alloc(MIB)
with one:
    c = alloc(MIB)
    d = alloc(MIB)
taken = [b.ptr != address, c.ptr == address]
# freed while another stream is current, it goes back to its own
address = d.ptr
with two:
    del d
    e = alloc(MIB)
with one:
    f = alloc(MIB)
taken += [e.ptr != address, f.ptr == address]
del b, c, e, f
pool.free_all_blocks(stream=one)
show(taken, pool.used_bytes())
"""
    )
    assert result == [[True] * 4, 0]


def test_devices_are_counted_apart(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
a = alloc(MIB)
with cp.cuda.Device(1):
    b = alloc(3 * MIB)
    there = [pool.used_bytes(), b.device_id]
    pool.set_limit(size=16 * MIB)
    there.append(pool.get_limit())
show([pool.used_bytes(), a.device_id, pool.get_limit()], there)
"""
    ) == [[1 << 20, 0, 0], [3 << 20, 1, 16 << 20]]


def test_limits_are_kept_and_can_be_lifted(run_checks: Any) -> None:
    limits, refused, total, after, wrong = run_checks(
        _PROLOGUE
        + """
limits = [pool.get_limit()]
pool.set_limit(size=64 * MIB)
limits.append(pool.get_limit())
held, refused = [], 0
for _ in range(20):
    try:
        held.append(alloc(5 * MIB))
    except OutOfMemoryError as error:
        assert "stalloc: out of memory" in str(error)
        refused += 1
total = pool.total_bytes()
pool.set_limit(fraction=0.5)
limits.append(pool.get_limit())
held += [alloc(5 * MIB) for _ in range(20)]
pool.set_limit(size=0)
limits.append(pool.get_limit())
wrong = 0
for arguments in ({"size": 1, "fraction": 0.5}, {"fraction": -0.1}, {"fraction": 1.1}, {"size": -1}):
    try:
        pool.set_limit(**arguments)
    except ValueError:
        wrong += 1
show(limits, refused, total <= 64 * MIB, len(held), wrong)
"""
    )
    assert limits == [0, 64 << 20, 512 << 20, 0]
    assert refused >= 8
    assert total
    assert after == 40 - refused
    assert wrong == 4


def test_an_error_leaves_the_pool_usable_and_unused_memory_is_given_back_first(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
small = [alloc(100 * MIB) for _ in range(9)]
try:
    alloc(300 * MIB)
    failed = False
except OutOfMemoryError:
    failed = True
del small[1:]
whole = alloc(900 * MIB)
class Cycle:
    pass
del whole
cycle = Cycle()
cycle.self, cycle.memory = cycle, alloc(900 * MIB)
del cycle
again = alloc(900 * MIB)
show(failed, again.mem.size)
"""
    ) == [True, 900 << 20]


def test_hooks_hear_of_memory_as_from_cupys_pool(run_checks: Any) -> None:
    lines, unhooked, profile = run_checks(
        _PROLOGUE
        + """
text = io.StringIO()
with memory_hooks.DebugPrintHook(file=text):
    a = alloc(1000)
    address = a.ptr
    del a
    b = alloc(1000)
    del b
c = alloc(1000)
unhooked = len(text.getvalue().splitlines())
hook = memory_hooks.LineProfileHook()
with hook:
    d = cp.zeros(MIB)
    e = alloc(2 * MIB)
report = io.StringIO()
hook.print_report(file=report)
lines = [json.loads(line) for line in text.getvalue().splitlines()]
assert all(line["mem_ptr"] == address for line in lines)
show(lines, unhooked, "<string>" in report.getvalue())
"""
    )
    assert [line["hook"] for line in lines] == ["alloc", "malloc", "free", "malloc", "free"]
    assert [line.get("size") for line in lines if line["hook"] == "malloc"] == [1000, 1000]
    assert {line["mem_size"] for line in lines[1:]} == {1024}
    assert lines[1]["pmem_id"] == lines[2]["pmem_id"]
    assert unhooked == 5
    assert profile


def test_hooks_hear_of_an_allocation_that_fails(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
seen = []
class Hook(cp.cuda.MemoryHook):
    name = "mine"
    def malloc_preprocess(self, **facts):
        seen.append("before")
    def malloc_postprocess(self, **facts):
        seen.append(["after", facts["mem_ptr"]])
    def free_postprocess(self, **facts):
        seen.append("freed")
with Hook():
    try:
        alloc(1 << 40)
    except OutOfMemoryError:
        seen.append("error")
show(*seen)
"""
    ) == ["before", ["after", 0], "error"]


def test_threads_share_the_pool(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
import random
errors = []
def work(seed):
    rng, held = random.Random(seed), []
    try:
        with cp.cuda.Stream(non_blocking=True):
            for _ in range(2000):
                if held and rng.random() < 0.5:
                    array, value = held.pop(rng.randrange(len(held)))
                    assert (array.get() == value).all()
                else:
                    value = rng.randrange(256)
                    size = rng.randrange(1, 100_000)
                    array = cp.empty(size, dtype=cp.uint8)
                    import numpy
                    array.set(numpy.full(size, value, numpy.uint8))
                    held.append((array, value))
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
gc.collect()
pool.free_all_blocks()
show(errors, pool.used_bytes(), pool.total_bytes())
"""
    ) == [[], 0, 0]


def test_other_allocators_in_a_part_of_the_program_are_respected(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
mine = cp.cuda.MemoryPool()
with cp.cuda.using_allocator(mine.malloc):
    a = alloc(MIB)
    inside = [mine.used_bytes(), pool.used_bytes()]
b = alloc(MIB)
c = pool.malloc(MIB)
show(inside, [mine.used_bytes(), pool.used_bytes()])
"""
    ) == [[1 << 20, 0], [1 << 20, 2 << 20]]


def test_what_lives_from_before_is_counted_and_kept(run_checks: Any) -> None:
    during, after = run_checks(
        """
import json
from stalloc.device import VirtualGPU, activate
activate("virtual", VirtualGPU(total_bytes=1 << 30))
import cupy as cp
own = cp.get_default_memory_pool()
old = cp.empty(3 << 20, dtype=cp.uint8)
import stalloc
with stalloc.scope(device="virtual"):
    pool = cp.get_default_memory_pool()
    new = cp.empty(2 << 20, dtype=cp.uint8)
    during = [own.used_bytes(), pool.used_bytes(), pool is own]
back = cp.empty(1 << 20, dtype=cp.uint8)
print(json.dumps([during, [own.used_bytes(), pool.used_bytes(), cp.get_default_memory_pool() is own]]))
"""
    )
    assert during == [3 << 20, 5 << 20, False]
    assert after == [4 << 20, 4 << 20, True]
