"""Run a program on a virtual GPU and say what it needs and whether it fits, natively and with stalloc.

  stalloc dryrun --gpu A100-80GB train.py --batch 8
  stalloc dryrun --memory 24GiB -m package.train

Nothing is computed: allocations are real, kernels do nothing, so a step of a large model takes milliseconds and no
GPU. Programs that read values back and act on them see zeros. What does not fit is run again with memory to spare,
to say what it would need. JSON: `gpu`, `memory_bytes`, `headroom_bytes`, and for `native` and `stalloc` whether it
`fits`, `needed_bytes` (reserved at the peak) and `allocated_peak_bytes`; `devices` lists both a device. The exit code
is 0 if the program fits with stalloc, 1 if it does not or if it fails for another reason.
"""

import argparse
import sys
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.native import compare, run_apart
from stalloc.cli.output import (
    add_json_argument,
    command_text,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.program import add_program_arguments, chosen_gpu, program_command
from stalloc.device import DEFAULT_GPU, VirtualGPU, parse_memory
from stalloc.errors import BadInputError, SetupError
from stalloc.figures import human_bytes
from stalloc.printable import printable

_PLENTY = 1 << 44  # bytes; more than any program of today asks of one device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument(
        "--headroom",
        default="512MiB",
        metavar="SIZE",
        help="memory that the CUDA context and libraries take, kept from the program (default: 512MiB)",
    )
    add_json_argument(parser)
    add_program_arguments(parser, devices=("virtual",))


def run(args: argparse.Namespace) -> int:
    """Try the program natively and with stalloc; 0 if it fits with stalloc."""
    command = program_command(args)
    gpu = chosen_gpu(args) or DEFAULT_GPU
    headroom = parse_memory(args.headroom) if args.headroom != "0" else 0
    offered = gpu.total_bytes - headroom
    if offered <= 0:
        raise BadInputError(f"a headroom of {args.headroom} leaves nothing of {gpu.name}: give less.")
    results = {name: _try(name, offered, command) for name in ("native", "stalloc")}
    result = {
        "gpu": gpu.name,
        "memory_bytes": gpu.total_bytes,
        "headroom_bytes": headroom,
        **{name: {key: value for key, value in tried.items() if key != "devices"} for name, tried in results.items()},
        "devices": _by_device(results),
    }
    if wants_text(args):
        _print(result, gpu, command)
    write_json(args, result)
    return EXIT_DONE if results["stalloc"]["fits"] else EXIT_CHECK_FAILED


def _try(name: str, offered: int, command: list[str]) -> dict[str, Any]:
    """One allocator on a device with `offered` bytes; again with plenty if it runs out, to see what it needs."""
    measure = {"native": _native, "stalloc": _stalloc}[name]
    tried = measure(offered, command)
    fits = tried["exit_code"] == 0
    ran_out = tried.pop("out_of_memory")
    if not fits and not ran_out:
        raise SetupError(
            f"the program failed with code {tried['exit_code']} ({name}), not for lack of memory: see its output above."
        )
    if ran_out and not fits:
        tried = measure(_PLENTY, command)
        tried.pop("out_of_memory")
    return {
        "fits": fits,
        "needed_bytes": max((device["needed_bytes"] for device in tried["devices"]), default=0),
        "allocated_peak_bytes": max((device["allocated_peak_bytes"] for device in tried["devices"]), default=0),
        "devices": tried["devices"],
    }


def _native(offered: int, command: list[str]) -> dict[str, Any]:
    result = compare(["--device", "virtual", "--memory", str(offered)], command, quiet=True)
    for device in result["devices"]:
        device["needed_bytes"] = device["reserved_peak_bytes"]
    return result


def _stalloc(offered: int, command: list[str]) -> dict[str, Any]:
    options = ["--device", "virtual", "--memory", str(offered)]
    result = run_apart(["-m", "stalloc", "run", "--json"], [*options, *command], quiet=True)
    for device in result["devices"]:
        # before the plan the heap takes what it finds and gives it back when memory runs short: allocated is its need
        observed = device["observed_allocated_peak_bytes"] or 0
        device["needed_bytes"] = max(device["reserved_peak_bytes"], observed)
        device["allocated_peak_bytes"] = max(device["allocated_peak_bytes"], observed)
    result["out_of_memory"] = any(device["out_of_memory_errors"] for device in result["devices"])
    if result["exit_code"] != 0 and not result["out_of_memory"]:
        sys.stderr.write(result["output"])
    return result


def _by_device(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name, tried in results.items():
        for device in tried["devices"]:
            entry = found.setdefault(device["device"], {"device": device["device"]})
            entry[name] = {key: device[key] for key in ("needed_bytes", "allocated_peak_bytes")}
    return [found[index] for index in sorted(found)]


def _print(result: dict[str, Any], gpu: VirtualGPU, command: list[str]) -> None:
    from rich.table import Table

    offered = result["memory_bytes"] - result["headroom_bytes"]
    title = f"{printable(gpu.name)}: {human_bytes(offered)} of {human_bytes(gpu.total_bytes)} for the program"
    table = Table("", "fits", "needs (reserved)", "allocated", title=title, title_justify="left")
    for name in ("native", "stalloc"):
        tried = result[name]
        verdict = "yes" if tried["fits"] else "no"
        table.add_row(name, verdict, human_bytes(tried["needed_bytes"]), human_bytes(tried["allocated_peak_bytes"]))
    console = table_console()
    console.print(table)
    if result["stalloc"]["fits"]:
        console.print(f"next: stalloc run {command_text(*command)} on the real GPU")
    else:
        console.print("next: the same with a larger --gpu, or a smaller batch")
