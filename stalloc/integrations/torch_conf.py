"""PYTORCH_ALLOC_CONF under stalloc: read, respected, reported, never written.

What concerns torch's pinned host memory goes on working, since that allocator stays torch's own. A share of the device
is kept as stalloc's limit. Another backend is the user's choice: stalloc leaves torch to it. The rest describes the
caching allocator that stalloc takes the place of, and has nothing to act on.
"""

from typing import TYPE_CHECKING, Any

from stalloc.allocator_conf import conf_in_force

if TYPE_CHECKING:
    from stalloc.runtime import Runtime

_FRACTION = "per_process_memory_fraction"


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
    """One sentence on what becomes of the settings, empty if there are none; a limit is put in force.

    `runtime` None: the sentence alone.
    """
    variable, found = conf_in_force()
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
