"""How the kernels are launched on each architecture: configurations from `configs.json`, found by measuring.

Contract: a configuration changes how fast a kernel is, never what it does. An architecture that is not in the file
gets the one of the newest architecture before it; `python -m stalloc.kernels.autotune` measures a machine's own.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stalloc.files import write_whole

FILE = Path(__file__).with_name("configs.json")


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one launch is shaped."""

    tile_bytes: int = 16384  #: bytes that a program loads before it stores them; a power of two
    byte_tile: int = 2048  #: the same where only single bytes or 4-byte words are aligned; lanes, a power of two
    group_rows: int = 8  #: small rows that a program does at once; a power of two
    num_warps: int = 8  #: warps of a program
    programs_per_sm: int = 4  #: programs of the persistent grid for each multiprocessor
    source: str = "default"  #: "default", or the GPU and the date of the measurement


@cache
def known() -> dict[int, Config]:
    """The configurations of the file, by architecture (90 for sm_90)."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    return {int(capability): Config(**entry) for capability, entry in entries.items()}


def config_for(compute_capability: tuple[int, int]) -> Config:
    """The configuration for an architecture, as (major, minor)."""
    wanted = compute_capability[0] * 10 + compute_capability[1]
    older = [capability for capability in known() if capability <= wanted]
    return known()[max(older)] if older else Config()


def write(configs: dict[int, Config]) -> None:
    """Write the file anew: configurations by architecture (90 for sm_90)."""
    fields = {str(capability): vars(config) for capability, config in sorted(configs.items())}
    write_whole(FILE, json.dumps(fields, indent=2) + "\n", "tune in a copy of stalloc that you can write")
    known.cache_clear()
