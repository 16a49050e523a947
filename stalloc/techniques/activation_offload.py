"""Keeping what a program of one's own saves for backward in host memory: the technique without a budget.

Contract: this module loads no torch until it is asked.
"""

from typing import TYPE_CHECKING

from stalloc.device.known_gpus import parse_memory
from stalloc.errors import BadInputError

if TYPE_CHECKING:
    from stalloc.techniques.link_turns import SharedLink
    from stalloc.techniques.saved_activations import SavedActivations


def offload_activations(
    ratio: float = 1.0,
    *,
    window: str | int = "256MiB",
    host: str | int | None = None,
    device: str = "cuda",
    link: "SharedLink | None" = None,
) -> "SavedActivations":
    """A context: what autograd saves in it is kept in pinned host memory, and comes back for backward.

    `ratio` of the saved bytes go there, evenly spread (Yuan et al. 2024). At most `window` is on its way to the host
    and still on the device, and as much comes back ahead of its use. `host` bounds the host memory (all there is by
    default); what has no room there stays on the device. `device`: the type of device whose tensors are meant.
    Gradients are those without it, to the last bit; a tensor that is changed in place between is an OffloadError.
    One context is for all steps, entered once or in each: its host memory is used again. backward may be outside.

    `link`, a `stalloc.SharedLink`, is for ranks of one job whose devices share a link to the host: their copies take
    turns, and each keeps other tensors in the host, as far as the ratio lets it (TMO, Lin et al. 2023).

    Raises BadInputError for a ratio that is none, and for a link whose file cannot be written.
    """
    if not 0 <= ratio <= 1:
        raise BadInputError(f"a ratio of {ratio:g} is not possible: give 0 to 1.")
    from stalloc.techniques.activation_settings import ActivationSettings
    from stalloc.techniques.host_store import HostStore
    from stalloc.techniques.saved_activations import SavedActivations

    store = HostStore(None if host is None else parse_memory(host))
    settings = ActivationSettings(ratio=ratio, window_bytes=parse_memory(window, at_least=0))
    return SavedActivations(settings, store, device, link=link)
