"""A budget in force in this process: a fit is found or made, its settings applied, its plan loaded, its limit set.

Contract: from the first allocation on no more than the budget is taken from the device: a request that does not fit is
an out-of-memory error, never a broken promise. In a trial nothing is done, since the trial itself says what is tried.
A fit of another source, other arguments or another GPU is used only where the program asks for the same memory, or the
user says so; a plan only after the validator has judged it.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import VirtualGPU, parse_memory
from stalloc.errors import BadInputError, SetupError
from stalloc.figures import human_bytes
from stalloc.files import check_writable
from stalloc.fitting.fit_record import SUFFIX, Fit, Program, check_name, load_fit
from stalloc.fitting.trials import COMPARED_STEPS, TRIAL_VARIABLE, Measured, TrialWork
from stalloc.integrations import program_source
from stalloc.notices import say
from stalloc.techniques.optimizer_paging import parse_disk
from stalloc.version import full_version

if TYPE_CHECKING:
    from stalloc.planner import Plan
    from stalloc.runtime import Runtime


def fit_file(source: program_source.ProgramSource) -> Path:
    """Where a fit of this program is kept unless another place is named: in the current folder."""
    return Path(f"{source.name[:80]}{SUFFIX}")


def check_single_rank() -> None:
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise BadInputError(
            "a budget is kept for programs of one rank so far, and WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE'][:20]}: use stalloc.checkpoint(model) in the program itself."
        )


def check_possible(budget_bytes: int, gpu: VirtualGPU) -> None:
    """Raise BadInputError for a budget that is more than the GPU has, or nothing."""
    if not 0 < budget_bytes <= gpu.total_bytes:
        raise BadInputError(
            f"a budget of {human_bytes(budget_bytes)} is not possible on {gpu.name}, which has "
            f"{human_bytes(gpu.total_bytes)}: give less."
        )


def find_or_make(
    source: program_source.ProgramSource,
    command: list[str],
    budget_bytes: int,
    gpu: VirtualGPU,
    file: Path,
    host_bytes: int = 0,
    disk_bytes: int = 0,
    *,
    keep_files: bool = False,
    same: bool = False,
) -> Fit:
    """The fit in `file` if it is of this program and keeps the budget, else a new one, kept there.

    Where the source, the arguments or the GPU are others, the fit is used if the program's first steps ask for the
    same memory, which a run of them shows; with `same` it is used without one. `host_bytes` and `disk_bytes` are how
    much host memory, and room on a disk, it may use; `keep_files`: what the program writes while it is tried is
    written for real.

    Raises BadInputError with the least that can be reached where nothing keeps the budget, and for a name that no fit
    has.
    """
    check_name(file)
    output: Path | None = file
    reason, known = "", False
    try:
        fit = load_fit(file)
        program = program_of(source, gpu.name)
        difference = program.difference(fit.program)
        may_ask_alike = all(getattr(program, it) == getattr(fit.program, it) for it in ("name", "torch", "stalloc"))
        known = bool(difference and not same and fit.asked and may_ask_alike)
        reason = "" if same or known else difference
        if program.name != fit.program.name:
            output = None  # somebody else's
        if not reason and (fit.best < 0 or budget_bytes < fit.budget_bytes):  # it was tried within no less
            reason = f"it is for a budget of {human_bytes(fit.budget_bytes)}"
        for option, what, may in (("host", "of host memory", host_bytes), ("disk", "on disk", disk_bytes)):
            used = 0 if reason else getattr(fit.candidates[fit.best], f"{option}_bytes")
            if used > may:
                reason = f"it takes {human_bytes(used)} {what}, for which --{option} has to be given"
        if not reason:
            plans_of(fit, file)
            if same and difference:
                say(f"{file} is used with --same, though {difference}.")
            if not known:
                return fit
    except BadInputError as error:
        if file.exists():
            reason = str(error)
    if reason:
        stays = "" if output else ", and the file stays as it is"
        say(f"{file} is not used: {reason.rstrip('.')}. The program is fitted anew{stays}.")
    options = {
        "--budget": f"{budget_bytes}B",
        "--as-gpu": gpu_text(gpu),
        "--host": f"{host_bytes}B" if host_bytes else None,
        "--disk": f".:{disk_bytes}B" if disk_bytes else None,
        "--as-known": file if known and not reason else None,  # to be used if the program asks for the same memory
    }
    return _made(command, output, options, keep_files=keep_files)


def program_of(source: program_source.ProgramSource, gpu: str) -> Program:
    torch = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = importlib.metadata.version("torch")  # as installed, whether it is imported or not
    return Program(
        name=source.path.name if source.path.stem != "__main__" else source.name,
        content=sha256(source.content).hexdigest(),
        arguments=tuple(source.arguments),
        torch=torch,
        stalloc=full_version(),
        gpu=gpu,
    )


def known_fit(file: Path, trial: Callable[[TrialWork], Measured], program: Program) -> Fit | None:
    """The fit in a file, made this program's own, if the program's first steps ask for the same memory; says so."""
    fit = load_fit(file)
    asked = trial(TrialWork("recorded", num_steps=COMPARED_STEPS)).asked
    difference = program.difference(fit.program)
    if asked == fit.asked:
        say(f"{file} is used: {difference}, but the first steps of this one ask for the same memory.")
        gpu = program.gpu if fit.program.gpu else ""
        return dataclasses.replace(fit, program=dataclasses.replace(program, gpu=gpu))
    say(f"{file} is not used: {difference}, and the first steps of this one ask for other memory. It is fitted anew.")
    return None


def plans_of(fit: Fit, file: str | Path) -> "list[Plan] | None":
    """The plan of a fit that came from `file`, judged by the validator; None if its steps do not repeat. Raises
    BadInputError if it is no plan that can be used."""
    from stalloc.planner import plans_from_bytes, validate

    if not fit.plan:
        return None
    try:
        plans = plans_from_bytes(fit.plan, file)
        verdicts = [validate(plan, handovers=len(plan.handover_later) > 0) for plan in plans]
    except BadInputError as error:
        raise BadInputError(f"{file}: its plan is damaged: fit the program anew.") from error
    refused = [verdict for verdict in verdicts if not verdict.ok]
    if refused:
        raise BadInputError(f"{file}: its plan is not valid ({refused[0].reason}): fit the program anew.")
    return plans


def _made(command: Sequence[str], output: Path | None, options: Mapping[str, Any], *, keep_files: bool = False) -> Fit:
    """Fit a program in a process of its own, with options of `stalloc fit`; those that are None are left out. Raises
    BadInputError if nothing fits, SetupError if it cannot be tried."""
    with tempfile.TemporaryDirectory(prefix="stalloc-fit-") as folder:
        result, file = Path(folder) / "result.json", Path(folder) / f"made{SUFFIX}"
        if output is not None:
            try:
                check_writable(output)
                file = output
            except BadInputError as error:
                say(f"the fit is not kept: {error}")
        words = ["--json", str(result), "--output", str(file), *(["--keep-files"] if keep_files else [])]
        words += [str(word) for pair in options.items() if pair[1] is not None for word in pair]
        line = [sys.executable, "-m", "stalloc", "fit", *words, *command]
        environment = {name: value for name, value in os.environ.items() if name not in ("STALLOC", TRIAL_VARIABLE)}
        done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, check=False)
        if not result.exists():
            raise SetupError(f"the program could not be fitted (exit code {done.returncode}): see above.")
        told = json.loads(result.read_text(encoding="utf-8"))
        if told["best"] < 0:
            raise BadInputError(told["sentence"])
        return load_fit(file)


def gpu_text(gpu: VirtualGPU) -> str:
    return json.dumps([gpu.name, gpu.total_bytes, list(gpu.compute_capability), gpu.num_multiprocessors])


def gpu_from_text(text: str) -> VirtualGPU:
    try:
        name, total_bytes, capability, num = json.loads(text)
        return VirtualGPU(
            name=str(name), total_bytes=int(total_bytes), compute_capability=(int(capability[0]), int(capability[1])),
            num_multiprocessors=int(num),
        )  # fmt: skip
    except (ValueError, TypeError, IndexError) as error:
        raise BadInputError("--as-gpu is for stalloc itself: name a GPU with --gpu.") from error


def gpu_of_this_process() -> VirtualGPU:
    """The first GPU that is active, real or virtual, as one to be pretended."""
    from stalloc import device
    from stalloc.device import virtual

    pretended = virtual.active_gpu()
    if pretended is not None:
        return pretended
    first: Any = device.devices()[0]
    return VirtualGPU(name=first.name, total_bytes=first.total_bytes, compute_capability=first.compute_capability)


def keep(runtime: "Runtime", fit: Fit, budget_bytes: int, disk: tuple[Path, int] | None = None) -> None:
    """Hold this process to a budget, with the settings of a fit; its plan is in force by now. `disk` is a folder, and
    how many bytes may be used there."""
    from stalloc.imports import after_import

    for controller in runtime.controllers:
        controller.hold_to_budget(budget_bytes)

    def apply() -> None:
        from stalloc.techniques.applying import apply_settings

        folder, disk_bytes = disk or (None, 0)
        tiers = dataclasses.replace(fit.settings.tiers, disk_bytes=disk_bytes)
        apply_settings(dataclasses.replace(fit.settings, tiers=tiers), say, folder=folder)

    after_import("torch", apply)


def budget(
    size: str | int,
    *,
    host: str | int = 0,
    disk: str | None = None,
    fit: str | Path | None = None,
    same: bool = False,
    device: Any = "auto",
    gpu: VirtualGPU | None = None,
) -> Fit | None:
    """Hold the program that this process runs to a budget of reserved memory; to be called before CUDA is used.

    Its fit is looked for in the file `fit`, by default SCRIPT.fit.npz in the current folder, or made, which takes some
    seconds, and kept there; with `same` it is used though source, arguments or GPU are others.
    `host`: pinned host memory that may be used. `disk`: "FOLDER:SIZE", for what has no room there. `device` and `gpu`
    as in `install`. What is used comes back; None in a trial of stalloc's own.

    Raises BadInputError for a budget that cannot be kept, with the least that can; SetupError where CUDA was used.
    """
    budget_bytes, host_bytes = parse_memory(size), parse_memory(host, at_least=0)
    place = None if disk is None else parse_disk(disk)
    if os.environ.get(TRIAL_VARIABLE):
        return None
    check_single_rank()
    source = program_source.of_this_process()
    if source is None:
        raise BadInputError("a budget needs a program in a file: put it into a script and run that.")
    from stalloc import device as devices
    from stalloc import integrations
    from stalloc.integrations.torch_allocator import check_untouched

    devices.activate(device, gpu)
    if "torch" in sys.modules:
        check_untouched()
    file = fit_file(source) if fit is None else Path(fit)
    command, shown = [str(source.path), *source.arguments], gpu_of_this_process()
    used = find_or_make(source, command, budget_bytes, shown, file, host_bytes, place[1] if place else 0, same=same)
    runtime = integrations.install(device=device, gpu=gpu, known_plans=plans_of(used, file))
    keep(runtime, used, budget_bytes, place)
    return used


def fit(
    command: Sequence[str],
    *,
    budget: str | int | None = None,
    gpu: str | VirtualGPU | None = None,
    output: str | Path | None = None,
    policy: str | None = None,
    host: str | int = 0,
    disk: str | None = None,
    keep_files: bool = False,
) -> Fit:
    """Try ways to run a program, given as Python would be ([SCRIPT, ARGS…]), within a budget, on the virtual GPU.

    `budget`: bytes or text such as "24GiB", by default the memory of `gpu` less what a CUDA context takes. `output`: a
    file for the fit. `host`: pinned host memory that may be used. `disk`: "FOLDER:SIZE", for what has no room there.
    What the program writes while it is tried is discarded, unless `keep_files`.
    Raises BadInputError if nothing keeps the budget, SetupError if the program cannot be tried.
    """
    from stalloc.device import find_gpu

    shown = find_gpu(gpu) if isinstance(gpu, str) else gpu
    host_bytes, disk_bytes = parse_memory(host, at_least=0), 0 if disk is None else parse_disk(disk)[1]
    options = {
        "--budget": None if budget is None else f"{parse_memory(budget)}B",
        "--as-gpu": None if shown is None else gpu_text(shown),
        "--policy": policy,
        "--host": f"{host_bytes}B" if host_bytes else None,
        "--disk": f".:{disk_bytes}B" if disk_bytes else None,
    }
    return _made(command, None if output is None else Path(output), options, keep_files=keep_files)
