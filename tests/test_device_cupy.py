"""CuPy on the virtual GPU and on host memory: real pools, streams and kernels' host side."""

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

_PROLOGUE = """
import json, os, sys
from stalloc.device import VirtualGPU, activate, devices
limit = None if "host" in sys.argv else 1 << 20
gpu = dict(name="Test GPU", total_bytes=4 << 30, compute_capability=(8, 0), num_devices=2)
activate("virtual", VirtualGPU(**gpu, copy_limit_bytes=limit))
import cupy as cp
import numpy as np

RESULTS = {}
def check(function):
    try:
        RESULTS[function.__name__] = function()
    except Exception as error:
        RESULTS[function.__name__] = f"{type(error).__name__}: {error}"
"""

_CHECKS = (
    _PROLOGUE
    + """
@check
def seam():
    first, second = devices()
    pool = first.new_pool()
    with cp.cuda.Device(first.index):
        block = pool.malloc(1_000_000)
    held = [first.memory_info()[0], second.memory_info()[0], pool.used_bytes(), pool.total_bytes()]
    del block
    pool.free_all_blocks()
    described = [first.kind, second.index, first.name, first.total_bytes, first.compute_capability]
    return [described, held, first.memory_info()]

@check
def properties():
    p = cp.cuda.runtime.getDeviceProperties(1)
    return [p["name"].decode(), p["totalGlobalMem"], p["major"], p["minor"], cp.cuda.runtime.getDeviceCount(),
            cp.cuda.Device(0).compute_capability]

@check
def pools():
    cp.get_default_memory_pool().free_all_blocks()
    x = cp.empty(1 << 20, dtype=cp.uint8)
    used = cp.get_default_memory_pool().used_bytes()
    del x
    kept = cp.get_default_memory_pool().total_bytes()
    y = cp.empty(1 << 20, dtype=cp.uint8)
    return [used, kept, cp.get_default_memory_pool().total_bytes()]

@check
def out_of_memory():
    try:
        cp.empty(5 << 30, dtype=cp.uint8)
    except cp.cuda.memory.OutOfMemoryError:
        first = "pool"
    try:
        cp.cuda.runtime.malloc(5 << 30)
    except cp.cuda.runtime.CUDARuntimeError as error:
        second = [error.status, str(error)]
    return [first, second, cp.empty(10).shape]

@check
def retry_frees_cached_blocks():
    pool = cp.cuda.MemoryPool()
    for size in (1 << 30, 2 << 30):  # cached, then in the way of the next
        del_me = pool.malloc(size)
        del del_me
    held = pool.total_bytes()
    block = pool.malloc(3 << 30)
    return [held, pool.total_bytes(), block.size if hasattr(block, "size") else block.mem.size]

@check
def programs():
    import cupyx.scipy.ndimage
    import cupyx.scipy.signal
    import cupyx.scipy.sparse
    x = cp.arange(1000.0)
    image = cp.random.rand(64, 48)
    kernel = cp.RawKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice")
    kernel((1,), (32,), (cp.zeros(32, dtype=cp.float32),))
    shapes = {
        "elementwise": cp.exp(x * 2 + 1), "reduction": image.sum(axis=0), "total": x.mean(), "cumsum": cp.cumsum(x),
        "index": x[cp.array([1, 2])], "mask": x[x > 3], "sort": cp.sort(x),
        "fused": cp.fuse()(lambda a, b: a * b)(x, x), "solve": cp.linalg.solve(cp.eye(4), cp.ones(4)),
        "matmul": cp.ones((5, 6)) @ cp.ones((6, 7)), "einsum": cp.einsum("ij,kj->ik", image, image),
        "fft": cp.fft.rfft2(image), "random": cp.random.default_rng(0).standard_normal((3, 4)),
        "filter": cupyx.scipy.ndimage.gaussian_filter(image, 2), "zoom": cupyx.scipy.ndimage.zoom(image, 2),
        "convolve": cupyx.scipy.signal.fftconvolve(image, image[:5, :5]),
        "sparse": cupyx.scipy.sparse.csr_matrix(cp.eye(4)) @ cp.ones(4),
    }
    return {name: list(array.shape) for name, array in shapes.items()}

@check
def streams():
    stream, start, end = cp.cuda.Stream(non_blocking=True), cp.cuda.Event(), cp.cuda.Event()
    with stream:
        start.record()
        x = cp.zeros(100) + 1
        end.record()
    stream.wait_event(end)
    stream.synchronize()
    asynchronous = cp.cuda.MemoryAsyncPool()
    block = asynchronous.malloc(1 << 20)
    return [stream.done, end.done, cp.cuda.get_elapsed_time(start, end) >= 0, asynchronous.used_bytes() >= 1 << 20]

@check
def asynchronous_pool():
    pool, steps = cp.cuda.MemoryAsyncPool(), {}
    pool.free_all_blocks()  # what the checks before have left
    free_bytes = cp.cuda.runtime.memGetInfo()[0]
    def look(name):
        steps[name] = [pool.used_bytes(), pool.total_bytes(), free_bytes - cp.cuda.runtime.memGetInfo()[0]]
    small = pool.malloc(12)
    look("small")
    large = pool.malloc(100 << 20)
    look("large")
    del large
    look("freed")
    cp.cuda.Device().synchronize()
    look("waited")  # CuPy has told the pool to keep what it has
    runtime = cp.cuda.runtime
    runtime.memPoolSetAttribute(runtime.deviceGetMemPool(0), runtime.cudaMemPoolAttrReleaseThreshold, 0)
    cp.cuda.Device().synchronize()
    look("waited without a threshold")
    pool.set_limit(size=0)  # none: all is kept again
    del small
    pool.free_all_blocks()
    look("emptied")
    nearly_all = pool.malloc(cp.cuda.runtime.memGetInfo()[0] - (3 << 20))
    steps["left"] = cp.cuda.runtime.memGetInfo()[0]
    try:
        pool.malloc(4 << 20)
    except cp.cuda.memory.OutOfMemoryError:
        steps["too much"] = "OutOfMemoryError"
    cp.cuda.runtime.free(cp.cuda.runtime.mallocAsync(12, 0))
    steps["freed otherwise"] = pool.used_bytes() - nearly_all.mem.size
    return steps

@check
def decisions():
    from stalloc.device import virtual
    lengths = cp.asarray(np.arange(40))
    counts = {}
    def count(name, act):
        before = sum(one["num_reads"] for one in virtual.findings()["decisions"])
        act()
        counts[name] = sum(one["num_reads"] for one in virtual.findings()["decisions"]) - before
    count("an upload", lambda: lengths.get())
    count("printing", lambda: f"{lengths + 1} {lengths + 1!r}")
    count("a loss", lambda: float(cp.ones(3).sum()))
    count("a sum", lambda: int(lengths.sum()))
    count("places", lambda: cp.nonzero(lengths))
    count("a mask", lambda: lengths[lengths > 3])
    count("a truth", lambda: bool((lengths > 3).any()))
    count("elements", lambda: (lengths * 2).tolist())
    return counts

@check
def kernel_cache_on_disk():
    return [name for _, _, names in os.walk(os.environ["CUPY_CACHE_DIR"]) for name in names]

print(json.dumps(RESULTS))
"""
)


@pytest.fixture(scope="module")
def results(run_checks, tmp_path_factory):
    return run_checks(_CHECKS, CUPY_CACHE_DIR=str(tmp_path_factory.mktemp("cupy") / "cache"))


def test_the_asynchronous_pool_takes_memory_in_steps_and_keeps_it_until_the_program_waits(results):
    seen, step = results["asynchronous_pool"], 32 << 20
    assert seen["small"] == [512, step, step]  # as on GPUs, by what CuPy's memory.pyx says of them
    used_bytes, total_bytes, taken_bytes = seen["large"]
    assert used_bytes == (100 << 20) + 512
    assert total_bytes == taken_bytes >= used_bytes
    assert seen["freed"] == seen["waited"] == [512, total_bytes, total_bytes]
    assert seen["waited without a threshold"] == [512, step, step]
    assert seen["emptied"] == [0, 0, 0]
    assert seen["left"] < 4 << 20  # no step is left, but pages are
    assert seen["too much"] == "OutOfMemoryError"
    assert seen["freed otherwise"] < 512


def test_seam_offers_devices_with_pools_of_their_own(results):
    described, held, freed = results["seam"]
    assert described == ["virtual", 1, "Test GPU", 4 << 30, [8, 0]]
    free_first, free_second, used_bytes, total_bytes = held
    assert used_bytes == total_bytes == 1_000_448
    assert free_first == (4 << 30) - 1_000_448
    assert free_second == 4 << 30
    assert freed == [4 << 30, 4 << 30]


def test_cupy_sees_the_chosen_gpu(results):
    assert results["properties"] == ["Test GPU", 4 << 30, 8, 0, 2, "80"]


def test_pool_caches_what_is_freed(results):
    assert results["pools"] == [1 << 20, 1 << 20, 1 << 20]


def test_decisions_on_what_no_kernel_computed_are_counted(results):
    known = {"an upload": 0, "printing": 0, "a loss": 0}
    assert results["decisions"] == known | dict.fromkeys(("a sum", "places", "a mask", "a truth", "elements"), 1)


def test_out_of_memory_has_cupys_own_types_and_is_survived(results):
    pool, (status, text), shape = results["out_of_memory"]
    assert pool == "pool"
    assert status == 2
    assert text == "cudaErrorMemoryAllocation: out of memory"
    assert shape == [10]


def test_pool_gives_back_cached_blocks_before_it_fails(results):
    held, total, size = results["retry_frees_cached_blocks"]
    assert held == 3 << 30
    assert total == size == 3 << 30


def test_programs_run_with_the_right_shapes(results):
    assert results["programs"] == {
        "elementwise": [1000], "reduction": [48], "total": [], "cumsum": [1000], "index": [2], "mask": [0],
        "sort": [1000], "fused": [1000], "matmul": [5, 7], "einsum": [64, 64], "fft": [64, 25], "random": [3, 4],
        "filter": [64, 48], "zoom": [128, 96], "convolve": [68, 52], "solve": [4], "sparse": [4],
    }  # fmt: skip


def test_streams_events_and_stream_ordered_pools_work(results):
    assert results["streams"] == [True, True, True, True]


def test_kernels_compiled_to_nothing_do_not_reach_the_disk(results):
    assert results["kernel_cache_on_disk"] == []


_HOST = (
    _PROLOGUE
    + """
import threading

def copy_and_compare(seed, wrong):
    random, stream = np.random.default_rng(seed), cp.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(50):
            size = int(random.integers(1, 4 << 20))
            data = random.integers(0, 256, size, dtype=np.uint8)
            array = cp.empty(size, dtype=cp.uint8)
            array.set(data)
            twin = cp.empty(size, dtype=cp.uint8)
            twin.data.copy_from_device_async(array.data, size)
            piece = slice(size // 3, size // 2)
            if not (np.array_equal(twin.get(), data) and np.array_equal(array[piece].get(), data[piece])):
                wrong.append(size)

wrong = []
threads = [threading.Thread(target=copy_and_compare, args=(seed, wrong)) for seed in (1, 2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
filled = cp.cuda.alloc(3 << 20)
filled.memset(7, 3 << 20)
back = np.empty(3 << 20, dtype=np.uint8)
filled.copy_to_host(back.ctypes.data, back.nbytes)
print(json.dumps([wrong, back.min().item(), back.max().item()]))
"""
)


def test_host_memory_keeps_every_byte_in_two_threads(run_checks):
    wrong, lowest, highest = run_checks(_HOST, "host")
    assert wrong == []
    assert (lowest, highest) == (7, 7)


_MANY = (
    _PROLOGUE
    + """
import ctypes
runtime = cp.cuda.runtime
blocks = [runtime.malloc(1024) for _ in range(20000)]
inside = [runtime.pointerGetAttributes(block + 1023).devicePointer - block for block in blocks[::997]]
beyond = runtime.pointerGetAttributes(blocks[0] + 1024).type
free = runtime.memGetInfo()[0]
for block in blocks[::2]: runtime.free(block)
again = {runtime.malloc(1024) for _ in range(10000)}
try:
    runtime.free(12345)
except runtime.CUDARuntimeError as error:
    status = error.status
print(json.dumps([len(set(blocks)), set(inside) == {1023}, beyond, free, len(again & set(blocks[1::2])), status]))
"""
)


def test_many_small_blocks_are_distinct_and_found_by_any_address(run_checks):
    num, found, beyond, free, reused_live, status = run_checks(_MANY)
    assert num == 20_000
    assert found
    assert beyond == 0
    assert free == (4 << 30) - 20_000 * 1024
    assert reused_live == 0
    assert status == 1


def test_cupy_and_torch_share_one_device(run_checks, cuda_torch):
    program = """
import json
from stalloc.device import VirtualGPU, activate
activate("virtual", VirtualGPU(total_bytes=4 << 30))
import cupy, torch
a = cupy.empty(1 << 30, dtype=cupy.uint8)
b = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
c = torch.from_dlpack(a)
d = cupy.from_dlpack(b)
print(json.dumps([cupy.cuda.runtime.memGetInfo()[0], torch.cuda.mem_get_info()[0], c.data_ptr() == a.data.ptr,
                  d.data.ptr == b.data_ptr()]))
"""
    assert run_checks(program) == [2 << 30, 2 << 30, True, True]
