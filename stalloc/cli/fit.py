"""Find the cheapest way to run a program within a memory budget, by trying ways on the virtual GPU.

  stalloc fit --gpu RTX-4090 train.py --batch 8
  stalloc fit --budget 24GiB -m package.train

The program is run as it is and with parts of its repeated blocks recomputed in backward, three steps each, on a virtual
GPU, which computes nothing. First stalloc runs up to 256 steps ahead. If later steps need other memory (an evaluation,
another length, the last batch of an epoch), every run has enough steps to see them, up to 64 (--trial-steps sets the
number), and the report says what is left out. What each way reserves on its plan is measured, and for PyTorch's own
allocator replayed; a way that fits was run with no more memory than the budget. Times are estimates, for comparing
ways. Losses and gradients are those of the unchanged program, to the last bit.

In these runs the program sees STALLOC_TRIAL=1 and an empty standard input, its output is not shown, and it is stopped
after the last step. Each run begins with the files as they are; what it writes is discarded and named at the end
(--keep-files writes for real). Experiment trackers are silenced; other network requests are made. The default budget is
the GPU's memory less 512 MiB for the CUDA context.

The best is kept in train.fit.npz for `stalloc run --budget`. JSON: `program`, `gpu`, `budget_bytes`, `step_seconds`,
`candidates`, `best` (a row, -1: none fits), `pareto` (the Pareto-optimal rows by device memory, host memory, disk and
time), `least_bytes`, `output` (null if none fits: nothing is written), `notes`,
`num_trials`, `files`, `sentence`. The exit code is 0 if something fits, 1 if nothing does.
"""

import argparse
import contextlib
import dataclasses
import importlib
import time
from pathlib import Path
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.output import add_json_argument, command_text, wants_text, write_json
from stalloc.cli.program import add_program_arguments, program_command, run_program
from stalloc.cli.program_writes import program_files
from stalloc.cli.progress import lines_told
from stalloc.device.context import ASSUMED_BYTES
from stalloc.device.known_gpus import DEFAULT_GPU, PLENTY, VirtualGPU, find_gpu, memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.notices import say
from stalloc.patient_threads import patient_threads
from stalloc.sandbox import ProgramFiles
from stalloc.techniques.optimizer_paging import parse_disk

_USUAL_RUNS = 8  #: of the program for a fit, for saying how long it will take
_WARM = ("torch._dynamo", "torch.utils.checkpoint", "stalloc.cost.call_work", "stalloc.fitting.observer",
         "stalloc.techniques.applying", "stalloc.runtime", "stalloc.planner", "stalloc.integrations.installing",
         "stalloc.lifespans.repeating_schedule", "cupy")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("--budget", metavar="SIZE", help="reserved memory to keep within, for example 24GiB")
    parser.add_argument(
        "--host", metavar="SIZE", help="pinned host memory that may be used, for example 32GiB (default: none)"
    )
    parser.add_argument(
        "--disk", metavar="FOLDER:SIZE", help="a folder that may be used for what has no room in --host (default: none)"
    )
    parser.add_argument("--policy", metavar="NAME", help="try only this technique (see stalloc policies)")
    parser.add_argument(
        "--output",
        "-o",
        "--fit",
        metavar="FILE",
        help="keep the fit here (default: SCRIPT.fit.npz), for stalloc run --fit",
    )
    parser.add_argument(
        "--trial-seconds", type=float, default=60.0, metavar="N", help="give up a run that takes longer (default: 60)"
    )
    parser.add_argument("--trial-steps", type=int, metavar="N", help="steps of each run (default: 3 or more)")
    parser.add_argument("--as-gpu", help=argparse.SUPPRESS)
    parser.add_argument("--as-known", help=argparse.SUPPRESS)
    add_json_argument(parser)
    add_program_arguments(parser, devices=("virtual",))


def run(args: argparse.Namespace) -> int:
    """Fit the program; 0 if something keeps the budget."""
    command = program_command(args)
    from stalloc.files import check_writable
    from stalloc.fitting import keeping
    from stalloc.fitting.fit_record import check_name
    from stalloc.fitting.trials import STEPS
    from stalloc.integrations import program_source

    keeping.check_single_rank()
    gpu = keeping.gpu_from_text(args.as_gpu) if args.as_gpu else find_gpu(args.gpu) if args.gpu else _real_or_default()
    if args.memory:
        gpu = dataclasses.replace(gpu, total_bytes=memory_option("--memory", args.memory))
    budget_bytes = memory_option("--budget", args.budget) if args.budget else gpu.total_bytes - ASSUMED_BYTES
    keeping.check_possible(budget_bytes, gpu)
    if args.trial_steps is not None and args.trial_steps < STEPS:
        raise BadInputError(f"--trial-steps is {args.trial_steps}: give {STEPS} or more.")
    if not args.trial_seconds > 0:
        raise BadInputError(f"--trial-seconds is {args.trial_seconds:g}: give a number above 0.")
    source = program_source.in_file(command)
    output = Path(args.output) if args.output else keeping.fit_file(source)
    check_name(output)
    check_writable(output)
    files = program_files(args, command)
    fit, num_trials = _fitted(args, command, source, gpu, budget_bytes, files)
    if fit.best >= 0:  # else what was kept before stays
        fit.save(output)
    kept = output if fit.best >= 0 else None
    result = {**_result(fit, gpu, kept, num_trials, args.policy), "files": files.all().as_json()}
    if wants_text(args) and num_trials > 1:  # else it is one that is known
        from stalloc.cli.fit_report import print_fit, print_next

        named = None if output == keeping.fit_file(source) else output
        print_fit(fit, gpu, num_trials, files.all().sentences())
        if fit.best >= 0 and not args.as_gpu:  # who named the GPU so goes on by itself
            print_next(fit, output, command, named, str(parse_disk(args.disk)[0]) if args.disk else "FOLDER")
    write_json(args, result)
    if fit.best < 0 and not args.as_gpu:
        say(result["sentence"])
    return EXIT_DONE if fit.best >= 0 else EXIT_CHECK_FAILED


def _real_or_default() -> VirtualGPU:
    """The GPU of this machine, to be pretended for trials, or the usual virtual one."""
    from stalloc.device.nvidia_driver import gpus

    for one in gpus():
        with contextlib.suppress(BadInputError):
            return dataclasses.replace(find_gpu(one.name), total_bytes=one.total_bytes)
    return DEFAULT_GPU


def _fitted(
    args: argparse.Namespace, command: list[str], source: Any, gpu: VirtualGPU, budget_bytes: int, files: ProgramFiles
) -> tuple[Any, int]:
    """The fit, and how often the program was run for it."""
    from stalloc import device
    from stalloc.fitting.candidates import Fitting
    from stalloc.fitting.keeping import known_fit, program_of
    from stalloc.fitting.proposals import Known
    from stalloc.fitting.trials import Measured, TrialWork, check_can_fork, run_trial

    with patient_threads():
        device.activate("virtual", dataclasses.replace(gpu, total_bytes=PLENTY))
        for name in ("torch", *_WARM):
            importlib.import_module(name)
    check_can_fork()
    from stalloc.cost.gpu_rates import rates_of

    def program() -> int:
        return run_program(list(command))

    def trial(work: TrialWork) -> Measured:
        return run_trial(program, dataclasses.replace(work, gpu_name=gpu.name), args.trial_seconds, files)

    of_gpu = gpu.name if args.gpu or args.as_gpu else ""
    if args.as_known and (fit := known_fit(Path(args.as_known), trial, program_of(source, of_gpu))):
        return fit, 1
    begun, tell = time.monotonic(), lines_told()

    def told(text: str) -> None:
        done, seconds = fitting.num_trials, time.monotonic() - begun
        left = max(1, _USUAL_RUNS - done) * seconds / max(1, done)
        tell(f"run {done + 1}, about {left:.0f} s left: {text}" if done else text)

    known = Known(
        budget_bytes,
        host_bytes=memory_option("--host", args.host) if args.host else 0,
        disk_bytes=parse_disk(args.disk)[1] if args.disk else 0,
        link_bytes_per_second=rates_of(gpu.name).link_bytes_per_second,
    )
    fitting = Fitting(known, trial, told, num_steps=args.trial_steps or 0)
    return _fit_of(fitting, fitting.run(args.policy), program_of(source, of_gpu), gpu, budget_bytes), fitting.num_trials


def _fit_of(fitting: Any, best: int, program: Any, gpu: VirtualGPU, budget_bytes: int) -> Any:
    """What was found, as it is kept."""
    from stalloc.cost.gpu_rates import rates_of
    from stalloc.cost.host_rates import SOURCE
    from stalloc.cost.operator_seconds import ERROR
    from stalloc.fitting.fit_record import Fit
    from stalloc.techniques.technique_settings import TechniqueSettings

    known = fitting.known
    return Fit(
        program=program,
        budget_bytes=budget_bytes,
        gpu_bytes=gpu.total_bytes,
        step_seconds=known.step.step_seconds,
        estimate=f"{ERROR}; rates: {rates_of(gpu.name).source}"
        + (f"; {SOURCE}" if any(one.host_bytes for one in known.candidates) else ""),
        candidates=tuple(known.candidates),
        best=best,
        settings=fitting.settings[best] if best >= 0 else TechniqueSettings(),
        plan=fitting.plans[best] if best >= 0 else b"",
        notes=tuple(fitting.notes),
        asked=fitting.asked,
    )


def _result(fit: Any, gpu: VirtualGPU, output: Path | None, num_trials: int, policy: str | None) -> dict[str, Any]:
    from stalloc.fitting.fit_record import undominated

    measured = [one for one in fit.candidates if one.needed_bytes]
    lowest = min((one for one in measured if not one.refused), key=lambda one: one.needed_bytes, default=None)
    if measured and lowest is None:
        why = "runs short of memory within {}, though its plans need no more: give a few percent more."
    elif lowest is None:
        why = "is not known to be kept within {}: none of its runs could be measured, for the reasons in the table."
    elif policy is not None and len(fit.candidates) == 1:
        why = (
            f"has nothing that {policy} applies to, and as it is it reserves {human_bytes(lowest.needed_bytes)}, more "
            "than {}: try another policy, or all of them without --policy."
        )
    else:
        reached = f"the least that was reached is {human_bytes(fit.least_bytes)} ({lowest.what})"
        why = f"cannot be kept within {{}}: {reached}; give that much, or a smaller batch."
    return {
        "program": dataclasses.asdict(fit.program),
        "gpu": gpu.name,
        "budget_bytes": fit.budget_bytes,
        "step_seconds": fit.step_seconds,
        "estimate": fit.estimate,
        "candidates": [{**dataclasses.asdict(one), "fits": one.fits(fit.budget_bytes)} for one in fit.candidates],
        "pareto": undominated(fit.candidates),
        "best": fit.best,
        "least_bytes": fit.least_bytes,
        "output": None if output is None else str(output),
        "notes": list(fit.notes),
        "num_trials": num_trials,
        "sentence": ""
        if fit.best >= 0
        else f"{command_text(fit.program.name)} {why.format(human_bytes(fit.budget_bytes))}",
    }
