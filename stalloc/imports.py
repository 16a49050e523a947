"""Do something right before or after a module is imported, without importing it, or at the first use of CUDA.

Contract of the first use: what `stalloc run` starts then is started once, by whoever comes first: the program, where it
uses CUDA, or a call of stalloc's that needs the runtime. Until then no driver is asked for anything, so the environment
is the program's to set.
"""

import sys
from collections.abc import Callable, Collection

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing and importlib.abc would hold up every start of Python under STALLOC=1
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_awaited: list[Callable[[], object]] = []  # one, or none


def await_use(start: Callable[[], object]) -> None:
    _awaited[:] = [start]


def is_use_awaited() -> bool:
    return bool(_awaited)


def begin_use() -> bool:
    """It is needed now: start it, if it is awaited; whether it was."""
    start = _awaited.pop() if _awaited else None
    if start is not None:
        start()
    return start is not None


class _Loader:
    """The module's own loader, followed by one call."""

    def __init__(self, loader: "Any", action: Callable[[], object]) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)  # whoever asks for the source, say, asks the module's own

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        # the module gets its own loader back, as if nobody had been here
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()


class _After:
    """Stays until the module has been imported: others may only ask whether it could be."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action = action

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._imported)  # type: ignore[assignment]
                return spec
        return None

    def tell(self, names: Collection[str]) -> None:
        if self._name in names:
            self._imported()

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action()


class _Before:
    """Acts as soon as anybody looks for one of the modules, then is gone."""

    def __init__(self, names: Collection[str], action: Callable[[], object]) -> None:
        self._names = names
        self._action = action

    def find_spec(self, name, path=None, target=None):
        if name not in self._names or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        self._action()
        # the action may have put finders before the place that the search has reached: search anew
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        return next((spec for spec in found if spec is not None), None)


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call `action` once `name` has been imported: now, if it has been already."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _After(name, action))


def before_import(names: Collection[str], action: Callable[[], object]) -> None:
    """Call `action` once, when the first of the modules `names` is looked for; now, if one is imported already."""
    if any(name in sys.modules for name in names):
        action()
    else:
        sys.meta_path.insert(0, _Before(names, action))


def tell_imported(names: Collection[str]) -> None:
    """Tell those who wait for the import of `names`, which have come without one."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _After):
            finder.tell(names)
