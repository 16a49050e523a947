"""Makes `.venv` in the checkout fit to run stalloc here, reuses it while it fits, and says how to use it.

Run by the scripts with the interpreter to build on; needs nothing but the standard library. Three kinds:

- "given": the interpreter that runs this has torch, CuPy and the rest already, as on a GPU machine that is set up (and
  perhaps has no network): it is used as it is, with `.venv-source` to show it the checkout; nothing is downloaded.
- "cuda": there is an NVIDIA driver: torch and CuPy are installed in full.
- "virtual": there is no driver: a CUDA build of torch is installed without its NVIDIA libraries, for the virtual GPU.

A `.venv` that this file did not make is never touched.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
SOURCE = ROOT / ".venv-source"
MARKER = VENV / "stalloc-environment.json"

TORCH, CUPY = "torch==2.11.0", "cupy-cuda13x==14.2.0"
OLDEST_DRIVER = 13000  # what both of the above are built for, as cuDriverGetVersion counts
NVIDIA_NEEDS = re.compile(r"nvidia|cuda")  # of torch, which the virtual GPU takes the place of
MODULES = ("numpy", "networkx", "numba", "rich", "torch", "cupy", "pytest", "xdist", "hypothesis")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def give_up(text: str) -> NoReturn:
    """Say why in one sentence and end with exit code 2."""
    say(text)
    raise SystemExit(2)


def driver_version() -> int | None:
    """What CUDA the NVIDIA driver supports (13000 for 13.0), None without a driver or a GPU that answers."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, version = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return None
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def choose_kind() -> str:
    driver = driver_version()
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if not missing and (driver or "STALLOC_PYTHON" in os.environ):
        return "given"
    if driver is None:
        return "virtual"
    if driver < OLDEST_DRIVER:
        give_up(
            f"The NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, older than {TORCH} needs: name "
            "in STALLOC_PYTHON a Python that has a torch and a CuPy for it, and " + ", ".join(missing) + "."
        )
    return "cuda"


def fingerprint(kind: str) -> dict[str, str]:
    """What `.venv` depends on: equal fingerprints mean that it still fits."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes())
    return {"python": sys.version, "from": sys.base_prefix, "kind": kind, "at": str(ROOT), "hash": digest.hexdigest()}


def ensure(kind: str) -> dict[str, str]:
    """Make `.venv`, or bring it up to date, or find that it fits; return the variables to run stalloc with."""
    if kind == "given":
        return show_checkout()
    if Path(sys.prefix) == VENV:
        give_up(".venv is active: call `deactivate`, then run this again.")
    wanted = fingerprint(kind)
    found = json.loads(MARKER.read_text()) if MARKER.exists() else None
    if found is None and VENV.exists():
        give_up(f"{VENV} was not made by this script: move it away, then run this again.")
    if found != wanted | {"complete": "yes"}:
        moved = found and any(found[key] != wanted[key] for key in ("python", "from", "kind", "at"))
        if found and (moved or not (VENV / "bin" / "pip").exists()):
            shutil.rmtree(VENV)
        started = time.monotonic()
        say(f"Making .venv with Python {platform.python_version()}; this is done once.")
        if not VENV.exists():
            create_venv(wanted)
        install(kind)
        MARKER.write_text(json.dumps(wanted | {"complete": "yes"}))
        say(f"Made .venv in {time.monotonic() - started:.0f} s.")
    return {"PYTHON": str(VENV / "bin" / "python")}


def show_checkout() -> dict[str, str]:
    """Give this interpreter the checkout as it would be installed, `kernels/` as `stalloc.kernels` included."""
    entries = [*(ROOT / "stalloc").iterdir(), ROOT / "kernels"]
    wanted = {entry.name: entry for entry in entries if entry.name != "__pycache__"}  # Python makes one of its own
    package = SOURCE / "stalloc"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        if link.is_symlink() and link.readlink() != wanted.get(link.name):
            link.unlink()
    for name, entry in wanted.items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(entry)
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHON": sys.executable, "PYTHONPATH": f"{SOURCE}{os.pathsep}{before}" if before else str(SOURCE)}


def create_venv(wanted: dict[str, str]) -> None:
    """Create `.venv` with pip, marked as ours from the beginning so that a broken-off run can be resumed."""
    VENV.mkdir()
    MARKER.write_text(json.dumps(wanted))
    try:
        venv.create(VENV, with_pip=True, symlinks=True)
    except (subprocess.CalledProcessError, ImportError):
        shutil.rmtree(VENV)
        give_up(
            f"{sys.executable} cannot make an environment with pip: install its venv package (python3-venv on Debian "
            "and Ubuntu), or name another Python in STALLOC_PYTHON."
        )


def install(kind: str) -> None:
    """Install stalloc from the checkout with torch, CuPy and the tools of the tests."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    if kind == "cuda":
        pip("--editable", f"{ROOT}[torch,cuda13]", TORCH, CUPY, *groups["dev"])
        return
    say(f"  {TORCH}, a CUDA build, without its NVIDIA libraries (a large download)")
    pip("--no-deps", TORCH)
    code = "import importlib.metadata as m, json; print(json.dumps(m.requires('torch')))"
    needs = json.loads(subprocess.check_output([VENV / "bin" / "python", "-c", code], text=True))
    needs = [need for need in needs if not NVIDIA_NEEDS.match(need) and "extra ==" not in need]
    say(f"  stalloc from this checkout, {CUPY}, and the tools of the tests")
    pip("--editable", str(ROOT), CUPY, *groups["dev"], *needs)


def pip(*arguments: str) -> None:
    """Run pip in `.venv`; its output is kept in a file and shown only when it fails."""
    log = VENV / "pip.log"
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    with log.open("a", encoding="utf-8") as file:
        status = subprocess.run([*command, *arguments], stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if status != 0:
        say("".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-15:]))
        give_up(f"pip could not install what stalloc needs; its whole output is in {log}.")


def environment() -> dict[str, str]:
    """The variables to run stalloc with on this machine; makes what they need first."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two scripts started at once make one environment
        return ensure(choose_kind())
    finally:
        os.close(folder)


if __name__ == "__main__":
    for name, value in environment().items():
        print(f"export {name}={shlex.quote(value)}")
