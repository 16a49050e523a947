"""Steps and requests through torch on the virtual GPU, under stalloc and torch's own settings.

Contract: of a step of a 7B model both take turns step by step, and what counts is the median of the ratios of
neighbouring steps; of requests each is in a process of its own, in turn, and the least of all its steps counts, which
nothing disturbed. Run as a script it is one of those and prints nanoseconds: python torch_steps.py
native|expandable|stalloc equal|new.
"""

import importlib.util
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harm.catalogue import EXAMPLES, ROOT, Program
from harm.turns import take_turns

_WARM_UP_STEPS = 10  # by then the plan is in force
_DEVICE_BYTES = 141 << 30


def host_step(num_pairs: int) -> list[tuple[str, float, float | None]]:
    """The rows; none, with the reason printed, where torch with CUDA or CuPy is missing."""
    if not can_run("host_step"):
        return []
    steps = str(1 + _WARM_UP_STEPS + num_pairs)  # the first is nobody's turn
    program = Program("train_gpt_7b", EXAMPLES / "train_gpt.py", ("--size", "7b", "--steps", steps))
    pairs = take_turns(program, _DEVICE_BYTES)[_WARM_UP_STEPS:]
    clock = [ours.clock_ns / native.clock_ns for native, ours in pairs]
    low, middle, high = statistics.quantiles(clock, n=4)
    processor = statistics.median(ours.processor_ns / native.processor_ns for native, ours in pairs)
    return [
        ("host_step_7b_against_native", middle, 1.0),
        ("host_step_7b_against_native_lower_quartile", low, None),
        ("host_step_7b_against_native_upper_quartile", high, None),
        ("host_step_7b_processor_time_against_native", processor, None),
        ("host_step_7b_ms", statistics.median(ours.clock_ns for _, ours in pairs) / 1e6, None),
        ("host_step_7b_native_ms", statistics.median(native.clock_ns for native, _ in pairs) / 1e6, None),
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


_NUM_REQUESTS, _NUM_LIVE, _NUM_STEPS, _SETTLING_STEPS = 400, 50, 300, 60
_ALLOCATORS = "native", "expandable", "stalloc"
SIZES = "equal", "new"  #: equal steps, which a plan serves, and steps whose sizes are ever new


def torch_pair(repeats: int, of_sizes: tuple[str, ...] = SIZES) -> list[tuple[str, float, float | None]]:
    if not can_run("torch_pair"):
        return []
    rows: list[tuple[str, float, float | None]] = []
    for sizes in of_sizes:
        least = {one: min(_nanoseconds(one, sizes) for _ in range(repeats)) for one in _ALLOCATORS}
        rows += [(f"torch_pair_{sizes}_sizes_{one}_ns", value, None) for one, value in least.items()]
        better = min(least["native"], least["expandable"])
        rows.append((f"torch_pair_{sizes}_sizes_against_the_better", least["stalloc"] / better, 1.05))
    return rows


def _nanoseconds(allocator: str, sizes: str) -> float:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "bench")])}
    if allocator == "expandable":
        variables |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, __file__, allocator, sizes]
    return float(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    allocator, sizes = sys.argv[1:]
    from stalloc.device import activate, find_gpu

    if allocator == "stalloc":
        import stalloc

        stalloc.install(device="virtual", gpu=find_gpu("H200"))
    else:
        activate("virtual", find_gpu("H200"))
    import torch

    weight = torch.nn.Parameter(torch.zeros(1024, device="cuda"))
    optimizer, rng, least = torch.optim.SGD([weight]), random.Random(5), float("inf")
    weight.grad = torch.zeros_like(weight)
    steps = [[rng.randrange(4096, 2 << 20) for _ in range(_NUM_REQUESTS)] for _ in range(_NUM_STEPS)]
    for number in range(_NUM_STEPS):
        live, chosen = [], steps[number if sizes == "new" else 0]
        began = time.process_time_ns()
        for size in chosen:
            live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            if len(live) > _NUM_LIVE:
                del live[0]
        live.clear()
        took = time.process_time_ns() - began
        optimizer.step()  # marks the step
        if number >= _SETTLING_STEPS:
            least = min(least, took / _NUM_REQUESTS)
    print(least)


if __name__ == "__main__":
    main()
