"""A program under its own allocators, in a process of its own, for comparison: python -m stalloc.cli.native.

Not a verb: `stalloc run --compare-native` starts it. It writes one JSON object with what torch's
caching allocator and CuPy's pool reserved, and the host time of the steps, timed as under stalloc.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stalloc.allocator_conf import conf_in_force, conf_text, only_this
from stalloc.cli.program import add_program_arguments, chosen_gpu, program_command, run_program
from stalloc.cli.program_writes import sandboxed_run
from stalloc.errors import SetupError, StallocError
from stalloc.files import write_whole
from stalloc.integrations.installation import installation
from stalloc.notices import say
from stalloc.sandbox import SandboxedRun, leave
from stalloc.sizing.native_peaks import native_peaks

_MAX_STEPS = 256  #: steps after each of which reserved is noted
_EXPANDABLE = "expandable_segments"


def native_settings() -> list[tuple[str, str, str]]:
    """The settings of PyTorch to compare with: (key in the report, text for PYTORCH_ALLOC_CONF, what was dropped).

    The defaults and expandable segments, each with what else the user has set; only the user's own where they choose
    another backend.
    """
    found = conf_in_force()[1]
    if found.get("backend", "native") != "native":
        return [("native", conf_text(found), "")]
    is_on = found.pop(_EXPANDABLE, None)
    dropped = conf_text({_EXPANDABLE: is_on}) if is_on is not None else ""
    return [
        ("native", conf_text(found), dropped if is_on == "True" else ""),
        ("native_expandable", conf_text(found | {_EXPANDABLE: "True"}), "" if is_on == "True" else dropped),
    ]


def compare(options: list[str], command: list[str], conf: str) -> dict[str, Any]:
    """Run a program under its own allocators in a new process, with these settings of PyTorch; what it wrote.

    Raises SetupError if nothing was written.
    """
    with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
        file = Path(folder) / "result.json"
        # neither stalloc in a program that is to run natively, nor the plan of an earlier run
        changed = {"STALLOC": "", "STALLOC_CACHE": "off"} | only_this(conf)
        environment = {name: value for name, value in (os.environ | changed).items() if changed.get(name, value)}
        ending = subprocess.run(
            [sys.executable, "-m", "stalloc.cli.native", "--result", str(file), *options, *command],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=environment,
            check=False,
        )
        if not file.exists():
            raise SetupError(
                f"the program ended with code {ending.returncode} before it could report: see its output above."
            )
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return told


def _measure(step_times: list[float], steps: list[list[tuple[int, int]]]) -> dict[str, Any]:
    devices: list[dict[str, Any]] = []
    for device in native_peaks():
        of_torch_alone = not device.pop("cupy_bytes")
        after = [step[device["device"]] for step in steps] if of_torch_alone else []
        devices.append({**device, "after_steps": after})
    gaps = [b - a for a, b in itertools.pairwise(step_times)]
    return {"devices": devices, "step_ms": statistics.median(gaps[len(gaps) // 2 :]) * 1e3 if gaps else None}


def _ran_out(kind: str) -> bool:
    """Whether the device refused an allocation."""
    if kind == "virtual":
        from stalloc.device import virtual

        return virtual.statistics()["out_of_memory"] > 0
    torch = sys.modules.get("torch")
    return torch is not None and any(
        torch.cuda.memory_stats(index).get("num_ooms", 0) > 0 for index in range(torch.cuda.device_count())
    )


def main() -> int:
    """Run the program and write the result; the program's exit code."""
    parser = argparse.ArgumentParser(prog="python -m stalloc.cli.native", allow_abbrev=False)
    parser.add_argument("--result", required=True)
    parser.add_argument("--workspaces", choices=("least", "likely", "most"), default="likely")
    add_program_arguments(parser)
    args = parser.parse_args()
    try:
        command = program_command(args)
        from stalloc import device
        from stalloc.device.virtual import guess_workspaces

        kind = device.activate(args.device, chosen_gpu(args))
        if kind == "virtual":
            guess_workspaces(args.workspaces)
    except StallocError as error:
        say(str(error))
        return 2
    run = sandboxed_run(args, command, quiet=True) if kind == "virtual" else None
    if run is not None and (ended := run.fork(keep_new=False)) is not None:
        if ended.told is not None:
            write_whole(args.result, json.dumps(ended.told))
        return ended.finish()
    return leave(_measured(args, command, kind, run))


def _measured(args: argparse.Namespace, command: list[str], kind: str, run: SandboxedRun | None) -> int:
    """Run the program in this process, and write what was measured; its exit code."""
    from stalloc.device.virtual import after_torch_import, findings
    from stalloc.imports import after_import

    step_times: list[float] = []
    steps: list[list[tuple[int, int]]] = []  # after each, for each device: reserved peak so far, reserved now

    def note_step(*_: Any) -> None:
        step_times.append(time.perf_counter())
        cuda = sys.modules["torch"].cuda
        if len(steps) < _MAX_STEPS and cuda.is_initialized():
            devices = range(cuda.device_count())
            steps.append([(cuda.max_memory_reserved(index), cuda.memory_reserved(index)) for index in devices])

    def watch_torch() -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if kind == "virtual":
            after_torch_import()
        register_optimizer_step_post_hook(note_step)

    after_import("torch", watch_torch)
    installation.is_compared = True
    code = run_program(command)
    result = {"exit_code": code, "out_of_memory": code != 0 and _ran_out(kind), **_measure(step_times, steps)}
    result["uses_torch"] = "torch" in sys.modules
    if kind == "virtual":
        result["virtual"] = findings()
    if run is not None:
        run.tell(result)
    else:
        write_whole(args.result, json.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(main())
