"""`stalloc run --cap`: the cap that is put in force, and what it cost."""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.techniques.cap_policies import CAP_POLICIES, DEFAULT, policy_named

if TYPE_CHECKING:
    from rich.console import Console

    from stalloc.fitting.capping import Cap
    from stalloc.runtime import Runtime


def add_cap_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --cap, and what goes with it."""
    parser.add_argument(
        "--cap",
        metavar="SIZE",
        help="hold no more than this at any time: what is saved for backward is recomputed or moved to --host when "
        'a request does not fit; "auto": only where the error would be out of memory',
    )
    parser.add_argument(
        "--cap-policy",
        metavar="NAME",
        help=f"what is evicted first under --cap: {', '.join(CAP_POLICIES)} (default: {DEFAULT})",
    )
    parser.add_argument(
        "--cap-caches",
        action="store_true",
        help="under --cap also move what models make without gradients and keep (key and value caches); only safe if "
        "nothing but operations of torch in the same thread reads it",
    )


@dataclass(frozen=True)
class Capped:
    """A cap that was asked for."""

    cap_bytes: int  #: 0: "auto"
    host_bytes: int | None  #: None: all there is
    policy: str
    caches: bool

    def put_in_force(self, runtime: "Runtime") -> "Cap":
        """Hold the program to it from here on. Raises BadInputError where the device has less."""
        from stalloc.fitting.capping import Cap

        return Cap(runtime, self.cap_bytes, self.host_bytes, self.policy, caches=self.caches)


def wanted_cap(args: argparse.Namespace) -> Capped | None:
    """The cap that the options ask for; None: none. Raises BadInputError for a bad cap, or options without one."""
    from stalloc.fitting.capping import AUTO

    if args.cap is None:
        for option, value in (("--cap-policy", args.cap_policy), ("--cap-caches", args.cap_caches)):
            if value:
                raise BadInputError(f"{option} is for --cap: add --cap SIZE.")
        return None
    for option, value in (
        ("--budget", args.budget),
        ("--fit", args.fit),
        ("--disk", args.disk),
        ("--plan", args.plan),
        ("--save-plan", args.save_plan),
    ):
        if value:
            raise BadInputError(f"{option} and --cap exclude each other: a cap decides while the program runs.")
    policy_named(args.cap_policy or DEFAULT)
    return Capped(
        0 if args.cap == AUTO else memory_option("--cap", args.cap),
        _host_bytes(args.host),
        args.cap_policy or DEFAULT,
        args.cap_caches,
    )


def _host_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    return 0 if text == "0" else memory_option("--host", text)


def cap_outcome(cap: "Cap", reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What became of the cap, for the report."""
    most = max((report["run_reserved_peak_bytes"] for report in reports), default=0)
    return {"cap": cap.told() | {"held_peak_bytes": most, "kept": not cap.cap_bytes or most <= cap.cap_bytes}}


def print_cap(console: "Console", told: dict[str, Any]) -> None:
    """Say whether the cap was kept, and what it cost."""
    from stalloc.cli.tables import print_prose  # rich, which a run that prints no table does without

    size = human_bytes(told["cap_bytes"]) if told["cap_bytes"] else "of the device"
    kept = "kept" if told["kept"] else "not kept"
    print_prose(console, f"cap {size}: {kept}, {human_bytes(told['held_peak_bytes'])} held at most")
    if not told["evictions"]:
        print_prose(console, "nothing had to be evicted")
        return
    print_prose(
        console,
        f"{plural(told['evictions'], 'eviction')}: {human_bytes(told['dropped_bytes'])} dropped, "
        f"{human_bytes(told['recomputed_bytes'])} computed again, {told['recomputed_blocks']:,} blocks run twice; "
        f"{human_bytes(told['moved_bytes'])} moved to the host ({human_bytes(told['host_bytes'])} at once); "
        f"est. {told['estimated_seconds']:.3f} s in all, one after the other",
    )
