"""`stalloc run --budget`: the fit that is used, put in force, and what became of the budget."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalloc.device import VirtualGPU
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from stalloc.fitting.fit_record import Fit
    from stalloc.planner import Plan
    from stalloc.runtime import Runtime


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --budget, and what goes with it."""
    parser.add_argument(
        "--budget", metavar="SIZE", help="reserve no more than this from the first allocation, for example 24GiB"
    )
    parser.add_argument(
        "--fit", metavar="FILE", help="what stalloc fit kept for this program (default: SCRIPT.fit.npz)"
    )
    parser.add_argument(
        "--same", action="store_true", help="use that fit although the program's source, arguments or GPU have changed"
    )
    parser.add_argument(
        "--host",
        metavar="SIZE",
        help="pinned host memory that a budget (default: none) or a cap (default: all there is) may use",
    )
    parser.add_argument(
        "--disk", metavar="FOLDER:SIZE", help="a folder that a budget may use for what has no room in --host"
    )


@dataclass(frozen=True)
class Held:
    """A program that is held to a budget."""

    fit: "Fit"
    budget_bytes: int
    plans: "list[Plan] | None"
    disk: "tuple[Path, int] | None"

    def put_in_force(self, runtime: "Runtime") -> None:
        """Limit what is taken, and let the settings apply as models appear."""
        from stalloc.fitting.keeping import keep

        keep(runtime, self.fit, self.budget_bytes, self.disk)

    def outcome(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """What became of the budget, for the report."""
        most = max((report["run_reserved_peak_bytes"] for report in reports), default=0)
        refused = sum(report["out_of_memory_errors"] for report in reports)
        return {
            "budget_bytes": self.budget_bytes,
            "budget_kept": most <= self.budget_bytes and not refused,
            "budget_by": self.fit.candidates[self.fit.best].what,
        }


def prepare(args: argparse.Namespace, command: list[str], gpu: VirtualGPU | None) -> Held:
    """Find the fit of a program, or make one. Raises BadInputError where nothing keeps the budget."""
    for option, value in (
        ("--plan", args.plan),
        ("--save-plan", args.save_plan),
        ("--observe-steps", args.observe_steps),
    ):
        if value:
            raise BadInputError(f"{option} and --budget exclude each other: a fit has its own plan.")
    from stalloc import device
    from stalloc.fitting import keeping
    from stalloc.fitting.fit_record import load_fit
    from stalloc.fitting.keeping import plans_of
    from stalloc.integrations import program_source
    from stalloc.techniques.optimizer_paging import parse_disk

    keeping.check_single_rank()
    source = program_source.in_file(command)
    device.activate(args.device, gpu)
    file = Path(args.fit) if args.fit else keeping.fit_file(source)
    budget_bytes = memory_option("--budget", args.budget) if args.budget else load_fit(file).budget_bytes
    shown = keeping.gpu_of_this_process()
    keeping.check_possible(budget_bytes, shown)
    host_bytes = memory_option("--host", args.host) if args.host else 0
    disk = parse_disk(args.disk) if args.disk else None
    disk_bytes = disk[1] if disk else 0
    fit = keeping.find_or_make(
        source, command, budget_bytes, shown, file, host_bytes, disk_bytes, keep_files=args.keep_files, same=args.same
    )
    return Held(fit, budget_bytes, plans_of(fit, file), disk)


def print_outcome(console: "Console", result: dict[str, Any]) -> None:
    """Say whether the budget was kept, and by what."""
    from stalloc.cli.tables import print_prose  # rich, which a run that prints no table does without

    kept = "kept" if result["budget_kept"] else "not kept: see above"
    print_prose(console, f"budget {human_bytes(result['budget_bytes'])}: {kept} ({printable(result['budget_by'])})")
