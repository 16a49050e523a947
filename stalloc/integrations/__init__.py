"""One way in for programs: install stalloc under torch and CuPy, mark steps, read statistics.

Contract: nothing here imports torch before the program does. CuPy is imported at install, since its pool owns the
memory; torch is served from the moment it is imported.
"""

import sys
from pathlib import Path
from typing import Literal

from stalloc import device as devices
from stalloc.device import VirtualGPU
from stalloc.device.virtual import after_torch_import
from stalloc.errors import SetupError
from stalloc.integrations import cupy_allocator, torch_allocator
from stalloc.integrations.imports import after_import
from stalloc.runtime import Report, Runtime, Settings, current, start

MARK_STEP = 0

_explicit_steps = False


def install(
    *,
    plan: str | Path | None = None,
    device: Literal["auto", "cuda", "virtual"] = "auto",
    gpu: VirtualGPU | None = None,
    torch: bool = True,
    cupy: bool = True,
    settings: Settings | None = None,
) -> Runtime:
    """Serve the allocations of torch and CuPy in this process; call it before the first of them.

    `plan`: a plan file of an earlier run, in force from the first allocation. `device`: "cuda", "virtual" or
    "auto" (the real GPU where there is one); `gpu` chooses the virtual one. Calling it again changes nothing.

    Raises SetupError (no device, no CuPy, torch has used CUDA already), BadInputError (no such plan file),
    PlanError (the plan does not fit).
    """
    runtime = current()
    if runtime is not None:
        return runtime
    if torch and "torch" in sys.modules:
        torch_allocator.check_untouched()
    plans = None
    if plan is not None:
        from stalloc.planner import load_plans

        plans = load_plans(plan)
    kind = devices.activate(device, gpu)
    runtime = start(settings or Settings(), plans)
    if cupy:
        cupy_allocator.install(runtime)
    if torch:

        def serve_torch() -> None:
            if kind == "virtual":
                after_torch_import()
            torch_allocator.install(runtime, _optimizer_stepped)

        after_import("torch", serve_torch)
    return runtime


def uninstall() -> None:
    """Stop planning and give CuPy its pool back; what was allocated stays valid.

    torch cannot change its allocator again once it has used CUDA: its requests go on being served, from the heap.
    """
    runtime = current()
    if runtime is None:
        return
    cupy_allocator.uninstall()
    for controller in runtime.controllers:
        controller.drop_plan()
        controller.release_unused()


def step(name: str = "step") -> None:
    """Mark the end of a step; steps are found without it, but never sooner than with it."""
    global _explicit_steps
    runtime = current()
    if runtime is not None:
        _explicit_steps = True
        runtime.mark(MARK_STEP, name)


def _optimizer_stepped() -> None:
    """torch's optimizers mark steps as long as the program does not do so itself."""
    runtime = current()
    if runtime is not None and not _explicit_steps:
        runtime.mark(MARK_STEP, "optimizer")


def statistics() -> list[Report]:
    """What the run was like so far, one report for each device that was used."""
    runtime = current()
    if runtime is None:
        raise SetupError("stalloc is not installed in this process: call stalloc.install() first.")
    return runtime.reports()


__all__ = ["Report", "Runtime", "Settings", "install", "statistics", "step", "uninstall"]
