"""What the libraries' own allocators held at the most in this process: torch's caching allocator and CuPy's pool."""

import sys
from typing import Any


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
