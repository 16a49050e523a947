"""PYTORCH_ALLOC_CONF under stalloc: read, respected, reported, never written.

What concerns torch's pinned host memory goes on working, since that allocator stays torch's own. A share of the device
is kept as stalloc's limit. Another backend is the user's choice: stalloc leaves torch to it. The rest describes the
caching allocator that stalloc takes the place of, and has nothing to act on.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stalloc.runtime import Runtime

#: in torch's order of precedence
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_FRACTION = "per_process_memory_fraction"


def settings() -> tuple[str, dict[str, str]]:
    """The variable that torch goes by and its settings by name; ("", {}) if none is set."""
    for variable in VARIABLES:
        text = os.environ.get(variable, "")
        if text:
            return variable, _parse(text)
    return "", {}


def _parse(text: str) -> dict[str, str]:
    """`name:value` pairs between commas; lists in brackets stay whole."""
    found, depth, start = {}, 0, 0
    for i, char in enumerate(text + ","):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            name, _, value = text[start:i].partition(":")
            if name.strip():
                found[name.strip()] = value.strip()
            start = i + 1
    return found


def leaves_allocator_to_us(torch: Any) -> bool:
    """Whether the program has chosen no allocator of its own for torch, by a setting or a call."""
    return getattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")() == "native"


def put_limit_in_force(runtime: "Runtime") -> None:
    """Take no more than the share of each device that the settings allow."""
    share = settings()[1].get(_FRACTION)
    if share is not None:
        for controller in runtime.controllers:
            controller.memory.limit(float(share))


def report(runtime: "Runtime | None") -> str:
    """One sentence on what becomes of the settings, empty if there are none; a limit is put in force.

    `runtime` None: the sentence alone.
    """
    variable, found = settings()
    kept = sorted(name for name in found if name.startswith("pinned_"))
    if runtime is not None:
        put_limit_in_force(runtime)
    kept += [_FRACTION] if _FRACTION in found else []
    idle = sorted(set(found) - set(kept) - {"backend"})
    if not idle and not kept:
        return ""
    parts = [f"{', '.join(kept)} in force"] if kept else []
    parts += [f"{', '.join(idle)} without effect on the memory that stalloc serves"] if idle else []
    return f"{variable} stays as it is: {'; '.join(parts)}."
