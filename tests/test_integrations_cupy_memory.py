"""What CuPy's own tests ask of its memory pool, asked of stalloc: memory objects, hooks, allocators, limits, errors."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

_PROLOGUE = """
import ctypes, gc, io, json, pickle, sys, threading, warnings
import stalloc
from stalloc.device import VirtualGPU, virtual
GPU = VirtualGPU(total_bytes=1 << 30, num_devices=2, copy_limit_bytes=None)
RUNTIME = stalloc.install(device="virtual", gpu=GPU, settings=stalloc.integrations.Settings(plan=False))
STATE = RUNTIME.controllers[0].state
import cupy as cp
from cupy.cuda import memory
MIB, UNIT = 1 << 20, 512
pool = cp.get_default_memory_pool()
alloc = cp.cuda.alloc
class Hook(cp.cuda.MemoryHook):
    name = "mine"
    def __init__(self):
        self.heard = []
def listener(event):
    return lambda self, **facts: self.heard.append([event, facts, STATE.record.total.num_live])
for event in ("alloc", "malloc", "free"):
    for when in ("preprocess", "postprocess"):
        setattr(Hook, f"{event}_{when}", listener(f"{event}_{when}"))
def show(*values):
    print(json.dumps(values))
"""

# what a program relies on when it runs under STALLOC=1 without a word of stalloc in it
_SWITCHED_ON = {"STALLOC": "1", "STALLOC_DEVICE": "virtual:1GiB", "STALLOC_CACHE": "off"}
_HOOKED = "from stalloc.integrations.startup import arm\narm()\n"


def test_memory_knows_its_rounded_size_and_its_device(run_checks: Any) -> None:
    sizes, nothing, there = run_checks(
        _PROLOGUE
        + """
sizes = [alloc(size).mem.size for size in (1, 512, 513, 5 * MIB + 1)]
array = cp.arange(128, dtype=cp.int64)
sizes.append(array.data.mem.size == pool.used_bytes() == 1024)
empty = alloc(0).mem
nothing = [empty.ptr, empty.size, isinstance(empty, memory.Memory), isinstance(array.data.mem, memory.BaseMemory)]
with cp.cuda.Device(1):
    there = alloc(10).mem.device_id
show(sizes, nothing, there)
"""
    )
    assert sizes == [512, 512, 1024, (5 << 20) + 512, True]
    assert nothing == [0, 0, True, True]
    assert there == 1


def test_memory_can_be_freed_by_hand_and_twice(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
kept = alloc(700)
pointer = alloc(1000)
used = [pool.used_bytes()]
for _ in range(2):
    pointer.mem.free()
    used.append(pool.used_bytes())
taken = alloc(1000)
del pointer
gc.collect()
used.append(pool.used_bytes())  # the end of the object does not free what another one has now
show(used, STATE.record.statistics.num_unknown_frees)
"""
    ) == [[2048, 1024, 1024, 2048], 0]


def test_pointers_move_within_memory_and_keep_it(run_checks: Any) -> None:
    moved, bytes_read, kept, end = run_checks(
        _PROLOGUE
        + """
pointer = alloc(64)
base = pointer.ptr
later = pointer + 16
earlier = later - 8
moved = [int(later) - base, earlier.ptr - base, (4 + pointer).ptr - base, later.mem is pointer.mem]
later += 16
moved.append(later.ptr - base)
source = (ctypes.c_ubyte * 64)(*range(64))
pointer.copy_from(ctypes.cast(source, ctypes.c_void_p), 64)
other = alloc(64)
other.copy_from(pointer, 64)
(other + 60).memset(7, 4)
target = (ctypes.c_ubyte * 64)()
other.copy_to_host(ctypes.cast(target, ctypes.c_void_p), 64)
del pointer, earlier, other
kept = pool.used_bytes()
view = memory.MemoryPointer(memory.UnownedMemory(later.ptr, 32, later), 0)
del later
array = cp.ndarray((4,), cp.int32, view)
del view
kept = [kept, pool.used_bytes()]
del array
show(moved, list(target), kept, pool.used_bytes())
"""
    )
    assert moved == [16, 8, 4, True, 32]
    assert bytes_read == [*range(60), 7, 7, 7, 7]
    assert kept == [512, 512]
    assert end == 0


def test_hooks_hear_each_event_in_order_and_with_all_facts(run_checks: Any) -> None:
    """Frees are heard of whenever the memory was made, around the free itself; requests for nothing are heard of."""
    heard, address, identity, live, nothing = run_checks(
        _PROLOGUE
        + """
old = alloc(600)
with Hook() as hook:
    del old
    hook.heard.clear() if hook.heard[0][0] == "free_preprocess" else None
    pointer = alloc(3 * MIB)
    address, identity, live = pointer.ptr, id(pointer.mem), STATE.record.total.num_live
    pointer.mem.free()
    del pointer
    heard = list(hook.heard)
    hook.heard.clear()
    empty = alloc(0)
    nothing = [[event, facts["size"], facts["mem_size"], facts.get("mem_ptr")] for event, facts, _ in hook.heard]
    nothing.append(hook.heard[-1][1]["pmem_id"] == id(empty.mem))
    del empty
    nothing.append(len(hook.heard))
show(heard, address, identity, live, nothing)
"""
    )
    events, facts, lives = zip(*heard, strict=True)
    stages = ["preprocess", "postprocess"]
    made = ["malloc_preprocess", "alloc_preprocess", "alloc_postprocess", "malloc_postprocess"]
    assert list(events) == [*made, *(f"free_{stage}" for stage in stages)]
    asked = {"device_id": 0, "size": 3 << 20, "mem_size": 3 << 20}
    named = {"mem_ptr": address, "pmem_id": identity}
    freed = {"device_id": 0, "mem_size": 3 << 20, **named}
    assert [facts[0], facts[3], facts[4], facts[5]] == [asked, asked | named, freed, freed]
    assert facts[1] == {"device_id": 0, "mem_size": facts[1]["mem_size"]}
    assert facts[1]["mem_size"] >= 3 << 20
    assert facts[2] == facts[1] | {"mem_ptr": address}
    assert [live, lives[4], lives[5]] == [1, 1, 0], "the memory is there before, and gone after"
    assert nothing == [["malloc_preprocess", 0, 0, None], ["malloc_postprocess", 0, 0, 0], True, 2]


def test_a_hook_that_fails_loses_no_memory(run_checks: Any) -> None:
    errors, end = run_checks(
        _PROLOGUE
        + """
errors = []
sys.unraisablehook = lambda unraisable: errors.append(str(unraisable.exc_value))
class Failing(cp.cuda.MemoryHook):
    name = "failing"
def fail(self, **facts):
    raise ValueError("from a hook")
for event in ("malloc_preprocess", "alloc_preprocess", "malloc_postprocess", "free_preprocess", "free_postprocess"):
    setattr(Failing, event, fail)
    with Failing():
        try:
            pointer = alloc(3 * MIB)
            del pointer
        except ValueError as error:
            errors.append(str(error))
    delattr(Failing, event)
    gc.collect()
show(errors, [STATE.record.total.num_live, STATE.record.total.allocated_bytes,
              STATE.record.statistics.num_unknown_frees])
"""
    )
    assert errors == ["from a hook"] * len(errors)
    assert len(errors) >= 4
    assert end == [0, 0, 0]


def test_allocators_of_parts_of_a_program_are_kept_apart(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
first, second, seen = cp.cuda.MemoryPool(), cp.cuda.MemoryPool(), []
ours = cp.cuda.get_allocator()
def work():
    seen.append(cp.cuda.get_allocator() is ours)
    array = cp.ones(256, dtype=cp.int64)
    seen.append([pool.used_bytes(), first.used_bytes()])
with cp.cuda.using_allocator(first.malloc):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with cp.cuda.using_allocator(second.malloc):
        array = cp.zeros(128, dtype=cp.int64)
    seen.append([second.used_bytes(), cp.cuda.get_allocator() == first.malloc])
    try:
        cp.cuda.set_allocator(second.malloc)
    except ValueError:
        seen.append("refused")
seen.append(cp.cuda.get_allocator() is ours)
class Mine:
    calls = 0
    def malloc(self, size, device):
        self.calls += 1
        return cp.cuda.runtime.malloc(size)
    def free(self, address, device):
        self.calls += 1
        cp.cuda.runtime.free(address)
mine = Mine()
cp.cuda.set_allocator(cp.cuda.PythonFunctionAllocator(mine.malloc, mine.free).malloc)
cp.cuda.alloc(100)
seen.append(mine.calls)
for none in ((), (None,)):
    cp.cuda.set_allocator(*none)
    kept = cp.cuda.alloc(100)
    seen.append(pool.used_bytes())
cp.cuda.set_allocator(pool.malloc)
kept = cp.cuda.alloc(100)
seen.append(pool.used_bytes())
stalloc.uninstall()
seen.append(cp.cuda.get_allocator() == pool.malloc)  # the program's own choice stays
again = cp.cuda.alloc(100)
seen.append([pool.used_bytes(), STATE.record.total.num_live])
show(*seen)
"""
    ) == [True, [2048, 0], [1024, True], "refused", True, 2, 0, 0, 512, True, [512, 1]]


def test_install_inside_of_another_allocator_serves_the_rest_of_the_program(run_checks: Any) -> None:
    assert run_checks(
        """
import json, threading
from stalloc.device import VirtualGPU, activate
activate("virtual", VirtualGPU(total_bytes=1 << 30))
import cupy as cp, stalloc
mine = cp.cuda.MemoryPool()
with cp.cuda.using_allocator(mine.malloc):
    stalloc.install(device="virtual")
    pool = cp.get_default_memory_pool()
    a = cp.empty(1 << 20, cp.uint8)
    seen = [[mine.used_bytes(), pool.used_bytes()]]
b = cp.empty(2 << 20, cp.uint8)
seen.append(pool.used_bytes())
with cp.cuda.using_allocator(mine.malloc):
    stalloc.uninstall()
c = cp.empty(1 << 20, cp.uint8)
seen.append([pool.used_bytes(), mine.used_bytes()])
print(json.dumps(seen))
"""
    ) == [[1 << 20, 0], 2 << 20, [1 << 20, 1 << 20]]


def test_out_of_memory_can_be_sent_to_another_process(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
pool.set_limit(size=64 * MIB)
try:
    alloc(100 * MIB)
except memory.OutOfMemoryError as error:
    text = str(pickle.loads(pickle.dumps(error)))
show("104,857,600 bytes" in text, "limit set to: 67,108,864" in text)
"""
    ) == [True, True]


def test_limits_count_from_the_start_whoever_set_them(run_checks: Any) -> None:
    """By a variable of CuPy's, or on CuPy's pool before stalloc is installed."""
    program = """
import json
from stalloc.device import VirtualGPU, activate
activate("virtual", VirtualGPU(total_bytes=1 << 30, num_devices=2))
import cupy as cp, stalloc
{before}
stalloc.install(device="virtual")
pool = cp.get_default_memory_pool()
limits = []
for device in range(2):
    with cp.cuda.Device(device):
        limits.append(pool.get_limit())
try:
    cp.empty(200 << 20, cp.uint8)
except cp.cuda.memory.OutOfMemoryError:
    limits.append("refused")
print(json.dumps(limits))
"""
    before = "cp.get_default_memory_pool().set_limit(size=100 << 20)"
    assert run_checks(program.format(before=before)) == [100 << 20, 0, "refused"]
    assert run_checks(program.format(before=""), CUPY_GPU_MEMORY_LIMIT="10%") == [
        (1 << 30) // 10,
        (1 << 30) // 10,
        "refused",
    ]
    assert run_checks(program.format(before=before), CUPY_GPU_MEMORY_LIMIT="150000000") == [
        100 << 20,
        150000000,
        "refused",
    ]


def test_old_and_rare_calls_answer_as_cupys_pool_does(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
seen = [pool.n_free_blocks(), pool.used_bytes(), pool.free_bytes(), pool.total_bytes()]
pool.free_all_blocks()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    pool.free_all_free()
seen.append([warning.category is DeprecationWarning for warning in told])
pointer = pool.malloc(100)
pointer.mem.free()
seen.append(pool.n_free_blocks())
pool.free_all_blocks(stream=cp.cuda.Stream.null)
seen += [pool.n_free_blocks(), pool.total_bytes()]
for wrong in (-1, 1.5, "1"):
    try:
        alloc(wrong)
    except (TypeError, ValueError, OverflowError) as error:
        seen.append("refused")
seen.append(STATE.record.statistics.num_ooms)
show(*seen)
"""
    ) == [0, 0, 0, 0, [True], 1, 0, 0, "refused", "refused", "refused", 0]


def test_the_pool_that_a_program_asks_for_first_is_the_one_that_answers(run_checks: Any) -> None:
    """Programs ask for the pool, and limit it, before they allocate anything."""
    program = """
import json
{arm}
import cupy as cp
pool = cp.get_default_memory_pool()
pool.set_limit(size=100 << 20)
{choose}
array = cp.empty(2 << 20, cp.uint8)
seen = [pool.used_bytes(), pool.get_limit(), cp.get_default_memory_pool() is pool]
try:
    cp.empty(200 << 20, cp.uint8)
except cp.cuda.memory.OutOfMemoryError as error:
    seen.append("stalloc" in str(error))
print(json.dumps(seen))
"""
    for choose in ("", "cp.cuda.set_allocator(pool.malloc)"):
        result = run_checks(program.format(arm=_HOOKED, choose=choose), **_SWITCHED_ON)
        assert result == [2 << 20, 100 << 20, True, True]


@pytest.mark.usefixtures("cuda_torch")
def test_an_allocator_that_the_program_chose_for_cupy_is_left_alone(run_checks: Any) -> None:
    assert run_checks(
        f"""
import json
{_HOOKED}
import cupy as cp, torch
mine = cp.cuda.MemoryPool()
cp.cuda.set_allocator(mine.malloc)
tensor = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
array = cp.empty(2 << 20, cp.uint8)
pool = cp.get_default_memory_pool()
import stalloc
live = stalloc.integrations.installing.current().controllers[0].state.record.total.num_live
print(json.dumps([mine.used_bytes(), live, torch.cuda.memory_allocated(), cp.cuda.get_allocator() == mine.malloc]))
""",
        **_SWITCHED_ON,
    ) == [2 << 20, 1, 3 << 20, True]


def test_a_thread_that_allocates_while_stalloc_is_put_in_place_waits_for_it(run_checks: Any) -> None:
    """What it would have from CuPy's own pool meanwhile, nobody could use again."""
    program = """
import json, threading
{arm}
import cupy as cp
from stalloc.integrations import startup
pool, own_install, arrays = cp.get_default_memory_pool(), startup._install_with_cache, []
{choose}
began, made = threading.Event(), threading.Event()
def install(kind):
    began.set()
    made.wait(0.2)
    own_install(kind)
startup._install_with_cache = install
def allocate():
    began.wait()
    arrays.append(cp.empty(2 << 20, cp.uint8))
    made.set()
thread = threading.Thread(target=allocate)
thread.start()
arrays.append(cp.empty(2 << 20, cp.uint8))
thread.join()
print(json.dumps([pool._own.total_bytes(), pool.used_bytes()]))
"""
    for choose in ("", "cp.cuda.set_allocator(pool.malloc)"):
        assert run_checks(program.format(arm=_HOOKED, choose=choose), **_SWITCHED_ON) == [0, 4 << 20]
