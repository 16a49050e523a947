"""Run one of the benchmarks of the checkout and print its table.

`stalloc bench planner` compares the planner with the methods of others on every instance; `stalloc bench runtime` times
the allocator. What follows the name goes to the benchmark, such as --quick, --json FILE or --help. `stalloc bench ops
--for TRACE` times the operations of a recorded program on a real GPU. The other benchmarks are part of the source
checkout, not of an installed package.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import stalloc
from stalloc.errors import BadInputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="planner, runtime or another benchmark")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the benchmark")


def run(args: argparse.Namespace) -> int:
    """Hand over to the benchmark; its exit code is ours: 1 when a target is missed."""
    if args.name == "ops":
        from stalloc.cli.bench_ops import run as time_operations

        return time_operations(args.arguments)
    folder = Path(stalloc.__file__).resolve().parents[1] / "scripts" / "bench"
    found = {path.name: path for path in sorted(folder.glob("*")) if path.is_file() and not path.suffix}
    if not found:
        raise BadInputError("the benchmarks are not installed with the package: run this in a checkout of stalloc.")
    if args.name not in found:
        raise BadInputError(f"there is no benchmark {args.name!r}: choose from ops, {', '.join(found)}.")
    return subprocess.run([sys.executable, str(found[args.name]), *args.arguments], check=False).returncode
