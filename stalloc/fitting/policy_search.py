"""The techniques of a fit: what `--policy` may name, and what is tried, in which order, if nothing is named.

Contract: an unknown name is refused before anything is run. A new technique is named here, and nowhere else in this
folder.
"""

from collections.abc import Callable
from functools import partial

from stalloc.errors import BadInputError
from stalloc.fitting import activation_search, tier_search
from stalloc.fitting.compiled_search import compiled
from stalloc.fitting.frontier import whole_blocks
from stalloc.fitting.proposals import Base, Known, Proposals
from stalloc.fitting.recompute_search import all_but_attention, by_checkmate, cheapest, core_of_attention, whole
from stalloc.fitting.step_search import step_in_backward
from stalloc.fitting.systems import SYSTEMS
from stalloc.integer_program import find_solver
from stalloc.techniques.checkpointing import BLOCKS, KEEP_ATTENTION, num_blocks_of

Technique = Callable[[Known, Base], Proposals]
_RECOMPUTED: dict[str, Technique] = {
    "recompute": cheapest,
    "checkmate": by_checkmate,
    **dict.fromkeys(KEEP_ATTENTION, all_but_attention),
    "selective": partial(core_of_attention, is_named=True),
}
_BESIDE: dict[str, Callable[..., Proposals]] = {"step-in-backward": step_in_backward}
"""What is done beside recomputing: tried first, each on top of those before it."""
_COMPILED = "compile-budget"
_IS = {"in part": "executes in part", "emulates": "is emulated", "replays": "is replayed", "reports": "is reported"}


def check_policy(policy: str | None) -> None:
    """Raise BadInputError for a policy that does not exist, or whose number cannot be read."""
    name = (policy or "").partition(":")[0]
    if policy == "checkmate":
        find_solver()
    elif name == BLOCKS:
        num_blocks_of(policy or "")
    elif name == "offload-ratio":
        activation_search.ratio_of(policy or "")
    elif tier_search.is_of_tiers(policy):
        tier_search.processor_share(policy or "")
    elif policy is not None and policy not in {*_RECOMPUTED, *_BESIDE, _COMPILED}:
        for system in SYSTEMS:
            if system.name == policy:
                does = _IS.get(system.status, system.status)
                raise BadInputError(f"{policy} is not tried by a fit: it {does} with `{system.where}`.")
        raise BadInputError(f"no fit takes the policy {policy[:40]!r}: `stalloc policies` lists those there are.")


def propose(known: Known, as_it_is: Base, policy: str | None) -> Proposals:
    """The ways to try, one after another, after the program as it is; `policy`: the only technique to try."""
    base, is_short = as_it_is, not known.fits(known.candidates[0])
    is_tried = policy is None and is_short
    for name, technique in _BESIDE.items():
        if policy == name or is_tried:
            base = (yield from technique(known, base, is_named=policy is not None)) or base
    if known.step.is_compiled and (policy == _COMPILED or is_tried):
        yield from compiled(known, base)
    elif policy == _COMPILED:
        yield "torch.compile has made nothing of this program, so compile-budget has nothing to share out"
    if not whole_blocks(known.step):
        yield known.step.why_no_blocks
    elif policy is not None:
        if policy.partition(":")[0] == BLOCKS:
            yield from whole(known, base, num_blocks_of(policy))
        elif policy in _RECOMPUTED:
            yield from _RECOMPUTED[policy](known, base)
    elif is_short:
        yield from known.step.why_some_stay
        for recomputed in (cheapest, all_but_attention, core_of_attention, whole):
            yield from recomputed(known, base)
    else:
        yield from whole(known, base)
    if tier_search.is_of_tiers(policy) or (is_tried and known.host_bytes):
        yield from tier_search.in_tiers(known, as_it_is, policy)
    if (policy or "").startswith("offload-ratio") or (is_tried and known.host_bytes):
        yield from activation_search.with_activations(known, policy)
    return base
