"""The virtual GPU: PyTorch and CuPy, unchanged, on a machine without a GPU.

Contract: after `activate(gpu)` and before the process ends, every CUDA call of torch and of CuPy is answered by a
small C library. Allocation, the caching allocators, streams, events, graphs and out-of-memory errors are real, and
sizes and addresses are exact; kernels do nothing, so values are not: what is read back is zero or what was copied.
"""

import ctypes
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from stalloc.device.collectives import Communicators, prepare_collectives
from stalloc.device.cudnn import AskedConvolution, Workspaces, asked_convolutions, load_table, table_answer
from stalloc.device.deciding_lines import Decisions, count_cupy_reads
from stalloc.device.elf import ElfFile
from stalloc.device.followed import follow_values, leave_uncompiled
from stalloc.device.host_use import HostUse
from stalloc.device.known_gpus import COMPLETION, COMPLETIONS, DEFAULT_GPU, Completion, VirtualGPU
from stalloc.device.order_checker import VARIABLE as ORDER
from stalloc.device.order_checker import OrderChecker
from stalloc.device.values import Values
from stalloc.device.virtual_build import build, libraries, package_directory, scan
from stalloc.device.watched_work import watch_cupy, watch_torch
from stalloc.errors import BadInputError, SetupError
from stalloc.imports import after_import, before_import

_STATISTICS = (
    *("mallocs", "frees", "launches", "copies", "copies_skipped", "memsets", "out_of_memory"),
    *("event_records", "event_waits", "maps", "unmaps"),
    *("page_creates", "page_releases", "access_calls", "device_waits", "shared_handles"),
)

_LEVELS: dict[Completion, int] = {"at-once": 0, "timeline": 2, "at-waits": 1}  # of virtual_order.h


class _Process:
    """What this process has in the place of its GPUs; nothing before `activate`."""

    library: ctypes.CDLL | None = None
    gpu: VirtualGPU | None = None
    cuda_version = 0
    values: Values | None = None
    cupy_decisions: Decisions | None = None
    order_checker: OrderChecker | None = None
    communicators: Communicators | None = None


_process = _Process()


def activate(gpu: VirtualGPU = DEFAULT_GPU) -> None:
    """Put `gpu` in the place of this process's GPUs; once, and before torch and CuPy are imported.

    Raises SetupError if one of them is imported already, if there is no C compiler to build the library with, or if
    another GPU is active already.
    """
    if _process.gpu is not None:
        if _process.gpu != gpu:
            raise SetupError(f"the virtual GPU is {_process.gpu.name} already: choose another one in a new process.")
        return
    early = [name for name in ("torch", "cupy", "cupy_backends") if name in sys.modules]
    if early:
        raise SetupError(
            f"{' and '.join(early)} was imported before the virtual GPU: activate it first, or start the program with "
            "`stalloc dryrun`."
        )
    surface = scan()
    if (order := os.environ.get(ORDER, "")) not in ("", "strict"):
        raise BadInputError(f"{ORDER}={order} is not known: set it to strict, or unset it.")
    if (completion := os.environ.get(COMPLETION, "")) not in ("", *COMPLETIONS):
        raise BadInputError(f"{COMPLETION}={completion} is not known: set it to {', '.join(COMPLETIONS)}, or unset it.")
    if order and completion:
        raise BadInputError(f"{ORDER} has work be late in its own way: unset it, or {COMPLETION}.")
    folder = build(surface)
    library = _load(libraries(folder, surface))
    if order:
        _process.order_checker = OrderChecker(library)
    _configure(library, gpu, surface.cuda_version)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # torch would look the numbers in it up among real GPUs
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(folder))
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # kernels compiled to nothing must not reach the cache on disk
    # CuPy is prepared before, and torch after, its first import: a program pays only for what it imports
    before_import(("cupy", "cupy_backends"), lambda: redirect(library))
    after_import("cupy", lambda: setattr(_process, "cupy_decisions", count_cupy_reads(sys.modules["cupy"], library)))
    after_import("torch", after_torch_import)
    after_import("torch._dynamo", lambda: leave_uncompiled(sys.modules["torch._dynamo"]))
    after_import("numba.cuda.cudadrv.driver", _refuse_numba)
    if _process.order_checker is not None:
        after_import("torch", partial(watch_torch, _process.order_checker))
        after_import("cupy", partial(watch_cupy, _process.order_checker))
    _process.library, _process.gpu, _process.cuda_version = library, gpu, surface.cuda_version
    if completion:
        complete(completion)  # type: ignore[arg-type]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def become(gpu: VirtualGPU) -> None:
    """Be another GPU: for a fork of a process that has imported the libraries and not used the device."""
    _configure(_active_library(), gpu, _process.cuda_version)
    _process.gpu = gpu


def _configure(library: ctypes.CDLL, gpu: VirtualGPU, cuda_version: int) -> None:
    limit = ctypes.c_size_t(-1).value if gpu.copy_limit_bytes is None else gpu.copy_limit_bytes
    status = library.stalloc_virtual_configure(
        gpu.name.encode(),
        ctypes.c_size_t(gpu.total_bytes),
        *gpu.compute_capability,
        gpu.num_multiprocessors,
        gpu.num_devices,
        cuda_version,
        ctypes.c_size_t(limit),
    )
    if status != 0:
        raise BadInputError(f"the virtual GPU refuses {gpu}: choose 1 to 64 devices and a positive size.")
    library.stalloc_virtual_set_context(ctypes.c_size_t(gpu.context_bytes))
    _set_faults(library, os.environ.get(_FAULTS, ""))
    told = {"folder": str(Path(__file__).parents[2]), "gpu": asdict(gpu)}
    os.environ["STALLOC_VIRTUAL_GPU"] = json.dumps(told)  # of which inherited.py makes one


def _load(paths: list[Path]) -> ctypes.CDLL:
    library, *_ = (ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW) for path in paths)
    library.stalloc_virtual_used_bytes.restype = library.stalloc_virtual_peak_bytes.restype = ctypes.c_size_t
    library.stalloc_virtual_contexts.restype = ctypes.c_uint64
    load_table(library)
    return library


def active_gpu() -> VirtualGPU | None:
    return _process.gpu


def order_checker() -> OrderChecker | None:
    """The checker of the order of work, where this process has one (STALLOC_VIRTUAL_ORDER=strict)."""
    return _process.order_checker


def _refuse_numba() -> None:
    """Let numba.cuda find no GPU, and say why where it is used all the same."""
    driver = sys.modules["numba.cuda.cudadrv.driver"].driver
    driver.is_initialized = True
    driver.initialization_error = (
        "numba.cuda does not run on the virtual GPU, which PyTorch and CuPy have: leave its kernels out where "
        "numba.cuda.is_available() is False, or run the program on a real GPU"
    )


def after_torch_import() -> None:
    """Let cuDNN have the version that torch was built with, as torch checks, and small integers their true values.

    It runs by itself at the end of `import torch`; calling it again, or without a virtual GPU, does nothing.
    """
    torch: Any = sys.modules.get("torch")
    if (library := _process.library) is not None and torch is not None:
        major, minor, patch = torch._C._cudnn.getCompileVersion()
        library.stalloc_virtual_set_cudnn_version(major * (1000 if major < 9 else 10_000) + minor * 100 + patch)
        if _process.values is None:
            _process.values = values = follow_values(torch, library)
            after_import("torch.distributed.distributed_c10d", partial(prepare_collectives, library, values))


def _active_library() -> ctypes.CDLL:
    if _process.library is None:
        raise SetupError("no virtual GPU is active: call stalloc.device.activate('virtual') first.")
    return _process.library


def communicators() -> Communicators:
    if _process.communicators is None:
        _process.communicators = Communicators(_active_library())
    return _process.communicators


def host_use() -> HostUse:
    return HostUse(_active_library())


def statistics() -> dict[str, int]:
    """What the virtual GPU was asked to do so far: calls, by kind."""
    counts = (ctypes.c_uint64 * len(_STATISTICS))()
    _active_library().stalloc_virtual_statistics(counts)
    return dict(zip(_STATISTICS, counts, strict=True))


def contexts() -> list[int]:
    """The GPUs of the machine on which this process has made a primary context so far."""
    found = int(_active_library().stalloc_virtual_contexts())
    return [number for number in range(found.bit_length()) if found >> number & 1]


def is_initialised() -> bool:
    """Whether this process has asked the driver for devices, which is when CUDA_VISIBLE_DEVICES is read."""
    return bool(_active_library().stalloc_virtual_is_initialised())


def convolutions() -> list[AskedConvolution]:
    return asked_convolutions(_active_library())


def table_workspace(
    direction: str, sizes: Sequence[int], window: Sequence[int], stride: int, cudnn_version: int
) -> int:
    """The workspace in the table for a convolution of fp32 tensors, on this GPU, with this cuDNN (8902 for 8.9.2)."""
    return table_answer(_active_library(), direction, sizes, window, stride, cudnn_version)


def guess_workspaces(which: Workspaces) -> None:
    """Let workspaces of cuDNN that no GPU was seen to ask for be none, the likely ones (as they are) or the most."""
    _active_library().stalloc_virtual_set_guesses({"least": -1, "likely": 0, "most": 1}[which])


def complete(how: Completion) -> None:
    """Let work be done at once, when it would be on a GPU, or not before the host waits for it; before it is given any.

    The checker of the order of work has it be late already, and is left so.
    """
    if _process.order_checker is not None:
        return
    library, gpu = _active_library(), active_gpu()
    library.stalloc_virtual_set_order(_LEVELS[how])
    if how == "timeline" and gpu is not None:
        # by its name: prices stand above the devices, and are looked for only where somebody asks for a timeline
        importlib.import_module("stalloc.cost.running_timeline").begin(library, gpu.name)


def findings() -> dict[str, Any]:
    """What this process's figures depend on, and what keeps them from being certain, as plain values."""
    counted = [_process.values.decisions if _process.values is not None else None, _process.cupy_decisions]
    decisions = [one for each in counted if each is not None for one in each.listed()]
    torch: Any = sys.modules.get("torch")
    asked = convolutions()
    unseen = [one for one in asked if one.unknown_bytes != 0]
    return {
        "torch": str(torch.__version__) if torch is not None else None,
        "convolutions": {
            "num_convolutions": len(asked),
            "num_unseen": len(unseen),  # whose workspace no GPU was seen to ask for
            # how far off a peak can be by it: workspaces of one stream live one at a time
            "unknown_bytes": max((one.unknown_bytes or 0 for one in unseen), default=0),
            "by_trial": bool(asked) and torch is not None and bool(torch.backends.cudnn.benchmark),
        },
        "decisions": [asdict(one) for one in decisions],
        "shares_blocks": bool(_active_library().stalloc_virtual_shares_blocks()),
    }


def used_bytes(device: int = 0) -> int:
    """Bytes allocated on the virtual device now, rounded up to 512 for each allocation."""
    return int(_active_library().stalloc_virtual_used_bytes(device))


def peak_bytes(device: int = 0) -> int:
    """The most bytes that were allocated on the virtual device at once, since the last `restart_peak` if there was one.

    Bytes count from the driver's call that gives them (cudaMalloc, cuMemCreate), whoever serves requests from them.
    """
    return int(_active_library().stalloc_virtual_peak_bytes(device))


def restart_peak(device: int = 0) -> None:
    _active_library().stalloc_virtual_restart_peak(device)


_FAULTS = "STALLOC_VIRTUAL_FAULTS"
_FAULT = re.compile(r"([A-Za-z]\w{0,30}):(?:([0-9]{1,4})|([a-z]+))(?:@([1-9][0-9]{0,8})(\+?))?", re.ASCII)
_FAULT_WORDS = {"busy": 46, "refused": 801, "hang": 1 << 20, "none": 1 << 21}
_ALWAYS = (1 << 64) - 1


def _set_faults(library: ctypes.CDLL, text: str) -> None:
    """Let a virtual driver fail as STALLOC_VIRTUAL_FAULTS says, so that what a real machine may say is tried without.

        STALLOC_VIRTUAL_FAULTS=cuMemSetAccess:801,cuMemCreate:2@7,device1:busy,peer1:refused

    Each entry is NAME:STATUS, with @N for the N-th call alone and @N+ for all from there on. NAME is a function of the
    driver or the runtime, `deviceN` (no context can be made on it), `peerN` (no other device may map its memory for
    it), `rdma` or `export` (memory that network cards, or other processes, may reach is refused), or `range` (addresses
    for more than 1 GiB are). STATUS is a number of CUDA's, or `busy` (46), `refused` (801), or `hang`: the call does
    not return. After 214 and most from 700 on the context is lost, as on a GPU: every later call that uses it says the
    same. What the driver answers is changed by NAME:NUMBER or NAME:none: `attributeN` of a device, `peers` (whether
    devices reach each other), `memory` (what is free, in MiB).

    Raises BadInputError for what means nothing.
    """
    library.stalloc_virtual_forget_faults()
    for entry in filter(None, (part.strip() for part in text.split(","))):
        found = _FAULT.fullmatch(entry)
        status = int(found[2]) if found and found[2] else _FAULT_WORDS.get(found[3] or "", 0) if found else 0
        if not found or status == 0:
            raise BadInputError(
                f"{_FAULTS} has {entry[:40]!r}: write NAME:STATUS, such as cuMemCreate:2@7 or device1:busy."
            )
        first = int(found[4] or 1)
        last = first if found[4] and not found[5] else _ALWAYS
        name = found[1].encode()
        if library.stalloc_virtual_add_fault(name, status, ctypes.c_uint64(first), ctypes.c_uint64(last)):
            raise BadInputError(f"{_FAULTS} has {entry[:40]!r}: no call of that name can be told to fail.")


_JUMP_BYTES = 16  # the longest jump that is written; functions start at multiples of 16


def redirect(library: ctypes.CDLL) -> int:
    """Redirect the CUDA runtime inside CuPy to `library`; how many functions were redirected, 0 if there is no CuPy.

    CuPy's wheels contain the runtime, and cannot be given another by the loader: before the first `import cupy` each
    function of it is made to jump to that of the same name in the virtual GPU; functions that this one lacks report
    "not supported". A CuPy that links to the runtime (conda-forge) needs nothing. Raises SetupError if the code cannot
    be changed or the runtime cannot be found.
    """
    directories = [found for package in ("cupy_backends", "cupy") if (found := package_directory(package))]
    paths = [path for directory in directories for path in sorted(directory.rglob("*.so"))]
    total = sum(_redirect_one(path, library) for path in paths)
    if directories and total == 0 and not any(map(_links_to_runtime, paths)):
        raise SetupError(
            "the virtual GPU finds no CUDA runtime in this CuPy, which was stripped of its symbols: install CuPy's own "
            "wheel (pip install 'stalloc[cuda13]')."
        )
    return total


def _links_to_runtime(path: Path) -> bool:
    with ElfFile(path) as elf:
        return any(name.startswith("libcudart.so") for name in elf.needed_libraries())


def _redirect_one(path: Path, library: ctypes.CDLL) -> int:
    with ElfFile(path) as elf:
        functions = elf.functions((b"cuda", b"__cuda", b"PyInit_"))
    inside = {name: function for name, function in functions.items() if name.startswith(("cuda", "__cuda"))}
    if "cudaMalloc" not in inside:
        return 0
    entry = next(name for name in functions if name.startswith("PyInit_"))
    loaded = ctypes.CDLL(str(path), mode=os.RTLD_LAZY)
    base = _address(getattr(loaded, entry)) - functions[entry].offset_bytes
    missing = _address(library.stalloc_virtual_not_supported)
    offsets, targets = [], []
    for name, function in inside.items():
        if function.offset_bytes % _JUMP_BYTES or name == "__cudaGetProcAddress":
            continue  # not an entry point: the runtime's own helpers
        target = getattr(library, name.removesuffix("_ptsz").removesuffix("_ptds"), None)
        offsets.append(function.offset_bytes)
        targets.append(missing if target is None else _address(target))
    array = ctypes.c_uint64 * len(offsets)
    status = library.stalloc_virtual_redirect(
        ctypes.c_void_p(base), ctypes.c_size_t(len(offsets)), array(*offsets), array(*targets)
    )
    if status != 0:
        raise SetupError(
            f"the virtual GPU cannot take the place of the CUDA runtime in {path.name}: this system does not let a "
            "process change its own code: use a CuPy that links to the runtime (conda-forge), or a real GPU."
        )
    return len(offsets)


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address
