"""Libraries that the process before a fork has imported, and that a program in the fork imports as if they were not.

Contract: until the program imports a library nothing of it is in `sys.modules`; then all of it is there again, at once,
and whoever waits for the import of one of its modules is told. What a library reads from its environment as it is
imported was read before the fork: where the program has set such a variable meanwhile, `otherwise` is called with what
the variables are now, and the import goes on.
"""

import copy
import importlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from stalloc.allocator_conf import VARIABLES
from stalloc.imports import tell_imported

#: what a program may import first of each library, the library itself at the front
_PACKAGES = {"torch": ("torch", "functorch", "torchgen"), "cupy": ("cupy", "cupyx", "cupy_backends")}
#: such as TORCH_BLAS_PREFER_CUBLASLT, CUPY_ACCELERATORS and CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, by which memory
#: differs; what is read by a function, when it is needed, is none of them: CUBLAS_WORKSPACE_CONFIG, CUDA_…, NCCL_…
_READ = {"torch": ("PYTORCH_", "TORCH_"), "cupy": ("CUPY_",)}


def put_aside(otherwise: Callable[[dict[str, str]], None]) -> None:
    for name in _PACKAGES:
        if name in sys.modules:
            sys.meta_path.insert(0, _Aside(name, otherwise))


class _Aside:
    """A library, until its import; finds and loads what a program may import first of it."""

    def __init__(self, name: str, otherwise: Callable[[dict[str, str]], None]) -> None:
        self._name, self._packages, self._otherwise = name, _PACKAGES[name], otherwise
        self._modules = {name: one for name, one in sys.modules.items() if name.partition(".")[0] in self._packages}
        self._before = dict(os.environ)
        for module in self._modules:
            del sys.modules[module]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._packages or name not in self._modules:
            return None
        spec = copy.copy(self._modules[name].__spec__)
        assert spec is not None
        spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._modules[spec.name]
        self._own = module.__spec__  # in whose place the import puts the other
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own
        if module.__name__ != self._name:
            importlib.import_module(self._name)
            return
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        tell_imported([name for name in self._modules if name != self._name])
        now = os.environ
        changed = {
            name: now.get(name, "")  # empty: it is gone
            for name in (*self._before, *now)
            # of the allocator's settings only which allocator it is: the others are read with the first request
            if name.startswith(_READ[self._name])
            and now.get(name) != self._before.get(name)
            and (name not in VARIABLES or "backend" in now.get(name, ""))
        }
        if changed:
            self._otherwise(changed)
