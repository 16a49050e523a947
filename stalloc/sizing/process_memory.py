"""What one process of a dry run took beside its allocators, as plain values that go into the result of the run.

Contract: `process_told` is called when the program has ended, before anything is written of it.
"""

import os
import sys
from dataclasses import asdict
from typing import Any

from stalloc.device import virtual
from stalloc.device.host_use import HostUse

_CUSTOM = "its own way between GPUs (CUDA IPC)"


def process_told(use: HostUse) -> dict[str, Any]:
    """Memory of the host, communicators of NCCL, and what each device gave in all."""
    gpu = virtual.active_gpu()
    assert gpu is not None
    made = virtual.communicators()
    settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {
        "host": use.told(),
        "communicators": [
            asdict(one) | {"ranks": made.ranks.get(one.group or "")}
            for one in made.seen()
            if made.backends.get(one.group or "", "nccl") == "nccl"  # a dry run has NCCL in the place of others
        ],
        "nccl_settings": settings,
        "driver_peak_bytes": [virtual.peak_bytes(device) for device in range(gpu.num_devices)],
        "outside_nccl": _outside_nccl(),
    }


def _outside_nccl() -> list[str]:
    """The libraries beside NCCL that carry collectives of GPUs, and whose buffers NCCL's figures do not include."""
    found = set(virtual.communicators().backends.values())
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and hasattr(c10d, "ProcessGroup"):
        for config in c10d._world.pg_backend_config.values():  # "cpu:gloo,cuda:nccl"
            words = dict(word.split(":", 1) for word in str(config).split(",") if ":" in word)
            found.add(words.get("cuda", "nccl"))
    others = sorted(found - {"nccl", "undefined"})
    return [*others, *([_CUSTOM] if virtual.statistics()["shared_handles"] else [])]
