"""CuPy on the virtual GPU, although its wheels contain the CUDA runtime and cannot be given another by the loader.

Contract: before the first `import cupy`, every CUDA runtime function inside CuPy's libraries is made to jump to the
function of the same name in the virtual GPU; functions that the virtual GPU lacks report "not supported". A CuPy that
links to the runtime (conda-forge) needs nothing: the loader finds the virtual GPU's libraries under their names.
"""

import ctypes
import os
from pathlib import Path

from stalloc.device.elf import ElfFile
from stalloc.device.installed_extensions import package_directory
from stalloc.errors import SetupError

_PREFIXES = (b"cuda", b"__cuda")
_JUMP_BYTES = 16  # the longest jump that is written; functions start at multiples of 16


def redirect(library: ctypes.CDLL) -> int:
    """Redirect the CUDA runtime inside CuPy to `library`; how many functions were redirected, 0 if there is no CuPy.

    Raises SetupError if the code cannot be changed or the runtime cannot be found.
    """
    total, linked = 0, False
    directories = [found for package in ("cupy_backends", "cupy") if (found := package_directory(package))]
    for directory in directories:
        for path in sorted(directory.rglob("*.so")):
            total += _redirect_one(path, library)
            linked = linked or _links_to_runtime(path)
    if directories and total == 0 and not linked:
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
        functions = elf.functions((*_PREFIXES, b"PyInit_"))
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
