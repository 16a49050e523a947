"""A program under its own allocators, in a process of its own, for comparison: python -m stalloc.cli.native.

Not a verb: `stalloc run --compare-native` and `stalloc dryrun` start it. It writes one JSON object with what torch's
caching allocator and CuPy's pool reserved, and the host time of the steps, timed as under stalloc.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stalloc.cli.program import add_program_arguments, chosen_gpu, program_command, run_program
from stalloc.errors import SetupError, StallocError


def compare(options: list[str], command: list[str]) -> dict[str, Any]:
    """Run a program natively in a new process and return what it wrote. Raises SetupError if it wrote nothing."""
    with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
        result = Path(folder) / "native.json"
        ending = subprocess.run(
            [sys.executable, "-m", "stalloc.cli.native", "--result", str(result), *options, *command],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=False,
        )
        if not result.exists():
            raise SetupError(f"the native run ended with code {ending.returncode} before it could report: see its output above.")
        return json.loads(result.read_text(encoding="utf-8"))


def _measure(step_times: list[float]) -> dict[str, Any]:
    devices: list[dict[str, int]] = []
    torch = sys.modules.get("torch")
    cupy = sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(index)
            devices.append(
                {
                    "device": index,
                    "allocated_peak_bytes": stats.get("allocated_bytes.all.peak", 0),
                    "reserved_peak_bytes": stats.get("reserved_bytes.all.peak", 0),
                }
            )
    if cupy is not None:
        pool = cupy.get_default_memory_pool()
        for index in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(index):
                total = pool.total_bytes()
            while len(devices) <= index:
                devices.append({"device": len(devices), "allocated_peak_bytes": 0, "reserved_peak_bytes": 0})
            # CuPy keeps no peak; its pool only grows unless the program empties it
            devices[index]["reserved_peak_bytes"] += total
    gaps = [b - a for a, b in zip(step_times, step_times[1:], strict=False)]
    return {
        "devices": [entry for entry in devices if entry["reserved_peak_bytes"]],
        "step_ms": statistics.median(gaps[len(gaps) // 2 :]) * 1e3 if gaps else None,
    }


def main() -> int:
    """Run the program and write the result; the program's exit code."""
    parser = argparse.ArgumentParser(prog="python -m stalloc.cli.native", allow_abbrev=False)
    parser.add_argument("--result", required=True)
    add_program_arguments(parser)
    args = parser.parse_args()
    try:
        command = program_command(args)
        from stalloc import device
        from stalloc.device.virtual import after_torch_import
        from stalloc.integrations.imports import after_import

        kind = device.activate(args.device, chosen_gpu(args))
    except StallocError as error:
        print(f"stalloc: {error}", file=sys.stderr)
        return 2
    step_times: list[float] = []

    def watch_torch() -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if kind == "virtual":
            after_torch_import()
        register_optimizer_step_post_hook(lambda *_: step_times.append(time.perf_counter()))

    after_import("torch", watch_torch)
    code = run_program(command)
    result = {"exit_code": code, **_measure(step_times)}
    Path(args.result).write_text(json.dumps(result), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
