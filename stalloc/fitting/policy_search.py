"""The techniques that `--policy` names, one of which is then the only one that is tried.

Contract: a name is known, or refused, before anything is run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stalloc.errors import BadInputError
from stalloc.fitting import activation_search, tier_search
from stalloc.fitting.presets import try_attention, try_selective, try_whole
from stalloc.fitting.recompute_search import try_cheapest, try_checkmate
from stalloc.integer_program import find_solver
from stalloc.techniques.policy_names import BLOCKS, KEEP_ATTENTION, num_blocks_of

if TYPE_CHECKING:
    from stalloc.fitting.candidates import Fitting

_RECOMPUTED: dict[str, Callable[["Fitting"], None]] = {
    "recompute": try_cheapest,
    "checkmate": try_checkmate,
    **dict.fromkeys(KEEP_ATTENTION, try_attention),
    "selective": lambda fitting: try_selective(fitting, is_named=True),
}
_OTHERS = ("step-in-backward", "compile-budget")


def check_policy(policy: str | None) -> None:
    """Raise BadInputError for a name that nothing is called by, or whose number is none."""
    name = (policy or "").partition(":")[0]
    if policy == "checkmate":
        find_solver()
    elif name == BLOCKS:
        num_blocks_of(policy or "")
    elif name == "offload-ratio":
        activation_search.ratio_of(policy or "")
    elif tier_search.is_of_tiers(policy):
        tier_search.processor_share(policy or "")
    elif policy is not None and policy not in _RECOMPUTED and policy not in _OTHERS:
        raise BadInputError(f"there is no policy {policy[:40]!r} that fits: `stalloc policies` lists them.")


def try_named(fitting: "Fitting", policy: str) -> None:
    """Try ways to recompute by this name; what is named otherwise is tried elsewhere."""
    if policy in _RECOMPUTED:
        _RECOMPUTED[policy](fitting)
    elif policy.partition(":")[0] == BLOCKS:
        try_whole(fitting, num_blocks_of(policy))
    elif policy == "compile-budget" and not fitting.step.is_compiled:
        fitting.note(["torch.compile has made nothing of this program, so compile-budget has nothing to share out"])
