"""Host time of a step of a 7B model on the virtual GPU under stalloc, against torch's own allocator.

Contract: both run in processes of their own that stay alive and take turns, a step of one, a step of the other, on the
same core, in changing order: what disturbs the machine disturbs both. What counts is the median of the ratios of
neighbouring steps. Run as a script it is one of the two processes: a line on standard input asks for a step.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_WARM_UP_STEPS = 10  # by then the plan is in force
_GPU = "H200"


class Runner:
    """A process that makes a step whenever it is asked for one."""

    def __init__(self, allocator: str, core: int) -> None:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, allocator, str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "STALLOC_CACHE": "off"},
        )

    def step(self) -> tuple[int, int]:
        """Nanoseconds of one step: on the clock and on the processor."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        words = self._process.stdout.readline().split()
        if len(words) != 2:
            raise RuntimeError("a process that makes steps has ended: run it by itself to see why.")
        return int(words[0]), int(words[1])

    def end(self) -> None:
        """Let it end."""
        self._process.kill()
        self._process.wait()


def host_step(num_pairs: int) -> list[tuple[str, float, float | None]]:
    """The rows; none, with the reason printed, where torch with CUDA or CuPy is missing."""
    if not can_run("host_step"):
        return []
    core = max(os.sched_getaffinity(0))
    native, ours = runners = [Runner(allocator, core) for allocator in ("native", "stalloc")]
    pairs = []
    try:
        for _ in range(_WARM_UP_STEPS):
            for runner in runners:
                runner.step()
        for number in range(num_pairs):
            if number % 2:
                first = native.step()
                pairs.append((first, ours.step()))
            else:
                second = ours.step()
                pairs.append((native.step(), second))
    finally:
        for runner in runners:
            runner.end()
    clock = [mine[0] / theirs[0] for theirs, mine in pairs]
    processor = [mine[1] / theirs[1] for theirs, mine in pairs]
    low, middle, high = statistics.quantiles(clock, n=4)
    return [
        ("host_step_7b_against_native", middle, 1.0),
        ("host_step_7b_against_native_lower_quartile", low, None),
        ("host_step_7b_against_native_upper_quartile", high, None),
        ("host_step_7b_processor_time_against_native", statistics.median(processor), None),
        ("host_step_7b_ms", statistics.median(mine[0] for _, mine in pairs) / 1e6, None),
        ("host_step_7b_native_ms", statistics.median(theirs[0] for theirs, _ in pairs) / 1e6, None),
    ]


def can_run(group: str) -> bool:
    """Whether there are torch with CUDA and CuPy, which a group of rows needs; the reason is printed if not."""
    spec = importlib.util.find_spec("torch")
    places = (spec.submodule_search_locations if spec is not None else None) or []
    has_cuda = any((Path(place) / "lib" / "libtorch_cuda.so").exists() for place in places)
    has_all = has_cuda and importlib.util.find_spec("cupy") is not None
    if not has_all:
        print(f"  ({group}: skipped, it needs a CUDA build of torch and CuPy)", file=sys.stderr)
    return has_all


def main() -> None:
    """Make steps of examples/train_gpt.py's 7B model as they are asked for."""
    allocator, core = sys.argv[1], int(sys.argv[2])
    os.sched_setaffinity(0, {core})
    from stalloc.device import activate, find_gpu

    if allocator == "stalloc":
        import stalloc

        stalloc.install(device="virtual", gpu=find_gpu(_GPU))
    else:
        activate("virtual", find_gpu(_GPU))
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import SIZES, Transformer, make_batch

    size, generator = SIZES["7b"], torch.Generator().manual_seed(0)
    torch.set_default_dtype(size.dtype)
    with torch.device("cuda"):
        model = Transformer(size, size.seq_len, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    for _ in sys.stdin:
        began, worked = time.perf_counter_ns(), time.process_time_ns()
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = make_batch(generator, 1, size.seq_len, size.vocab_size)
        model(tokens.cuda(), targets.cuda()).backward()
        optimizer.step()
        torch.cuda.synchronize()
        print(time.perf_counter_ns() - began, time.process_time_ns() - worked, flush=True)


if __name__ == "__main__":
    main()
