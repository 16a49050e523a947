"""setuptools as stalloc's build backend, plus one file: the hook that makes `STALLOC=1` work, beside the packages.

Contract: a wheel, editable or not, differs from setuptools' only by that file and its line in RECORD, so that
uninstalling takes the hook away too. Runs where only setuptools is there: nothing of stalloc is imported.
"""

import base64
import hashlib
import zipfile
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
LINE = (  # Python was told to ignore the environment by -I or -E
    f"import os, sys; sys.flags.ignore_environment or os.environ.get('STALLOC', '0') in ('', '0') or exec({_ARM!r})\n"
)


def __getattr__(name: str) -> Any:
    """The hooks that this file does not change (metadata, requirements, source distributions)."""
    if name.startswith(("build_", "get_requires_", "prepare_")):
        from setuptools import build_meta  # type: ignore[import-untyped]

        return getattr(build_meta, name)
    raise AttributeError(name)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """A wheel with the hook in it; its file name."""
    from setuptools import build_meta

    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    add_hook(Path(wheel_directory) / name)
    return name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """An editable wheel with the hook in it; its file name."""
    from setuptools import build_meta

    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    add_hook(Path(wheel_directory) / name)
    return name


def add_hook(wheel: Path) -> None:
    """Put the hook into a wheel and into its RECORD (Python packaging: recording installed projects)."""
    data = LINE.encode("ascii")
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    record = next(i for i, (info, _) in enumerate(entries) if info.filename.endswith(".dist-info/RECORD"))
    info, text = entries[record]
    entries[record] = (info, f"{FILE_NAME},sha256={digest},{len(data)}\n".encode() + text)
    hook = zipfile.ZipInfo(FILE_NAME, entries[0][0].date_time)
    hook.external_attr = 0o644 << 16
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in [(hook, data), *entries]:
            archive.writestr(entry, content)
