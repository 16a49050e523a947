"""Names of a package that come from their modules at the first use, so that a program imports what it uses alone."""

import importlib
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing would hold up every start of Python under STALLOC=1
    from collections.abc import Callable
    from typing import Any


def loaded_on_use(
    package: str, modules: "dict[str, str]", renamed: "dict[str, str] | None" = None
) -> "Callable[[str], Any]":
    """The `__getattr__` of a package (PEP 562); `modules`: the module of each name, as ".module" if it is below it.

    `renamed`: the name of today for names of the last release, which still work and warn.
    """

    def attribute(name: str) -> "Any":
        if renamed and name in renamed:
            warnings.warn(f"{package}.{name} is called {renamed[name]} now.", DeprecationWarning, stacklevel=2)
            name = renamed[name]
        if name in modules:
            return getattr(importlib.import_module(modules[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
