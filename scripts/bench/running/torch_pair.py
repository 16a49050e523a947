"""Processor time of a request and its free through torch on the virtual GPU, under stalloc and torch's own settings.

Contract: each in a process of its own, in turn; the least of all its steps counts, which nothing disturbed. Run as a
script it is one of them and prints nanoseconds: python torch_pair.py native|expandable|stalloc equal|new.
"""

import os
import random
import subprocess
import sys
import time

from harm.catalogue import ROOT

from running.host_step import can_run

_NUM_REQUESTS, _NUM_LIVE, _NUM_STEPS, _WARM_UP_STEPS = 400, 50, 300, 60
_ALLOCATORS = "native", "expandable", "stalloc"
SIZES = "equal", "new"  #: equal steps, which a plan serves, and steps whose sizes are ever new


def torch_pair(repeats: int, of_sizes: tuple[str, ...] = SIZES) -> list[tuple[str, float, float | None]]:
    """The rows, of steps of each kind."""
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
    """Print nanoseconds of a request and its free."""
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
        if number >= _WARM_UP_STEPS:
            least = min(least, took / _NUM_REQUESTS)
    print(least)


if __name__ == "__main__":
    main()
