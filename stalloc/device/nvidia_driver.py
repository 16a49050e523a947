"""The NVIDIA driver of this machine, asked directly: what it offers before any library has touched it.

Contract: imports neither torch nor CuPy, creates no context on a GPU, and has empty answers where there is no
driver. CUDA_VISIBLE_DEVICES and its kin count as they are when this process first asks, which `offers_gpu` does not.
"""

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class PhysicalGPU:
    name: str
    total_bytes: int


_ASK = """
import ctypes
driver, num = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
there = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(num)) == 0 and num.value > 0
print("yes" if there else "no")
"""
_ASK_SECONDS = 60.0
_asked_here = 0  # the process that has initialised the driver


def _driver() -> ctypes.CDLL | None:
    global _asked_here
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    _asked_here = os.getpid()
    return driver if driver.cuInit(0) == 0 else None


def offers_gpu() -> bool:
    """Whether the driver offers a GPU to a process with this environment; another process asks, if this has not."""
    if _asked_here == os.getpid():
        return bool(gpus())
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    try:
        asked = [sys.executable, "-I", "-S", "-c", _ASK]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return bool(gpus())
    return done.stdout.strip() == "yes"


def driver_version() -> str | None:
    """The newest CUDA version that the driver supports, such as "13.0"; None without a driver or a GPU."""
    driver, version = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def gpus() -> list[PhysicalGPU]:
    """The GPUs that the driver lists, in its order; empty without a driver."""
    driver, num = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(num)) != 0:
        return []
    found = []
    for index in range(num.value):
        device, total, name = ctypes.c_int(0), ctypes.c_size_t(0), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        found.append(PhysicalGPU(name.value.decode(errors="replace"), total.value))
    return found
