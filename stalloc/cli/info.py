"""Show what stalloc finds here: versions, GPUs, the virtual GPU, and the allocator settings in force.

Include it in bug reports. Nothing is changed, and neither torch nor CuPy is imported.
"""

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.allocator_conf import conf_in_force
from stalloc.cli.output import add_json_argument, present, wants_text, write_json
from stalloc.cli.tables import print_items, print_table
from stalloc.device import DEFAULT_GPU, KNOWN_GPUS
from stalloc.device.cudnn import as_csv, rows_of, workspace_table
from stalloc.device.nvidia_driver import driver_version, gpus
from stalloc.device.virtual_build import built_directory, compiler
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.printable import MAX_SENTENCE, printable
from stalloc.sandbox.ways import layer_place, way
from stalloc.version import full_version

_PACKAGES = ("torch", "triton", "numba", "numpy", "networkx", "rich")
_CUPY_WHEELS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_SETTINGS = ("PYTORCH_", "CUPY_", "STALLOC_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING")
#: what a field of the table of workspaces means, in words
_WORDS = {
    "element_bytes": {"4": "32 bits", "2": "16 bits"},
    "layout": {"first": "channels first", "last": "channels last"},
    "direction": {"forward": "forward", "data": "data gradient", "filter": "weight gradient"},
    "window": {"wide": "wider than 1x1", "1": "1x1", "3": "3x3"},
    "stride": {"1": "stride 1", "more": "strided"},
    "groups": {"1": "not grouped", "more": "grouped"},
    "batch": {"1": "one image", "more": "several images"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cudnn-table",
        nargs="?",
        const="",
        metavar="TRACE",
        help="show the workspaces that the virtual GPU gives cuDNN's convolutions, and the source of each figure; of a "
        "TRACE made by stalloc record --stacks, the rows that it adds, as lines of that table",
    )
    add_json_argument(parser)


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def collect() -> dict[str, Any]:
    """All that `stalloc info` shows, as plain values; sizes in bytes."""
    built, command = built_directory(), compiler()
    cupy = next((f"{version} ({wheel})" for wheel in _CUPY_WHEELS if (version := _version(wheel))), None)
    versions = {"stalloc": full_version(), "python": platform.python_version(), "cupy": cupy}
    return {
        "versions": versions | {package: _version(package) for package in _PACKAGES},
        "platform": platform.platform(),
        "driver_cuda_version": driver_version(),
        "gpus": [{"name": gpu.name, "total_bytes": gpu.total_bytes} for gpu in gpus()],
        "virtual_gpu": {
            "compiler": " ".join(command) if command else None,
            "built": built is not None,
            "directory": str(built) if built else None,
            "default": DEFAULT_GPU.name,
            "known": list(KNOWN_GPUS),
        },
        "program_files": {"way": way().kind, "reason": way().reason, "layers_in": str(layer_place())},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        "torch_allocator": conf_in_force()[1],
    }


def _print_table(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(Text(title, "bold"))
    print_items(console, [(printable(name), printable(value, MAX_SENTENCE)) for name, value in rows])


def _print(console: Console, found: dict[str, Any]) -> None:
    versions = [(name, version or "not installed") for name, version in found["versions"].items()]
    _print_table(console, "Versions", versions)
    driver = f" (driver for CUDA {found['driver_cuda_version']})" if found["gpus"] else ""
    cards = [f"{gpu['name']}, {human_bytes(gpu['total_bytes'])}" for gpu in found["gpus"]]
    rows = [(f"GPU {number}", card) for number, card in enumerate(cards)]
    rows = rows or [("none", "no GPU with an NVIDIA driver; the virtual GPU needs none")]
    _print_table(console, f"\nGPUs{driver}", rows)
    virtual = found["virtual_gpu"]
    kept = way().sentence() + (f" in {found['program_files']['layers_in']}" if way().kind == "overlay" else "")
    rows = [
        ("compiler", virtual["compiler"] or "none: install gcc, or set CC"),
        ("library", f"ready in {virtual['directory']}" if virtual["built"] else "built on first use"),
        ("files of programs", kept),
        ("stands in for", ", ".join(virtual["known"])),
    ]
    _print_table(console, "\nVirtual GPU", rows)
    settings = list(found["settings"].items()) or [("none", "torch and CuPy use their defaults")]
    _print_table(console, "\nSettings (environment)", settings)
    if found["torch_allocator"]:
        _print_table(console, "\ntorch allocator", list(found["torch_allocator"].items()))
    console.print(f"\nNext: stalloc {'run' if found['gpus'] else 'dryrun'} PROGRAM.py")


def _print_workspaces(console: Console, rows: list[dict[str, str]]) -> None:
    listed = []
    for row in rows:
        counts = {name: row[f"{name}s"] for name in ("input", "filter", "output")}
        tensors = [name if num == "1" else f"{num} x {name}" for name, num in counts.items() if num not in ("", "0")]
        if row["tile"] and tensors:
            tensors[-1] += f" in Winograd's tiles of {row['tile']}"
        if row["channels"] and tensors:
            tensors[-1] += f" with channels padded to {row['channels']}"
        space = " + ".join([*tensors, f"{int(row['more_bytes']):,}"] if row["more_bytes"] else tensors) or "0"
        doubt = f" (± {int(row['unknown_bytes']):,})" if row["unknown_bytes"] not in ("", "0") else ""
        listed.append([_conditions(row), space + doubt, row["source"]])
    console.print(Text("cuDNN's workspaces, the first that fits", "bold"))
    print_table(console, ("convolutions", "workspace", "source"), listed, text_columns=3)


def _conditions(row: dict[str, str]) -> str:
    words = [_WORDS[name][row[name]] for name in _WORDS if row[name]]
    cudnn = _range(row["cudnn_from"], row["cudnn_below"], lambda version: str(version // (1000, 10000)[version > 9999]))
    card = _range(row["architecture_from"], row["architecture_below"], lambda number: f"{number // 10}.{number % 10}")
    parts = [row["shape"], f"cuDNN {cudnn}" if cudnn else "", f"architecture {card}" if card else "", *words]
    return ", ".join(filter(None, parts)) or "any"


def _range(first: str, below: str, shown: Callable[[int], str]) -> str:
    """A range of versions; empty for all of them."""
    if not below:
        return f"{shown(int(first))} or later" if first else ""
    if int(below) - int(first or 0) in (1, 1000):
        return shown(int(first))
    return f"{shown(int(first or 0))} to below {shown(int(below))}"


def run(args: argparse.Namespace) -> int:
    if args.cudnn_table:
        from stalloc.trace import load_traces

        name = printable(args.cudnn_table)
        notes = [one.info["convolutions"] for one in load_traces(args.cudnn_table) if "convolutions" in one.info]
        if not notes:
            how = "record a program with convolutions with stalloc record --stacks"
            raise BadInputError(f"{name} tells no workspaces: {how}.")
        told = [row for note in notes for row in rows_of(note, name)]
        if wants_text(args):
            sys.stdout.write(as_csv(told))
        write_json(args, {"cudnn_workspaces": [row.fields for row in told]})
        return 0
    if args.cudnn_table is not None:
        rows = [row.fields for row in workspace_table()]
        present(args, {"cudnn_workspaces": rows}, _print_workspaces, rows)
        return 0
    found = collect()
    present(args, found, _print, found)
    return 0
