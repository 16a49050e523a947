"""STALLOC_POISON=1 on real bytes: who writes what is not theirs is found and named, who does not never hears of it."""

import importlib.util
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

# a virtual GPU whose memory is plain memory: what a kernel would write is written by the host
_PROLOGUE = """
import ctypes, gc, json, os, random, sys, threading
import stalloc
from stalloc.device import VirtualGPU
from stalloc.core import entry
from stalloc.runtime import Settings
RUNTIME = stalloc.install(
    device="virtual",
    gpu=VirtualGPU(total_bytes=1 << 30, copy_limit_bytes=None),
    settings=Settings(streams=os.environ.get("STREAMS", "separate")),
)
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import torch
MIB = 1 << 20
def new(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
def write(address, num_bytes=1, value=7):
    ctypes.memset(address, value, num_bytes)
def use(tensor):
    write(tensor.data_ptr(), tensor.numel(), random.randrange(256))
    return tensor
def found(action):
    try:
        action()
    except stalloc.CorruptionError as error:
        return str(error)
    return ""
"""


def _run(run_program: Any, program: str, **environment: str | None) -> Any:
    return run_program(_PROLOGUE + program, STALLOC_POISON="1", **environment)


def test_a_write_of_one_byte_behind_a_tensor_is_found_and_named(run_program: Any) -> None:
    done = _run(
        run_program,
        """
for size in (4096, 1000, 1, 3 * MIB):
    tensor = use(new(size))
    assert not found(stalloc.step)
    write(tensor.data_ptr() + size)
    text = found(stalloc.step)
    assert "1 byte was written" in text and "(07) past the end of a block" in text, text
    assert f"{size:,} bytes at {tensor.data_ptr():#x}" in text and "<string>:" in text, text
    assert not found(stalloc.step)  # told once
    write(tensor.data_ptr() + size)
    del tensor
    assert "as was found when it was freed" in found(stalloc.step)
print("fine")
""",
    )
    assert done.stdout == "fine\n", done.stderr
    assert done.stderr.count("stalloc: memory corruption: 1 byte was written") == 8
    assert "8 findings: the program ends with exit code 1" in done.stderr
    assert done.returncode == 1


def test_a_write_to_freed_memory_is_found_wherever_the_memory_goes_next(run_program: Any) -> None:
    done = _run(
        run_program,
        """
texts = []
def gone(size):
    tensor = use(new(size))
    return tensor.data_ptr()
address = gone(3 * MIB)
write(address + 100, 3)
kept = use(new(3 * MIB))
assert kept.data_ptr() == address
texts.append(found(stalloc.step))
address = gone(3 * MIB)
write(address + MIB, 2)
texts.append(found(stalloc.step))
address = gone(50 * MIB)
write(address + 40 * MIB)
torch.cuda.empty_cache()
texts.append(found(stalloc.step))
assert not found(stalloc.step)
print(json.dumps(texts))
""",
    )
    again, mark, returned = eval(done.stdout)
    assert "3 bytes were written" in again
    assert "when it was to be handed out again" in again
    assert "2 bytes were written" in mark
    assert "at the end of a step" in mark
    assert "1 byte was written" in returned
    assert "when it went back to the device" in returned
    for text in (again, mark, returned):
        assert "in what was last a block of" in text
        assert "after it was freed" in text
        assert "<string>:" in text
    assert done.returncode == 1


def test_cupy_raises_at_its_next_allocation_and_fresh_memory_reads_as_nan(run_program: Any) -> None:
    done = _run(
        run_program,
        """
import cupy
array = cupy.empty(1000, cupy.float32)
assert not (array.get() == array.get()).any()  # NaN
array.set(__import__("numpy").ones(1000, "float32"))
assert array.get().sum() == 1000
write(array.data.ptr + 4000, 4)
del array
print(found(lambda: cupy.empty(10)))
cupy.empty(10)
""",
    )
    assert "4 bytes were written" in done.stdout
    assert "past the end of a block of 4,000 bytes" in done.stdout
    assert done.returncode == 1


# steps with a plan, steps that leave it, other streams, a graph, moves: all of it writes what it owns and nothing else
_CLEAN = """
random.seed(3)
side = torch.cuda.Stream()
weights = [use(new(random.randrange(1, 4 * MIB))) for _ in range(12)]
sizes = [random.randrange(600, 6 * MIB) for _ in range(30)]
states, phases, leased, deferred = [], set(), 0, 0
def step(extra=0, seed=0):
    global leased, deferred
    live, order = [], random.Random(seed)
    for nth, size in enumerate(sizes):
        live.append(use(new(size)))
        if extra and nth % 5 == 0:
            live.append(use(new(order.randrange(1, extra))))
        if nth % 7 == 3:
            live[-1].record_stream(side)
        leased = max(leased, STATE.record.dynamic.num_leases)
        while len(live) > 6:
            use(live.pop(order.randrange(len(live))))
        deferred = max(deferred, STATE.record.hot.num_deferred)
    for tensor in weights:
        use(tensor)
    del live
    stalloc.step()
    phases.add(CONTROLLER.status.phase.name)
for _ in range(12):
    step()
for nth in range(6):
    step(extra=MIB, seed=nth)
graph = torch.cuda.CUDAGraph()
outside = use(new(2 * MIB))
with torch.cuda.graph(graph):
    inside = use(new(3 * MIB))
    temporary = new(3 * MIB)
    replayed = temporary.data_ptr()
    del temporary, outside
write(replayed, 3 * MIB)  # a replay writes to its pool
stalloc.step()
for _ in range(4):
    step()
stalloc.adopt(weights, copy=__import__("stalloc.kernels").kernels.host_copy)
sizes = [size // 2 + 700 for size in sizes]
for _ in range(25):
    step()
del graph, inside
torch.cuda.empty_cache()
for _ in range(4):
    step()
def work():
    for _ in range(300):
        use(new(random.randrange(1, 2 * MIB)))
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    stalloc.step()
import cupy
arrays = [cupy.empty(random.randrange(1, 100_000)) for _ in range(40)]
for array in arrays:
    array.data.memset(0, array.nbytes)
CONTROLLER.drop_plan()
weights = weights[:2] if len(sys.argv) > 1 else []
del arrays, array
gc.collect()
CONTROLLER.memory.deferred.wait()
torch.cuda.empty_cache()
stalloc.step()
print(json.dumps([sorted(phases), leased > 0, deferred > 0, CONTROLLER.status.num_plans,
                  STATE.record.statistics.num_unknown_frees,
                  STATE.record.total.allocated_bytes, STATE.record.statistics.reserved_bytes]))
"""


@pytest.mark.slow
def test_a_program_that_writes_only_what_it_owns_never_hears_of_it(run_program: Any) -> None:
    done = _run(run_program, _CLEAN)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    phases, leased, deferred, num_plans, unknown, allocated, reserved = eval(
        done.stdout.replace("true", "True").replace("false", "False")
    )
    assert {"OBSERVING", "PLANNED"} <= set(phases)
    assert leased
    assert deferred
    assert num_plans >= 2
    assert (unknown, allocated, reserved) == (0, 0, 0)


def test_blocks_freed_while_a_graph_is_captured_are_looked_at_afterwards(run_program: Any) -> None:
    done = _run(
        run_program,
        """
before = use(new(2 * MIB))
address = before.data_ptr()
write(address + 2 * MIB)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    inside = use(new(MIB))
    live = STATE.record.total.num_live
    del before
    assert STATE.record.total.num_live == live
print(found(stalloc.step))
assert STATE.record.total.num_live == live - 1
del inside, graph
""",
    )
    assert "past the end of a block of 2,097,152 bytes" in done.stdout, done.stderr
    assert done.returncode == 1


def test_a_capture_that_nobody_told_of_goes_well_and_is_not_looked_at(run_program: Any) -> None:
    done = _run(
        run_program,
        """
import cupy
side, runtime = torch.cuda.Stream(), cupy.cuda.runtime
with torch.cuda.stream(side):
    before = new(2 * MIB)
    runtime.streamBeginCapture(side.cuda_stream, 0)
    inside = new(MIB)
    del before
    stalloc.step()
    runtime.streamEndCapture(side.cuda_stream)
print("captured")
""",
        STALLOC_VIRTUAL_ORDER="strict",
    )
    assert done.stdout == "captured\n", done.stderr
    assert done.stderr == ""


def test_many_blocks_freed_while_a_graph_is_captured_are_each_looked_at_and_filled(run_program: Any) -> None:
    done = _run(
        run_program,
        """
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    before = [use(new(size)) for size in (4096, 3 * MIB)]
before += [use(new(size)) for size in (512, 1000, 2 * MIB, 5 * MIB)]
addresses, sizes = [one.data_ptr() for one in before], [one.numel() for one in before]
for number in (0, 3):  # one on each stream
    write(addresses[number] + sizes[number])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    inside = use(new(MIB))
    live = STATE.record.total.num_live
    del before
texts = found(stalloc.step)
assert "past the end of a block of" in texts and "(1 more on standard error)" in texts, texts
assert STATE.record.total.num_live == live - len(addresses)
assert not found(stalloc.step)
for address, size in zip(addresses, sizes):  # every byte of them holds the pattern of what nobody owns
    assert ctypes.string_at(address, size) == bytes([0xFB]) * size, size
write(addresses[4] + MIB)
text = found(stalloc.step)
assert "in what was last a block of 2,097,152 bytes" in text and "after it was freed" in text, text
del inside, graph
print("fine")
""",
    )
    assert done.stdout == "fine\n", done.stderr
    assert "past the end of a block of 4,096 bytes" in done.stderr
    assert "past the end of a block of 1,000 bytes" in done.stderr
    assert done.stderr.count("stalloc: memory corruption: 1 byte was") == 3
    assert done.returncode == 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("interpret", [pytest.param("1", marks=pytest.mark.slow), None])
def test_fills_and_checks_of_a_gpu_leave_what_those_of_the_host_leave(run_program: Any, interpret: str | None) -> None:
    """By the kernels, in Triton's interpreter, and one by one where no torch is at work."""
    done = run_program(
        """
import ctypes, sys
from stalloc.device import VirtualGPU, activate
activate("virtual", gpu=VirtualGPU(total_bytes=1 << 30, copy_limit_bytes=None))
import cupy
import numpy as np
from stalloc.poison.poison import GpuMemory, HostMemory
if "TRITON_INTERPRET" in __import__("os").environ:
    import torch
    torch.cuda.init()
memory = np.random.default_rng(1).integers(0, 256, 4 << 20).astype(np.uint8)
expected = memory.copy()
offsets, sizes = [0, 3, 1000, 70_001, 2 << 20], [1, 16, 60_000, 0, 1_999_999]
ranges, same = ([(m.ctypes.data + o, n) for o, n in zip(offsets, sizes)] for m in (memory, expected))
gpu, host = GpuMemory(0), HostMemory()
for byte, some in ((0xFB, slice(None)), (0xFD, slice(1, 2)), (7, slice(3, 4))):
    gpu.fill(ranges[some], byte, 0)
    host.fill(same[some], byte, 0)
    assert (memory == expected).all(), byte
    memory[2000], memory[-(2 << 20) + 5] = 1, 2
    expected[:] = memory
    for stream in (0, None):
        counts = gpu.mismatches(ranges, 0xFB, stream)
        assert counts == host.mismatches(same, 0xFB, stream), counts
        assert counts[2] == 1 and counts[4] == 1
assert (gpu.read(*ranges[2]) == host.read(*same[2])).all()
print("torch" in sys.modules, sum(counts))
""",
        TRITON_INTERPRET=interpret,
    )
    assert done.stdout == f"{interpret == '1'} 18\n", done.stderr


@pytest.mark.slow
def test_memory_that_a_plan_hands_from_stream_to_stream_is_no_finding(run_program: Any) -> None:
    done = _run(
        run_program,
        """
streams = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(20):
    for stream, sizes in zip(streams, ((40, 30, 20), (50, 25))):
        with torch.cuda.stream(stream):
            held = [use(new(size * MIB // 4)) for size in sizes]
            del held
    stalloc.step()
write(CONTROLLER.arenas.arena.ptr + 5)  # nothing of the plan lives now
print(CONTROLLER.status.phase.name, len(CONTROLLER.status.plan.handover_later) > 0, found(stalloc.step)[:18])
""",
        STREAMS="share",
    )
    assert done.stdout == "PLANNED True 1 byte was written\n", done.stderr
    assert done.stderr.count("memory corruption: 1 byte") == 1
    assert done.returncode == 1


def test_a_child_of_fork_goes_on_without_being_looked_at(run_program: Any) -> None:
    done = _run(
        run_program,
        """
import cupy
tensors = [use(new(3 * MIB)) for _ in range(4)]
child = os.fork()
if child == 0:
    address = tensors.pop().data_ptr()
    write(address, 100)
    cupy.empty(MIB)
    stalloc.step()
    sys.exit(7 if RUNTIME.watch.devices[STATE.address].found else 0)
_, status = os.waitpid(child, 0)
write(tensors[0].data_ptr() + 3 * MIB)
print(os.waitstatus_to_exitcode(status), found(stalloc.step)[:18])
""",
    )
    assert done.stdout == "0 1 byte was written\n", done.stderr
    assert done.returncode == 1


@pytest.mark.slow
def test_without_the_variable_requests_reach_the_core_directly(run_checks: Any) -> None:
    for value in (None, "0"):
        direct = run_checks(
            _PROLOGUE
            + """
use(new(1000))
print(json.dumps([RUNTIME.entries == entry.core_entries(), RUNTIME.watch is None, STATE.record.total.requested_peak]))
""",
            STALLOC_POISON=value,
        )
        assert direct == [True, True, 1000]


def test_a_virtual_gpu_without_bytes_is_not_looked_at(run_program: Any) -> None:
    program = """
import stalloc
runtime = stalloc.install(device="virtual")
import torch
from stalloc.core import entry
assert runtime.entries == entry.core_entries()
torch.empty(10, device="cuda")
stalloc.step()
"""
    done = run_program(program, STALLOC_POISON="1")
    assert done.returncode == 0, done.stderr
    assert "STALLOC_POISON finds nothing on a virtual GPU" in done.stderr


@pytest.mark.slow
def test_the_gpus_way_through_kernels_or_the_host_counts_as_the_hosts_does(run_checks: Any) -> None:
    same, way = run_checks(
        _PROLOGUE
        + """
from stalloc.poison.poison import GpuMemory, HostMemory
torch.empty(1, device="cuda")
gpu, host = GpuMemory(0), HostMemory()
room = new(8 * MIB)
base, rng = room.data_ptr(), random.Random(5)
same, allocs = True, STATE.record.total.num_allocs
for _ in range(20):
    at, size = base + rng.randrange(MIB), rng.randrange(1, 100_000)
    gpu.fill([(at, size)], 0xFB, 0)
    same &= host.mismatches([(at, size)], 0xFB, 0) == [0]
    for _ in range(rng.randrange(4)):
        write(at + rng.randrange(size))
    ranges = [(at, size), (at + size // 2, 0), (at + size // 3, size // 2)]
    same &= gpu.mismatches(ranges, 0xFB, 0) == host.mismatches(ranges, 0xFB, 0)
    same &= bool((gpu.read(at, size) == host.read(at, size)).all())
host.fill([(base, 8 * MIB)], 0xFB, 0)
write(base + 7 * MIB, 5)
same &= gpu.mismatches([(base, 8 * MIB)], 0xFB, None) == [5]
for owner in (threading.get_ident(), threading.get_ident() + 512):  # a thread's default stream, and another one's
    gpu.fill([(base, MIB)], 0x11, owner << 4 | 2)
    same &= gpu.mismatches([(base, MIB)], 0x11, owner << 4 | 2) == [0]
print(json.dumps([same and STATE.record.total.num_allocs == allocs, "stalloc.kernels.launch" in sys.modules]))
""",
        TRITON_INTERPRET="1",
        PYTHONWARNINGS="ignore",
    )
    assert same
    assert way == (importlib.util.find_spec("triton") is not None)


@pytest.mark.slow
def test_a_check_by_kernel_takes_nothing_from_the_allocator_that_it_checks(run_checks: Any) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    took, launched = run_checks(
        _PROLOGUE
        + """
from stalloc.device import virtual
from stalloc.poison.poison import GpuMemory
room = new(MIB)
memory, allocs, launches = GpuMemory(0), STATE.record.total.num_allocs, virtual.statistics()["launches"]
memory.mismatches([(room.data_ptr() + 512 * nth, 512) for nth in range(2000)], 1, None)
print(json.dumps([STATE.record.total.num_allocs - allocs, virtual.statistics()["launches"] - launches]))
"""
    )
    assert took == 0
    assert launched == 1
