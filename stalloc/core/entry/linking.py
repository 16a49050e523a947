"""Machine code from .ll files, linked with addresses of this process.

Contract: whatever a file declares is found in one of the libraries named, or set by its name; a declaration that is
neither is an error when the file is linked, not when the code runs. The code lives as long as the process, since torch
and CuPy keep its address, and so do the numbers and objects that it was given.
"""

import ctypes
from importlib.resources import files

import llvmlite.binding as llvm

from stalloc.threads import uninterrupted

_kept: list[object] = []
_compiled: dict[tuple[str, str], bytes] = {}  # object code of files: all links of one differ in addresses only


def word(value: int) -> int:
    """The address of a constant word, for a global of a .ll file."""
    constant = ctypes.c_int64(value)
    _kept.append(constant)
    return ctypes.addressof(constant)


def text(value: bytes) -> int:
    """The address of a constant text, for a global of a .ll file."""
    constant = ctypes.create_string_buffer(value)
    _kept.append(constant)
    return ctypes.addressof(constant)


def find(names: tuple[str, ...], libraries: tuple[ctypes.CDLL, ...]) -> tuple[str, int]:
    """The first of these symbols that one of the libraries has, and its address; OSError if there is none."""
    for name in names:
        for library in libraries:
            try:
                return name, ctypes.addressof(ctypes.c_char.in_dll(library, name))
            except ValueError:
                continue
    raise OSError(f"stalloc: this process has no symbol {names[0]}, which an entry point of the allocator needs.")


def link(
    package: str,
    file: str,
    *names: str,
    set_to: dict[str, int],
    libraries: tuple[ctypes.CDLL, ...] = (),
    hot: bool = False,
) -> list[int]:
    """Compile a file of a package, with care if its code is `hot`; the addresses of the functions named.

    `set_to` are addresses of what it declares, by name; the rest is looked up in `libraries`.
    """
    return uninterrupted(_link, package, file, names, set_to, libraries, hot)


def _link(
    package: str,
    file: str,
    names: tuple[str, ...],
    set_to: dict[str, int],
    libraries: tuple[ctypes.CDLL, ...],
    hot: bool,
) -> list[int]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(files(package).joinpath(file).read_text(encoding="utf-8"))
    module.verify()
    # the large code model, as numba's: sections of a module may lie more than 2 GiB apart in a crowded address space,
    # and with 32-bit distances between them LLVM aborts the process then
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2 if hot else 0, codemodel="large", jit=True)
    engine = llvm.create_mcjit_compiler(module, machine)
    where = package, file
    engine.set_object_cache(lambda _, code: _compiled.setdefault(where, bytes(code)), lambda _: _compiled.get(where))
    for declared in [*module.functions, *module.global_variables]:
        if declared.is_declaration and not declared.name.startswith("llvm."):
            address = set_to.get(declared.name) or find((declared.name,), libraries)[1]
            engine.add_global_mapping(declared, address)
    engine.finalize_object()
    engine.run_static_constructors()
    _kept.append((engine, module, machine))
    return [engine.get_function_address(name) for name in names]
