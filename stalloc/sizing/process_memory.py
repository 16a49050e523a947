"""What one process took: by the libraries' own allocators, and in a dry run beside them, as plain values.

Contract: it is asked when the program has ended, before anything is written of it. Importing this imports no device.
"""

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stalloc.device.host_use import HostUse

_CUSTOM = "its own way between GPUs (CUDA IPC)"


def native_peaks() -> list[dict[str, int]]:
    """For each device that something was reserved on: its index, the peaks of what was allocated and reserved, what is
    CuPy's of that, and how often PyTorch gave up what it had cached and asked again. CuPy keeps no peak, and its pool
    only grows unless the program empties it: what it has now counts as reserved."""
    devices: list[dict[str, int]] = []
    torch: Any = sys.modules.get("torch")
    cupy: Any = sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(index)
            peaks = {name: stats.get(f"{name}_bytes.all.peak", 0) for name in ("allocated", "active", "reserved")}
            devices.append(
                {
                    "device": index,
                    **{f"{name}_peak_bytes": peak for name, peak in peaks.items()},
                    "end_reserved_bytes": stats.get("reserved_bytes.all.current", 0),
                    "cupy_bytes": 0,
                    "num_alloc_retries": stats.get("num_alloc_retries", 0),
                }
            )
    if cupy is not None:
        pool = cupy.get_default_memory_pool()
        for index in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(index):
                total = pool.total_bytes()
            while len(devices) <= index:
                nothing = dict.fromkeys(("allocated_peak_bytes", "reserved_peak_bytes", "end_reserved_bytes"), 0)
                devices.append({"device": len(devices), **nothing})
            devices[index]["reserved_peak_bytes"] += total
            devices[index]["end_reserved_bytes"] += total
            devices[index]["cupy_bytes"] = total
    return [entry for entry in devices if entry["reserved_peak_bytes"]]


def process_told(use: "HostUse") -> dict[str, Any]:
    """Memory of the host, communicators of NCCL, and what each device gave in all."""
    from stalloc.device import virtual

    gpu = virtual.active_gpu()
    assert gpu is not None
    made = virtual.communicators()
    carriers = set(made.backends.values())  # of collectives of GPUs; NCCL's figures do not include buffers of others
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and hasattr(c10d, "ProcessGroup"):
        for config in c10d._world.pg_backend_config.values():  # "cpu:gloo,cuda:nccl"
            words = dict(word.split(":", 1) for word in str(config).split(",") if ":" in word)
            carriers.add(words.get("cuda", "nccl"))
    others = sorted(carriers - {"nccl", "undefined"})
    return {
        "host": use.told(),
        "communicators": [
            asdict(one) | {"ranks": made.ranks.get(one.group or "")}
            for one in made.seen()
            if made.backends.get(one.group or "", "nccl") == "nccl"  # a dry run has NCCL in the place of others
        ],
        "nccl_settings": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "driver_peak_bytes": [virtual.peak_bytes(device) for device in range(gpu.num_devices)],
        "outside_nccl": [*others, *([_CUSTOM] if virtual.statistics()["shared_handles"] else [])],
    }
