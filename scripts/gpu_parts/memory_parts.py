"""What lies in memory that stalloc serves: every byte is uploaded from the host and compared when it comes back."""

import itertools
import multiprocessing
import random
from typing import Any

from part import IS_REAL, check, check_paged, installed, note, step, use_device

MIB = 1 << 20


def _begin(**options: Any) -> tuple[Any, Any]:
    use_device()
    runtime = installed(**options)
    with step("import torch"):
        import torch
    with step("first use of CUDA"):
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    check_paged(runtime)
    return torch, runtime


def tensor() -> None:
    """One tensor under stalloc: uploaded, added to, read; and what the GPU, torch and CUDA are."""
    torch, _ = _begin()
    found = torch.cuda.get_device_properties(0)
    note(gpu=found.name, memory_bytes=found.total_memory, torch=torch.__version__, cuda=torch.version.cuda)
    with step("a copy to the device and back"):
        host = torch.arange(1 << 20, dtype=torch.int32)
        check(torch.equal(host.cuda().cpu(), host), "a tensor came back with other values")
    if IS_REAL:
        with step("a kernel"):
            check(torch.equal((host.cuda() + 1).cpu(), host + 1), "a kernel that adds 1 gave other values")


class Patterns:
    """Blocks that hold bytes of their own, which are looked at when a block is freed."""

    def __init__(self, torch: Any, seed: int, most_bytes: int) -> None:
        self._torch, self._rng, self._most, self._held = torch, random.Random(seed), most_bytes, 0
        self._live: dict[int, tuple[Any, Any]] = {}
        self._numbers = itertools.count()
        self.num_checked = 0

    def add(self, size: int) -> None:
        while self._live and self._held + size > self._most:
            self.drop()
        host = self._torch.randint(0, 256, (min(size, 65536),), dtype=self._torch.uint8)
        block = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
        block[: len(host)].copy_(host)
        block[size - len(host) :].copy_(host)
        self._held += size
        self._live[next(self._numbers)] = block, host

    def drop(self) -> None:
        number = self._rng.choice(list(self._live))
        block, host = self._live.pop(number)
        same = self._torch.equal(block[-len(host) :].cpu(), host)
        check(same, f"block {number} of {len(block)} bytes was overwritten while it lived")
        self._held -= len(block)
        self.num_checked += 1

    def run(self, num: int, sizes: tuple[int, ...]) -> None:
        for _ in range(num):
            if self._live and self._rng.random() < 0.45:
                self.drop()
            else:
                self.add(self._rng.choice(sizes))
        while self._live:
            self.drop()


SIZES = (12, 800, 20_000, 280_000, 3_600_000, 12_000_000)


def patterns() -> None:
    """Steps that repeat, then steps that do not: no block loses its bytes, with a plan and beside it."""
    import stalloc

    torch, runtime = _begin()
    for number, seed in enumerate([7] * 8 + [8, 7, 9, 7, 10]):
        with step(f"step {number}"):
            Patterns(torch, seed, 1 << 30).run(100, SIZES)
            stalloc.step()
    report = runtime.reports()[0]
    note(plans=report.plans_made, hit_rate=report.hit_rate, reserved=report.run_reserved_peak_bytes)
    check(report.plans_made, "13 steps, of which most are the same, were not planned")


def small_card() -> None:
    """A limit of 256 MiB, which requests fill in ever other sizes: pages move under what lives."""
    import stalloc

    torch, runtime = _begin()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(256 * MIB / total)
    for seed in range(8):
        with step(f"step {seed}"):
            Patterns(torch, seed, 200 * MIB).run(60, (300_000, 5_000_000, 21_000_000, 60_000_000))
            stalloc.step()
    paging = runtime.controllers[0].memory.paging
    note(growths=paging.num_growths, moves=paging.num_moves)


def _two_streams(streams: str) -> None:
    """A block that another stream reads is not handed out before it is done."""
    import stalloc
    from stalloc.integrations import Settings

    torch, runtime = _begin(settings=Settings(streams=streams))  # type: ignore[arg-type]
    side = torch.cuda.Stream()
    host = [torch.full((MIB,), number, dtype=torch.uint8).pin_memory() for number in range(16)]
    for number in range(10):
        with step(f"step {number}"):
            results = []
            for value in range(16):
                block = torch.empty(MIB, dtype=torch.uint8, device="cuda")
                block.copy_(host[value], non_blocking=True)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    if IS_REAL:
                        torch.cuda._sleep(1_000_000)
                    results.append(block.to("cpu", non_blocking=True))
                block.record_stream(side)
                del block
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            wrong = [value for value, read in enumerate(results) if not bool((read == value).all())]
            check(not wrong, f"blocks {wrong} were overwritten while the other stream read them")
            stalloc.step()
    note(plans=runtime.reports()[0].plans_made)


def streams_separate() -> None:
    _two_streams("separate")


def streams_share() -> None:
    _two_streams("share")


def graphs_torch() -> None:
    """A CUDA graph by torch: captured, memory churned around it, replayed."""
    torch, _ = _begin()
    static = torch.zeros(MIB, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            result = static * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with step("capture"), torch.cuda.graph(graph):
        temporary = static * 2
        result = temporary + 1
        del temporary
    for value in range(4):
        with step(f"replay {value}"):
            Patterns(torch, value, 100 * MIB).run(20, SIZES)
            static.copy_(torch.full((MIB,), float(value)))
            graph.replay()
            torch.cuda.synchronize()
            if IS_REAL:
                check(float(result.mean()) == 2 * value + 1, f"replay {value} of the graph gave other values")


def graphs_cupy() -> None:
    """A CUDA graph by CuPy, whose capture torch knows nothing of."""
    use_device()
    installed()
    import cupy

    kept = [cupy.zeros(MIB, dtype=cupy.uint8) for _ in range(3)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        with step("capture"):
            stream.begin_capture()
            block = cupy.empty(33_000_000, dtype=cupy.uint8)
            block.data.memset_async(7, block.nbytes)
            graph = stream.end_capture()
        for number in range(2):
            with step(f"launch {number}"):
                graph.launch(stream)
                stream.synchronize()
    if IS_REAL:
        check(int(block[-1]) == 7, "the graph did not write")
    del kept


def cupy_alone() -> None:
    """CuPy without torch: arrays keep their bytes, its pool answers."""
    use_device()
    runtime = installed()
    import cupy
    import numpy

    import stalloc

    rng = numpy.random.default_rng(1)
    for number in range(8):
        with step(f"step {number}"):
            hosts = [rng.integers(0, 256, size, dtype=numpy.uint8) for size in (900, 70_000, 5_000_000, 9_000_000)]
            arrays = [cupy.asarray(host) for host in hosts]
            for array, host in zip(arrays, hosts, strict=True):
                check(bool((cupy.asnumpy(array) == host).all()), "an array came back with other values")
            del arrays
            stalloc.step()
    check_paged(runtime)
    pool = cupy.get_default_memory_pool()
    note(used=pool.used_bytes(), total=pool.total_bytes())
    pool.free_all_blocks()


def adopt_and_compact() -> None:
    """What lives is moved into buffers without gaps, and keeps its values."""
    import stalloc

    torch, _ = _begin()
    hosts = [torch.randn(300_000 + 1000 * number) for number in range(60)]
    blocks = [host.cuda() for host in hosts]
    gaps = [torch.empty(400_000, device="cuda") for _ in range(60)]
    del gaps[::2]
    parameters = [torch.nn.Parameter(block) for block in blocks[::2]]
    with step("adopt"):
        moved = stalloc.adopt(parameters)
        note(moved=moved.num_moved)
    with step("compact"):
        note(moved=stalloc.compact(parameters, blocks[1::2]).num_moved)
    if IS_REAL:
        pairs = zip(parameters, hosts[::2], strict=True)
        check(all(torch.equal(one.detach().cpu(), host) for one, host in pairs), "what was moved has other values")


def sleep_and_wake() -> None:
    """A job gives its memory back, and has its bytes again at the same addresses."""
    import stalloc

    torch, _ = _begin()
    hosts = [torch.randn(size // 4) for size in SIZES]
    blocks = [host.cuda() for host in hosts]
    before = torch.cuda.mem_get_info()[0]
    with step("sleep"):
        slept = stalloc.sleep()
    note(kept=slept.kept_bytes, given_back=slept.given_back_bytes, free=torch.cuda.mem_get_info()[0] - before)
    with step("wake"):
        stalloc.wake()
    same = all(torch.equal(block.cpu(), host) for block, host in zip(blocks, hosts, strict=True))
    check(same, "what slept has other values")


def _child(answers: Any) -> None:
    installed()
    import torch

    host = torch.arange(1000)
    answers.put(bool(torch.equal(host.cuda().cpu(), host)))


def _in_child(method: str, before: bool) -> None:
    use_device()
    if before:
        installed()
        import torch

        torch.zeros(1, device="cuda")
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    child = context.Process(target=_child, args=(answers,))
    with step(method):
        child.start()
        child.join()
    check(child.exitcode == 0 and answers.get(), f"a child by {method} ended with exit code {child.exitcode}")


def fork() -> None:
    _in_child("fork", before=False)


def spawn() -> None:
    _in_child("spawn", before=True)


PARTS = (
    tensor, patterns, streams_separate, streams_share, small_card, graphs_torch, graphs_cupy, cupy_alone,
    adopt_and_compact, sleep_and_wake, fork, spawn,
)  # fmt: skip
