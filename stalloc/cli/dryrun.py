"""Run a program on a virtual GPU and say what it needs and whether it fits, natively and with stalloc.

  stalloc dryrun --gpu A100-80GB train.py --batch 8
  stalloc dryrun --memory 24GiB -m package.train

Nothing is computed: allocations are real, kernels do nothing, so a step of a large model takes milliseconds and no
GPU. Small integers and booleans have their values; programs that read others and act on them see zeros, and are told
where. What does not fit is run again with memory to spare, to say what it would need. JSON: `gpu`, `memory_bytes`,
`headroom_bytes`, and for `native` and `stalloc` whether it `fits`, `needed_bytes` (reserved at the peak) and
`allocated_peak_bytes`; `devices` lists both a device; `uncertain` says what the figures could not know. The exit code
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
    human_bytes,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.program import add_program_arguments, chosen_gpu, program_command
from stalloc.device import DEFAULT_GPU, VirtualGPU, parse_memory
from stalloc.errors import BadInputError, SetupError
from stalloc.printable import printable

_MOST_PLACES = 3  # of decisions, shown
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
    model = ["--gpu", args.gpu] if args.gpu else []
    results = {name: _try(name, model, offered, command) for name in ("native", "stalloc")}
    _bound(results["native"], model, offered, command)
    result = {
        "gpu": gpu.name,
        "memory_bytes": gpu.total_bytes,
        "headroom_bytes": headroom,
        **{
            name: {key: value for key, value in tried.items() if key not in ("devices", "uncertain")}
            for name, tried in results.items()
        },
        "devices": _by_device(results),
        "uncertain": results["native"]["uncertain"],
    }
    if wants_text(args):
        _print(result, gpu, command)
    write_json(args, result)
    return EXIT_DONE if results["stalloc"]["fits"] else EXIT_CHECK_FAILED


def _try(name: str, model: list[str], offered: int, command: list[str]) -> dict[str, Any]:
    """One allocator on a device with `offered` bytes; again with plenty if it runs out, to see what it needs."""
    measure = {"native": _native, "stalloc": _stalloc}[name]
    tried = measure([*model, "--memory", str(offered)], command)
    fits = tried["exit_code"] == 0
    ran_out = tried.pop("out_of_memory")
    if not fits and not ran_out:
        raise SetupError(
            f"the program failed with code {tried['exit_code']} ({name}), not for lack of memory: see its output above."
        )
    if ran_out and not fits:
        tried = measure([*model, "--memory", str(_PLENTY)], command)
        tried.pop("out_of_memory")
    return {
        "fits": fits,
        "needed_bytes": max((device["needed_bytes"] for device in tried["devices"]), default=0),
        "allocated_peak_bytes": max((device["allocated_peak_bytes"] for device in tried["devices"]), default=0),
        "devices": tried["devices"],
        "uncertain": tried.get("virtual", {}),
    }


def _native(gpu: list[str], command: list[str]) -> dict[str, Any]:
    result = compare(["--device", "virtual", *gpu], command, quiet=True)
    for device in result["devices"]:
        device["needed_bytes"] = device["reserved_peak_bytes"]
    return result


def _bound(native: dict[str, Any], model: list[str], offered: int, command: list[str]) -> None:
    """Add between what the native peaks lie, whatever cuDNN asks for where that is a guess."""
    convolutions = native["uncertain"].get("convolutions", {})
    if not convolutions.get("unknown_bytes"):
        return
    offered = offered if native["fits"] else _PLENTY
    peaks = {"allocated_peak_bytes": {native["allocated_peak_bytes"]}, "needed_bytes": {native["needed_bytes"]}}
    for which in ("least", "most"):
        tried = _native([*model, "--memory", str(offered), "--workspaces", which], command)
        for name, seen in peaks.items():
            seen.update(device[name] for device in tried["devices"])
    convolutions.update({name: [min(seen), max(seen)] for name, seen in peaks.items()})


def _stalloc(gpu: list[str], command: list[str]) -> dict[str, Any]:
    options = ["--device", "virtual", *gpu]
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


def _doubts(uncertain: dict[str, Any]) -> list[str]:
    lines = []
    convolutions, decisions = uncertain.get("convolutions", {}), uncertain.get("decisions", [])
    if convolutions.get("unknown_bytes"):
        lines.append(
            f"cuDNN's work space is a guess for {convolutions['num_unseen']} of {convolutions['num_convolutions']} "
            "convolutions: natively, reserved may be "
            f"{' to '.join(human_bytes(most) for most in convolutions['needed_bytes'])}, allocated "
            f"{' to '.join(human_bytes(most) for most in convolutions['allocated_peak_bytes'])}"
        )
    if decisions:
        shown = ", ".join(f"{printable(one['place'])} ({one['num_reads']})" for one in decisions[:_MOST_PLACES])
        more = f" and {len(decisions) - _MOST_PLACES} places more" if len(decisions) > _MOST_PLACES else ""
        num = sum(one["num_reads"] for one in decisions)
        lines.append(f"{num} decisions were taken on values that no kernel computed: {shown}{more}")
    return lines


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
    for line in _doubts(result["uncertain"]):
        console.print(line)
    torch = result["uncertain"].get("torch")
    if torch:
        console.print(f"for torch {torch} on this GPU: another release or another card can differ by some per cent")
    if result["stalloc"]["fits"]:
        console.print(f"next: stalloc run {command_text(*command)} on the real GPU")
    else:
        console.print("next: the same with a larger --gpu, or a smaller batch")
