"""Build stalloc's distributions with one Python, install each in a fresh environment, use it, and uninstall it."""

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_CSV = "id,lower,upper,size\n" + "".join(f"{row},{row},{row + 20},{512 * row + 512}\n" for row in range(300))

_IMPORT_ALL = """
import importlib, pkgutil, stalloc.cli
for module in pkgutil.iter_modules(stalloc.cli.__path__, "stalloc.cli."):
    importlib.import_module(module.name)
"""


def try_python(python: str) -> dict[str, Any]:
    """What became of the build and of the two installations; bytes and seconds, or why it failed."""
    found: dict[str, Any] = {"python": python, "passes": {}}
    with tempfile.TemporaryDirectory(prefix="stalloc-packages-") as name:
        folder = Path(name)
        try:
            found["python"] = _run(python, "-c", "import platform; print(platform.python_version())").strip()
            tools = _environment(python, folder / "tools")
            _run(tools / "pip", "install", "--quiet", "build")
            _run(tools / "python", "-m", "build", "--outdir", folder / "dist", ROOT)
            found["build"] = {path.suffix[1:]: path.stat().st_size for path in (folder / "dist").iterdir()}
        except (OSError, subprocess.CalledProcessError) as error:
            found["build"] = _why(error)
        found["passes"]["build"] = isinstance(found["build"], dict)
        for kind, pattern, options in (
            ("wheel", "*.whl", []),
            ("source", "*.tar.gz", ["--config-settings", "compiled-code=no"]),
        ):
            try:
                found[kind] = _install(python, folder / kind, next((folder / "dist").glob(pattern)), options)
            except (OSError, StopIteration, subprocess.CalledProcessError, AssertionError) as error:
                found[kind] = _why(error)
            found["passes"][kind] = isinstance(found[kind], dict)
    return found


def _install(python: str, folder: Path, distribution: Path, options: list[str]) -> dict[str, float]:
    """Install, use and uninstall a distribution; seconds of each. Raises if something of it does not work."""
    programs = _environment(python, folder)
    seconds = {}
    began = time.perf_counter()
    _run(programs / "pip", "install", "--quiet", *options, distribution)
    seconds["install"] = time.perf_counter() - began
    before = _files(folder)
    table = folder / "p.csv"
    table.write_text(_CSV)
    began = time.perf_counter()
    _run(programs / "stalloc", "plan", table)
    seconds["first plan"] = time.perf_counter() - began
    _run(programs / "stalloc", "report", table, "-o", folder / "p.html")  # has files that are no Python
    _run(programs / "stalloc", "policies")
    _run(programs / "python", "-c", _IMPORT_ALL)
    hook = _run(
        programs / "python", "-c", "import sys; print('stalloc.integrations.startup' in sys.modules)", STALLOC="1"
    )
    assert hook.strip() == "True", "STALLOC=1 does nothing."
    _run(programs / "pip", "uninstall", "--quiet", "--yes", "stalloc")
    left = {path for path in before & _files(folder) if "stalloc" in path.name and "__pycache__" not in path.parts}
    assert not left, f"uninstalling leaves {sorted(map(str, left))[:3]}."
    return seconds


def _environment(python: str, folder: Path) -> Path:
    _run(python, "-m", "venv", folder)
    return folder / "bin"


def _files(folder: Path) -> set[Path]:
    return {path for path in (folder / "lib").rglob("*") if path.is_file()}


def _run(program: str | Path, *arguments: str | Path, **variables: str) -> str:
    """What a command prints, without this process's own packages; in a folder that holds no stalloc."""
    clean = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("STALLOC")
    }
    done = subprocess.run(
        [program, *arguments], cwd="/", env=clean | variables, capture_output=True, text=True, check=True
    )
    return done.stdout


def _why(error: Exception) -> str:
    return f"{error} {getattr(error, 'stderr', '') or ''}".strip()[-1500:]
