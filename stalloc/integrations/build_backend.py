"""setuptools as stalloc's build backend, plus two things: the hook that makes `STALLOC=1` work, and compiled code.

Contract: a wheel, editable or not, differs from setuptools' only by files that are added, with their lines in RECORD,
so that uninstalling takes them away too. Runs where only setuptools is there: nothing of stalloc is imported.

The hook lies beside the packages. Compiled code lies in stalloc/compiled_code, in wheels that are not editable; it is
made by using the wheel (cli/precompile.py), and fits one version of Python, numba and llvmlite and one kind of
processor, which the name of the wheel says. An editable install compiles the same, for this processor, to where a
checkout keeps what it compiles. Where it cannot be made, or `--config-settings compiled-code=no` is given, the wheel
comes without, and stalloc compiles what it needs when it is used.
"""

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "stalloc.pth"
# Python reads the line once for each name of a folder (lib and lib64), and a sentence is said once.
_ARM = """try:
    from stalloc.integrations.startup import arm
    arm()
except Exception as error:
    try:
        sentence = f'stalloc: it cannot be loaded ({error!a}): install it again, or unset STALLOC.\\n'
        if sys.stderr and not hasattr(sys, '_stalloc_is_missing'):
            sys._stalloc_is_missing = True
            os.write(2, sentence.encode())
    except Exception:
        pass
"""
VARIABLES = ("STALLOC", "STALLOC_RECORD", "STALLOC_GUARD")  #: any of which is a reason to look further
LINE = (  # Python was told to ignore the environment by -I or -E
    "import os, sys; sys.flags.ignore_environment or "
    f"all(os.environ.get(name, '0') in ('', '0') for name in {VARIABLES!r}) or exec({_ARM!r})\n"
)


def __getattr__(name: str) -> Any:
    """The hooks that this file does not change (metadata, requirements, source distributions)."""
    if name.startswith(("build_", "get_requires_", "prepare_")):
        return _of_setuptools(name)
    raise AttributeError(name)


def _of_setuptools(name: str) -> Any:
    from setuptools import build_meta  # type: ignore[import-untyped]

    return getattr(build_meta, name)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _requirements("get_requires_for_build_wheel", config_settings)


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _requirements("get_requires_for_build_editable", config_settings)


def _requirements(name: str, config_settings: Mapping[str, Any] | None) -> list[str]:
    """With what stalloc itself needs, since it is used to compile, where anything is compiled."""
    needed: list[str] = [*_of_setuptools(name)(config_settings)]
    if _wants_compiled_code(config_settings):
        with open("pyproject.toml", "rb") as file:  # build backends run in the folder of the sources
            needed += tomllib.load(file)["project"]["dependencies"]
    return needed


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    wheel = _hooked("build_wheel", wheel_directory, config_settings, metadata_directory)
    return (add_compiled_code(wheel) if _wants_compiled_code(config_settings) else wheel).name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    wheel = _hooked("build_editable", wheel_directory, config_settings, metadata_directory)
    if _wants_compiled_code(config_settings) and (why := compile_ahead(Path.cwd())):
        _say(f"nothing is compiled ahead: {why}")
    return wheel.name


def _hooked(name: str, wheel_directory: str, *settings: Any) -> Path:
    """A wheel of setuptools' with the hook in it."""
    wheel = Path(wheel_directory) / _of_setuptools(name)(wheel_directory, *settings)
    add_files(wheel, {FILE_NAME: LINE.encode("ascii")})
    return wheel


def _wants_compiled_code(config_settings: Mapping[str, Any] | None) -> bool:
    return (config_settings or {}).get("compiled-code", "yes") != "no"


def add_compiled_code(wheel: Path) -> Path:
    """Compile what the verbs of the stalloc in a wheel use, and put it into the wheel; the wheel, whose name changes.

    A wheel for which that fails is left as it is, and a sentence says why.
    """
    with tempfile.TemporaryDirectory() as name:
        package, compiled = Path(name) / "package", Path(name) / "compiled"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(package)
        if why := compile_ahead(package, str(compiled)):
            _say(f"the wheel comes without compiled code: {why}")
            return wheel
        found = {f"stalloc/compiled_code/{one.name}": one.read_bytes() for one in compiled.rglob("*.compiled")}
    python, platform = sys.implementation.cache_tag.replace("cpython-", "cp"), sysconfig.get_platform()
    tag = f"{python}-{python}-{platform.replace('-', '_').replace('.', '_')}"
    add_files(wheel, found, tag)
    renamed = wheel.with_name(f"{'-'.join(wheel.stem.split('-')[:-3])}-{tag}.whl")
    return wheel.rename(renamed)


def compile_ahead(sources: Path, *folder: str) -> str:
    """Compile what the verbs of the stalloc in a folder use, to another folder if given; why not, if that fails."""
    missing = [name for name in ("numba", "numpy", "networkx", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} cannot be imported."
    path = os.pathsep.join(filter(None, (str(sources), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "stalloc.cli.precompile", *folder]
    try:
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path, "STALLOC": ""}, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    return ""


def _say(sentence: str) -> None:
    print(f"stalloc: {sentence}", file=sys.stderr)


def add_files(wheel: Path, files: Mapping[str, bytes], tag: str = "") -> None:
    """Put files into a wheel and into its RECORD (Python packaging: recording installed projects).

    `tag`, if given, takes the place of the tag that says where the wheel can be installed.
    """
    with zipfile.ZipFile(wheel) as archive:
        entries = {info: archive.read(info) for info in archive.infolist()}
    date_time = next(iter(entries)).date_time
    for info, content in entries.items():
        if tag and info.filename.endswith(".dist-info/WHEEL"):
            lines = [line for line in content.decode().splitlines() if line and not line.startswith("Tag:")]
            entries[info] = "\n".join([*lines, f"Tag: {tag}", ""]).encode()
            files = {info.filename: entries[info], **files}
    record = next(info for info in entries if info.filename.endswith(".dist-info/RECORD"))
    kept = [line for line in entries[record].decode().splitlines() if line.rsplit(",", 2)[0] not in files]
    added = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    entries[record] = "".join(f"{line}\n" for line in [*added, *kept]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            if name not in {info.filename for info in entries}:
                entry = zipfile.ZipInfo(name, date_time)
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, content)
        for info, content in entries.items():
            archive.writestr(info, content)


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
