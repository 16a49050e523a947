"""Time of a step of a 7B model on the virtual GPU under stalloc, against torch's own allocator.

Contract: both take turns step by step, and what counts is the median of the ratios of neighbouring steps.
"""

import importlib.util
import statistics
import sys
from pathlib import Path

from harm.catalogue import EXAMPLES, Program
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
