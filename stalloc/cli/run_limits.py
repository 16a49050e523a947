"""`stalloc run --budget` and `--cap`: what limits a program, put in force, and what became of it."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalloc.device import VirtualGPU
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.techniques.cap_policies import CAP_POLICIES, DEFAULT, policy_named

if TYPE_CHECKING:
    from stalloc.fitting.capping import Cap
    from stalloc.fitting.fit_record import Fit
    from stalloc.planner import Plan
    from stalloc.runtime import Runtime


def add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--budget", metavar="SIZE", help="reserve no more than this from the first allocation, for example 24GiB")
    add("--fit", metavar="FILE", help="what stalloc fit kept for this program (default: SCRIPT.fit.npz)")
    add("--same", action="store_true", help="use that fit although the program's source, arguments or GPU have changed")
    add("--host", metavar="SIZE", help="pinned host memory for a budget (default: none) or a cap (default: all)")
    add("--disk", metavar="FOLDER:SIZE", help="a folder that a budget may use for what has no room in --host")
    add(
        "--cap",
        metavar="SIZE",
        help="hold no more than this at any time: what is saved for backward is recomputed or moved to --host when "
        'a request does not fit; "auto": only where the error would be out of memory',
    )
    add("--cap-policy", metavar="NAME", help=f"what --cap evicts first: {', '.join(CAP_POLICIES)} (default: {DEFAULT})")
    add(
        "--cap-caches",
        action="store_true",
        help="under --cap also move what models make without gradients and keep (key and value caches); only safe if "
        "nothing but operations of torch in the same thread reads it",
    )


@dataclass(frozen=True)
class Budget:
    """A budget that a program is held to by a fit."""

    fit: "Fit"
    budget_bytes: int
    plans: "list[Plan] | None"
    disk: "tuple[Path, int] | None"

    def put_in_force(self, runtime: "Runtime") -> None:
        from stalloc.fitting.keeping import keep

        keep(runtime, self.fit, self.budget_bytes, self.disk)

    def outcome(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        refused = sum(report["out_of_memory_errors"] for report in reports)
        return {
            "budget_bytes": self.budget_bytes,
            "budget_kept": _most(reports) <= self.budget_bytes and not refused,
            "budget_by": self.fit.candidates[self.fit.best].what,
        }


@dataclass
class Capping:
    """A cap that was asked for."""

    cap_bytes: int  #: 0: "auto"
    host_bytes: int | None  #: None: all there is
    policy: str
    caches: bool
    plans: None = field(default=None, init=False)
    _cap: "Cap | None" = field(default=None, init=False)

    def put_in_force(self, runtime: "Runtime") -> None:
        from stalloc.fitting.capping import Cap

        self._cap = Cap(runtime, self.cap_bytes, self.host_bytes, self.policy, caches=self.caches)

    def outcome(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._cap is not None  # it was put in force
        most, cap_bytes = _most(reports), self._cap.cap_bytes
        refused = sum(report["out_of_memory_errors"] for report in reports)
        kept = not refused and (not cap_bytes or most <= cap_bytes)
        return {"cap": self._cap.told() | {"held_peak_bytes": most, "kept": kept}}


def _most(reports: list[dict[str, Any]]) -> int:
    return max((report["run_reserved_peak_bytes"] for report in reports), default=0)


def wanted_cap(args: argparse.Namespace) -> Capping | None:
    """The cap that the options ask for; None: none. Raises BadInputError for a bad cap, or options without one."""
    from stalloc.fitting.capping import AUTO

    if args.cap is None:
        _refuse(args, "is for --cap: add --cap SIZE", "cap_policy", "cap_caches")
        return None
    why = "and --cap exclude each other: a cap decides while the program runs"
    _refuse(args, why, "budget", "fit", "disk", "plan", "save_plan")
    policy_named(args.cap_policy or DEFAULT)
    host_bytes = None if args.host is None else 0 if args.host == "0" else memory_option("--host", args.host)
    cap_bytes = 0 if args.cap == AUTO else memory_option("--cap", args.cap)
    return Capping(cap_bytes, host_bytes, args.cap_policy or DEFAULT, args.cap_caches)


def wanted_budget(args: argparse.Namespace, command: list[str], gpu: VirtualGPU | None) -> Budget | None:
    """The budget that the options ask for, with the fit that keeps it, found or made; BadInputError if none does."""
    if not args.budget and not args.fit:
        return None
    why = "and --budget exclude each other: a fit has its own plan"
    _refuse(args, why, "plan", "save_plan", "observe_steps")
    from stalloc import device
    from stalloc.fitting import keeping
    from stalloc.fitting.fit_record import load_fit
    from stalloc.fitting.keeping import plans_of
    from stalloc.integrations import program_source
    from stalloc.techniques.elsewhere import parse_disk

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
    return Budget(fit, budget_bytes, plans_of(fit, file), disk)


def _refuse(args: argparse.Namespace, why: str, *names: str) -> None:
    for name in names:
        if getattr(args, name):
            raise BadInputError(f"--{name.replace('_', '-')} {why}.")
