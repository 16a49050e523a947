"""One part of scripts/gpu_check, in a process of its own: `part.py NAME`, or `part.py program SCRIPT [ARGS…]`.

Contract: what is found is written line by line to the file that GPU_CHECK_NOTES names, before anything else is tried,
so that a part which hangs or is killed leaves all that it knows. GPU_CHECK_DEVICE says which device: "cuda" or
"virtual:2xH100".
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
IS_REAL = DEVICE == "cuda"
MODULES = ("driver_parts", "memory_parts", "training_parts")


class PartFailed(Exception):
    """What a part found wrong, in a sentence."""


def note(**facts: Any) -> None:
    file = os.environ.get("GPU_CHECK_NOTES")
    if file:
        with open(file, "a", encoding="utf-8") as notes:
            notes.write(json.dumps(facts) + "\n")
    print(json.dumps(facts), flush=True)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Something that may fail or hang: it is known that it began, and what it took."""
    note(begins=name)
    started = time.perf_counter()
    yield
    note(done=name, ms=round(1e3 * (time.perf_counter() - started), 3))


def check(condition: object, sentence: str) -> None:
    if not condition:
        raise PartFailed(sentence)


def use_device() -> None:
    """Have the virtual GPU in this process, if that is what is checked; all of its copies are made, also large ones."""
    if IS_REAL:
        return
    from stalloc import device
    from stalloc.integrations.startup import chosen_device

    _, gpu = chosen_device(DEVICE)
    device.activate("virtual", dataclasses.replace(gpu or device.DEFAULT_GPU, copy_limit_bytes=None))


def installed(**options: Any) -> Any:
    import stalloc

    return stalloc.install(device="cuda" if IS_REAL else "virtual", **options)


def check_paged(runtime: Any) -> None:
    """Fail where memory came in blocks, although nobody asked for that."""
    source = runtime.controllers[0].memory.source
    check(source.paged and not source.refusal, source.refusal or "memory comes in blocks, not by pages")


def run_program(allocator: str, *program: str, **variables: str) -> tuple[str, dict[str, Any]]:
    """Run a script under "native", "expandable" or "stalloc": what it printed, and stalloc's figures."""
    figures = Path(os.environ["GPU_CHECK_FOLDER"]) / "figures.json"
    python = [sys.executable, "-P"]
    if allocator == "stalloc":
        kind, _, gpu = DEVICE.partition(":")
        device = ["--device", kind] + (["--gpu", gpu.rpartition("x")[2]] if gpu else [])
        command = [*python, "-m", "stalloc", "run", *device, "--json", str(figures), *program]
    else:
        command = [*python, str(Path(__file__)), "program", *program]
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if allocator == "expandable" else {}
    done = subprocess.run(command, env=os.environ | conf | variables, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    check(done.returncode == 0, f"{Path(program[0]).name} under {allocator} ended with exit code {done.returncode}")
    return done.stdout, json.loads(figures.read_text()) if allocator == "stalloc" else {}


def main() -> int:
    faulthandler.enable()
    if sys.argv[1] == "program":
        use_device()
        sys.argv = sys.argv[2:]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    sys.path.insert(0, str(Path(__file__).parent))
    import part

    try:
        modules = [importlib.import_module(name) for name in MODULES]  # which import nothing large before one is run
        parts = {one.__name__: one for module in modules for one in module.PARTS}
        parts[sys.argv[1]](*sys.argv[2:])
    except part.PartFailed as error:
        note(failure=str(error))
        return 1
    except Exception as error:
        status = getattr(error, "error_code", None)  # torch's errors have no number in what they say
        if isinstance(status, int):
            note(status=status)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
