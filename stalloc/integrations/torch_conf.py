"""Settings of torch's allocator: changed by `stalloc.alloc_conf(…)`, and respected under stalloc.

Contract: what this torch would refuse is refused before anything is changed. torch takes a new text as a whole and
forgets the rest, `expandable_segments` apart, which it never forgets: so the text has everything that is to be in
force. The variable is the one that the installed release reads, and it agrees with what torch was told.

Under stalloc they are read, and never written. What concerns torch's pinned host memory goes on working, since that
allocator stays torch's own. A share of the device is kept as stalloc's limit. Another backend is the user's choice:
stalloc leaves torch to it. The rest describes the caching allocator that stalloc takes the place of, and has nothing to
act on.
"""

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from stalloc.allocator_conf import conf_in_force, conf_text, parse_settings, variables_read
from stalloc.errors import BadInputError, SetupError
from stalloc.version import release_installed

if TYPE_CHECKING:
    from stalloc.runtime import Runtime

_EXPANDABLE = "expandable_segments"
_FRACTION = "per_process_memory_fraction"
_STARTS_WITH_PROCESS = "backend"


class AllocConf:
    """Settings that are in force until `restore`, or until the end of a `with` block."""

    def __init__(self, changed: dict[str, str]) -> None:
        variables = variables_read(release_installed())
        self.variable = variables[0]  #: what this torch reads first
        self._text_before = os.environ.get(self.variable)
        self._settings_before = conf_in_force(os.environ, variables)[1]
        wanted = {**self._settings_before, **changed}
        self.settings = {name: value for name, value in wanted.items() if value != ""}  #: all that is in force, by name
        checked = {name: value for name, value in self.settings.items() if name != _STARTS_WITH_PROCESS}
        try:
            parse_settings(conf_text(checked))
        except BadInputError as error:
            raise BadInputError(f"alloc_conf of {', '.join(changed) or 'nothing'}: {error}") from error
        self._tell(self.settings, self._settings_before)
        os.environ[self.variable] = conf_text(self.settings)

    def restore(self) -> None:
        self._tell(self._settings_before, self.settings)
        if self._text_before is None:
            os.environ.pop(self.variable, None)
        else:
            os.environ[self.variable] = self._text_before

    def _tell(self, wanted: dict[str, str], had: dict[str, str]) -> None:
        """Let torch have settings, if it has read its environment already."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.backends.cuda.is_built():
            return
        name = _STARTS_WITH_PROCESS
        if wanted.get(name) != had.get(name):
            raise SetupError(f"{name} is chosen when torch is imported: set it before, or by {self.variable}.")
        told = wanted | ({_EXPANDABLE: wanted.get(_EXPANDABLE, "False")} if _EXPANDABLE in had else {})
        names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
        apply = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
        if apply is None:
            raise SetupError(
                f"torch {torch.__version__} changes no settings once it is imported: call alloc_conf before."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            apply(conf_text(told))

    def __enter__(self) -> "AllocConf":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        return f"{self.variable}={conf_text(self.settings)}"

    __repr__ = __str__


def alloc_conf(**settings: object) -> AllocConf:
    """Change settings of torch's allocator, and keep the others; None takes one away.

    To be used as `with stalloc.alloc_conf(max_split_size_mb=128):`, or called once; printing it shows all that is in
    force. Works before torch is imported and afterwards. Raises BadInputError for settings that torch refuses,
    SetupError for those that come too late.
    """
    return AllocConf({name: "" if value is None else str(value) for name, value in settings.items()})


def leaves_allocator_to_us(torch: Any) -> bool:
    """Whether the program has chosen no allocator of its own for torch, by a setting or a call."""
    return getattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")() == "native"


def put_limit_in_force(runtime: "Runtime") -> None:
    """Take no more than the share of each device that the settings allow."""
    share = conf_in_force()[1].get(_FRACTION)
    if share is not None:
        for controller in runtime.controllers:
            controller.memory.limit(float(share))


def report(runtime: "Runtime | None") -> str:
    """One sentence on what becomes of the settings, empty without any; of a runtime, a limit is put in force."""
    variable, found = conf_in_force()
    kept = sorted(name for name in found if name.startswith("pinned_"))
    if runtime is not None:
        put_limit_in_force(runtime)
    kept += [_FRACTION] if _FRACTION in found else []
    idle = sorted(set(found) - set(kept) - {_STARTS_WITH_PROCESS})
    parts = [f"{', '.join(kept)} in force"] if kept else []
    parts += [f"{', '.join(idle)} without effect on the memory that stalloc serves"] if idle else []
    return f"{variable} stays as it is: {'; '.join(parts)}." if parts else ""
