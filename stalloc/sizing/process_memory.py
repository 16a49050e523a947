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
    ranks_of = _ranks_of_groups()
    settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {
        "host": use.told(),
        "communicators": [
            asdict(one) | {"ranks": ranks_of.get(one.group or "")} for one in virtual.communicators().seen()
        ],
        "nccl_settings": settings,
        "driver_peak_bytes": [virtual.peak_bytes(device) for device in range(gpu.num_devices)],
        "outside_nccl": _outside_nccl(),
    }


def _ranks_of_groups() -> dict[str, list[int]]:
    """The ranks of each process group that PyTorch has, in their order there."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not hasattr(c10d, "ProcessGroup"):
        return {}
    groups = c10d._world.pg_group_ranks
    return {
        name: sorted(ranks, key=ranks.__getitem__)
        for group, name in c10d._world.pg_names.items()
        if (ranks := groups.get(group))
    }


def _outside_nccl() -> list[str]:
    """What carries collectives beside NCCL, whose buffers are in no figure of NCCL's."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    found: list[str] = []
    if c10d is not None and hasattr(c10d, "ProcessGroup"):
        for group, (backend, _) in c10d._world.pg_map.items():
            text = str(c10d._world.pg_backend_config.get(group, backend))
            found += [word.partition(":")[2] or word for word in text.split(",")]
    others = sorted({name for name in found if name not in ("nccl", "undefined")})
    return [*others, *([_CUSTOM] if virtual.statistics()["shared_handles"] else [])]
