"""GPUs by name, so that a program can be tried on one that is not there.

The memory of each is what PyTorch and the driver report as usable, to within about one per cent: it depends on the
driver, on error correction (ECC) and on the board. Give the number of your own GPU where it matters.
"""

import re
from dataclasses import dataclass

from stalloc.errors import BadInputError

_MIB = 1 << 20
_MAX_BYTES = 1 << 62  # so that sums of two sizes still fit the fields of 64 bits that they travel in
_MAX_DIGITS = 30  # of a number that is written out; Python refuses to read very long ones


@dataclass(frozen=True, kw_only=True)
class VirtualGPU:
    """The GPU that is pretended: what programs see of it, and how much of their data is really kept."""

    name: str = "Virtual GPU"
    total_bytes: int = 80 << 30
    """Memory that can be allocated, in bytes; nothing is set aside for a CUDA context."""
    compute_capability: tuple[int, int] = (9, 0)
    num_devices: int = 1
    copy_limit_bytes: int | None = 1 << 20
    """Larger writes to device memory are skipped, so that its pages stay untouched; None makes every copy."""
    num_multiprocessors: int = 132

    def __post_init__(self) -> None:
        if not 0 < self.total_bytes <= _MAX_BYTES:
            raise BadInputError(f"a GPU of {self.total_bytes:,} bytes is impossible: give a size up to 4 EiB.")
        if not 1 <= self.num_devices <= 64:
            raise BadInputError(f"{self.num_devices} devices are not possible: choose 1 to 64.")
        if self.copy_limit_bytes is not None and self.copy_limit_bytes < 0:
            raise BadInputError(
                f"a copy limit of {self.copy_limit_bytes} bytes is not possible: give 0 or more, or None."
            )


def _gpu(name: str, total_mib: int, capability: tuple[int, int], num_multiprocessors: int) -> VirtualGPU:
    return VirtualGPU(
        name=name,
        total_bytes=total_mib * _MIB,
        compute_capability=capability,
        num_multiprocessors=num_multiprocessors,
    )


KNOWN_GPUS: dict[str, VirtualGPU] = {
    "B200": _gpu("NVIDIA B200", 182_642, (10, 0), 148),
    "H200": _gpu("NVIDIA H200", 143_156, (9, 0), 132),
    "H100": _gpu("NVIDIA H100 80GB HBM3", 81_079, (9, 0), 132),
    "A100-80GB": _gpu("NVIDIA A100-SXM4-80GB", 81_251, (8, 0), 108),
    "A100-40GB": _gpu("NVIDIA A100-SXM4-40GB", 40_536, (8, 0), 108),
    "L40S": _gpu("NVIDIA L40S", 45_589, (8, 9), 142),
    "A10": _gpu("NVIDIA A10", 22_592, (8, 6), 72),
    "L4": _gpu("NVIDIA L4", 22_563, (8, 9), 58),
    "T4": _gpu("Tesla T4", 15_095, (7, 5), 40),
    "V100-32GB": _gpu("Tesla V100-SXM2-32GB", 32_510, (7, 0), 80),
    "V100-16GB": _gpu("Tesla V100-SXM2-16GB", 16_160, (7, 0), 80),
    "RTX-5090": _gpu("NVIDIA GeForce RTX 5090", 32_119, (12, 0), 170),
    "RTX-4090": _gpu("NVIDIA GeForce RTX 4090", 24_217, (8, 9), 128),
    "RTX-3090": _gpu("NVIDIA GeForce RTX 3090", 24_268, (8, 6), 82),
}
DEFAULT_GPU = KNOWN_GPUS["H200"]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def shown_name(kind: str, name: str) -> str:
    """What people read of a device: a virtual one says so."""
    return name if kind != "virtual" or name.lower().startswith("virtual") else f"virtual {name}"


def find_gpu(name: str) -> VirtualGPU:
    """The GPU called `name`, whatever its case, spaces and dashes ("rtx 4090", "a100-80gb"), or a part of one name.

    Raises BadInputError, which lists the names, also for a part of several.
    """
    wanted = _plain(name)
    for known, gpu in KNOWN_GPUS.items():
        if wanted in (_plain(known), _plain(gpu.name)):
            return gpu
    alike = [known for known in KNOWN_GPUS if len(wanted) > 1 and wanted in _plain(known)]
    if len(alike) == 1:
        return KNOWN_GPUS[alike[0]]
    if alike:
        raise BadInputError(f"{name[:40]!r} may be one of several GPUs: choose {' or '.join(alike)}.")
    raise BadInputError(f"no GPU called {name[:40]!r} is known: choose one of {', '.join(KNOWN_GPUS)}.")


_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}


def parse_memory(text: str | int, *, at_least: int = 1) -> int:
    """Bytes from "24GiB", "80GB", "512 MiB", "24g" (binary, as torch's tools mean it) or a plain number.

    Raises BadInputError for anything else and for less than `at_least` bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(match[2].lower()) if match and len(match[1]) <= _MAX_DIGITS else None
    num_bytes = -1
    if match and unit:
        num_bytes = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    if not at_least <= num_bytes <= _MAX_BYTES:
        shown = f"{str(text)[:40]!r}{'…' if len(str(text)) > 40 else ''}"
        raise BadInputError(f"{shown} is not an amount of memory: write bytes, or a number with MiB, GiB, MB or GB.")
    return num_bytes
