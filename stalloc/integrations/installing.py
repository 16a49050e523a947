"""Install stalloc in this process, limit it, take it away again, mark steps, read statistics.

Contract: the runtime is made once a process and never torn down, since libraries keep addresses into it; being
installed or not only decides whom it serves and whether it plans. Nothing here imports torch before the program does.
"""

import contextlib
import sys
from collections.abc import Collection, Iterator

from stalloc.errors import SetupError
from stalloc.imports import after_import, begin_use, is_use_awaited
from stalloc.integrations.installation import current, installation
from stalloc.notices import say
from stalloc.printable import printable
from stalloc.version import other_release, release_installed

TYPE_CHECKING = False
if TYPE_CHECKING:  # each would hold up every start of Python under STALLOC=1
    from pathlib import Path
    from typing import Literal

    from stalloc.device import VirtualGPU
    from stalloc.planner import Plan
    from stalloc.runtime import Report, Runtime, Settings

    DeviceChoice = Literal["auto", "cuda", "virtual"]

MARK_STEP = 0  # as in stalloc.trace


def install(
    *,
    plan: "str | Path | list[Plan] | None" = None,
    device: "DeviceChoice" = "auto",
    gpu: "VirtualGPU | None" = None,
    torch: bool = True,
    cupy: bool = True,
    settings: "Settings | None" = None,
    known_plans: "list[Plan] | None" = None,
) -> "Runtime":
    """Serve the allocations of torch and CuPy in this process; call it before the first of them.

    `plan`: a plan file of an earlier run (or what `read_plan_file` returned), in force from the first allocation;
    `known_plans`: plans that may not fit any more, of which those that cannot be used are left aside. `device`: "cuda",
    "virtual" or "auto" (the real GPU where there is one); `gpu` chooses the virtual one. Calling it again changes
    nothing. After `uninstall` it serves CuPy again and watches for steps again, and torch too unless the program has
    used CUDA through torch meanwhile.

    Raises SetupError (no device, no CuPy, torch has used CUDA already), BadInputError (no such plan file),
    PlanError (the plan does not fit).
    """
    if begin_use() and (runtime := current()) is not None:
        return runtime  # as whoever started the program wants it
    runtime = current()
    if runtime is not None and installation.is_on:
        return runtime
    if torch and not installation.serves_torch and "torch" in sys.modules:
        from stalloc.integrations import torch_allocator

        torch_allocator.check_untouched()
    if runtime is None:
        from stalloc import device as devices

        plans = plan if plan is None or isinstance(plan, list) else read_plan_file(plan)
        devices.activate(device, gpu)
        runtime = _start(settings, plans, known_plans or [])
    else:
        runtime.resume()
    installation.is_on = True
    if cupy:
        from stalloc.integrations import cupy_allocator

        cupy_allocator.install(runtime)
    if torch and not installation.serves_torch and not installation.awaits_torch:
        installation.awaits_torch = True
        after_import("torch", _serve_torch)
    return runtime


def _start(settings: "Settings | None", plans: "list[Plan] | None", known_plans: "list[Plan]") -> "Runtime":
    from stalloc.integrations.memory_figures import watch_runtime
    from stalloc.integrations.ranks import plan_together
    from stalloc.runtime import Settings, start

    runtime = start(settings or Settings(), plans, plan_together)
    runtime.try_plans(known_plans)
    watch_runtime(runtime)
    if installation.sleep_phases is not None:
        from stalloc.integrations.sleep_and_wake import tell_phases

        tell_phases(runtime)
    return runtime


def read_plan_file(file: "str | Path") -> "list[Plan]":
    """The plans in a file; that they are of another release of torch is said. Raises BadInputError."""
    from stalloc.planner import load_plans

    plans = load_plans(file)
    for made_with in dict.fromkeys(str(plan.provenance.get("torch", "")) for plan in plans):
        warning = other_release(f"{printable(str(file))} is of", made_with, release_installed())
        if warning:
            say(f"{warning}. Requests that it no longer fits are served from the heap.")
    return plans


def _serve_torch() -> None:
    installation.awaits_torch = False
    runtime = current()
    if runtime is None or not installation.is_on:
        return  # uninstalled before torch was imported
    from stalloc import device as devices
    from stalloc.integrations import torch_allocator, torch_conf

    if devices.active() == "virtual":
        from stalloc.device.virtual import after_torch_import

        after_torch_import()
    installation.serves_torch = torch_allocator.install(runtime, _optimizer_stepped)
    if installation.serves_torch:
        torch_conf.put_limit_in_force(runtime)
    if any(controller.status.settings.keep_recording for controller in runtime.controllers):
        from stalloc.integrations.transfer_recording import record_transfers

        record_transfers(runtime)


def uninstall() -> None:
    """Stop planning and give CuPy its pool back; what was allocated stays valid. `install` begins again.

    torch cannot change its allocator again once it has used CUDA: its requests go on being served, from the heap.
    """
    runtime = current()
    if runtime is None or not installation.is_on:
        return
    installation.is_on = False
    from stalloc.integrations import cupy_allocator

    cupy_allocator.uninstall()
    runtime.rest()


@contextlib.contextmanager
def scope(*, device: "DeviceChoice" = "auto", gpu: "VirtualGPU | None" = None) -> "Iterator[Runtime]":
    """Install stalloc for the body of a `with` statement, all its threads included; scopes may be nested.

    CuPy has its own pool back afterwards. torch takes an allocator once: if it has not used CUDA before the first
    scope, stalloc serves it from then on, on a plan inside scopes and from the heap, as a caching allocator does,
    outside; otherwise torch is left alone. Inside an `install` a scope changes nothing.

    Raises SetupError if there is no device or no CuPy.
    """
    outermost = installation.num_scopes == 0 and not installation.is_on and not is_use_awaited()
    installation.num_scopes += 1
    try:
        torch = sys.modules.get("torch")
        touched = torch is not None and torch.cuda.is_initialized() and not installation.serves_torch
        yield install(device=device, gpu=gpu, torch=not touched)
    finally:
        installation.num_scopes -= 1
        if outermost:
            uninstall()


def step(name: str = "step") -> None:
    """Mark the end of a step; steps are found without it, but never sooner than with it."""
    installation.marks_steps = True
    runtime = current()
    if runtime is not None:
        runtime.mark(MARK_STEP, name)


def _optimizer_stepped(devices: Collection[int]) -> None:
    """torch's optimizers mark steps of their devices as long as the program does not do so itself."""
    runtime = current()
    if runtime is not None and not installation.marks_steps:
        runtime.mark(MARK_STEP, "optimizer", devices)


def statistics() -> "list[Report]":
    """What the run was like so far, one report for each device that was used."""
    runtime = current()
    if runtime is None and is_use_awaited():
        return []
    if runtime is None:
        raise SetupError("stalloc is not installed in this process: call stalloc.install() first.")
    return runtime.reports()
