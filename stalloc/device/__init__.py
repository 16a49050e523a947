"""The one seam between real CUDA, the virtual GPU and host memory.

Contract: `activate()` decides once per process which devices it has, before torch and CuPy are imported; all other
code asks `devices()` and `active()` and never tests for a GPU itself. Importing this package imports neither.
"""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stalloc.device.current_device import AtDevice
from stalloc.device.known_gpus import DEFAULT_GPU, KNOWN_GPUS, VirtualGPU, find_gpu, parse_memory
from stalloc.device.mapped_pages import PageEntries, Pages
from stalloc.device.nvidia_driver import offers_gpu
from stalloc.errors import SetupError

__all__ = [
    "DEFAULT_GPU",
    "KNOWN_GPUS",
    "Device",
    "VirtualGPU",
    "activate",
    "active",
    "check_cupy",
    "detect",
    "devices",
    "find_gpu",
    "parse_memory",
]

Kind = Literal["cuda", "virtual"]
_active: Kind | None = None


class Device(Protocol):
    """One GPU, real or virtual, as the runtime uses it."""

    @property
    def kind(self) -> Kind: ...
    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def compute_capability(self) -> tuple[int, int]: ...

    def new_pool(self) -> Any:
        """A fresh `cupy.cuda.MemoryPool`; use it under `with cupy.cuda.Device(index)`."""

    def new_pages(self, entries: PageEntries) -> Pages | str:
        """A fresh pool of pages, `entries` as in `Pages`; used under `with cupy.cuda.Device(index)`. Else why not."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device, as the driver reports them."""


@dataclass(frozen=True)
class CupyDevice:
    """A device behind CuPy: the same code for a real and a virtual GPU, which CuPy cannot tell apart."""

    kind: Kind
    index: int
    name: str
    total_bytes: int
    compute_capability: tuple[int, int]

    def new_pool(self) -> Any:
        import cupy

        return cupy.cuda.MemoryPool()

    def new_pages(self, entries: PageEntries) -> Pages | str:
        try:
            return Pages(self.index, entries)
        except MemoryError as error:
            return str(error)

    def memory_info(self) -> tuple[int, int]:
        import cupy

        with AtDevice(self.index):
            free_bytes, total_bytes = cupy.cuda.runtime.memGetInfo()
        return int(free_bytes), int(total_bytes)


def detect() -> Kind:
    """The kind that "auto" means: "cuda" if an NVIDIA driver offers a GPU, else "virtual"; once active, what is."""
    if _active is not None:
        return _active
    return "cuda" if offers_gpu() else "virtual"


def activate(kind: Literal["auto", "cuda", "virtual"] = "auto", gpu: VirtualGPU | None = None) -> Kind:
    """Decide which devices this process has and return the kind; deciding the same again does nothing.

    `gpu` describes the virtual GPU (an H200 by default) and is ignored for real ones. Raises SetupError if there is
    no GPU for "cuda", if the kind is decided already, or if the virtual GPU cannot be set up.
    """
    global _active
    wanted: Kind = detect() if kind == "auto" else kind
    if _active is not None and _active != wanted:
        raise SetupError(f"this process uses {_active} devices already: choose {wanted} in a new process.")
    if wanted == "virtual":
        from stalloc.device import virtual

        virtual.activate(gpu or virtual.active_gpu() or DEFAULT_GPU)
    elif _active is None and not offers_gpu():
        raise SetupError("no GPU with an NVIDIA driver was found: choose the virtual GPU (--device virtual).")
    _active = wanted
    return wanted


def active() -> Kind | None:
    return _active


def devices() -> list[Device]:
    """The devices of this process, by index. SetupError before `activate`, without CuPy, and if CUDA says no."""
    if _active is None:
        raise SetupError("no device is chosen yet: call stalloc.device.activate() first.")
    check_cupy()
    _give_cupy_a_cache()
    import cupy

    runtime = cupy.cuda.runtime
    found: list[Device] = []
    try:
        num_devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise SetupError(
            f"CUDA names no devices to CuPy ({error}): see whether nvidia-smi answers, and whether its CUDA version is "
            "not below that of this CuPy."
        ) from error
    for index in range(num_devices):
        properties = runtime.getDeviceProperties(index)
        capability = (int(properties["major"]), int(properties["minor"]))
        name, total = properties["name"].decode(), int(properties["totalGlobalMem"])
        found.append(CupyDevice(_active, index, name, total, capability))
    return found


def check_cupy() -> None:
    """Raise SetupError if CuPy is not installed; it is not imported."""
    if importlib.util.find_spec("cupy") is None:
        raise SetupError(
            "CuPy is not installed, and stalloc takes all GPU memory from CuPy's pool, for PyTorch too: "
            "pip install 'stalloc[cuda13]', or 'stalloc[cuda12]' for a CUDA 12 driver."
        )


def _give_cupy_a_cache() -> None:
    """CuPy makes its folder of kernels when it is imported; where there is no home, it gets one for this process."""
    if "cupy" in sys.modules or os.environ.get("CUPY_CACHE_DIR"):
        return
    try:
        os.makedirs(os.path.expanduser("~/.cupy/kernel_cache"), exist_ok=True)
    except OSError:
        folder = tempfile.mkdtemp(prefix="stalloc-cupy-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["CUPY_CACHE_DIR"] = folder
