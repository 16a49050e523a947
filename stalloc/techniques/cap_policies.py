"""Which of the published eviction policies a cap takes: those that do not ask where in memory something lies.

Contract: what is dropped together is one block call, whose inputs are never dropped; so nothing that was evicted has to
be computed first, and DTR's three costs are one.
"""

from stalloc.errors import BadInputError
from stalloc.eviction.scores import POLICIES, Policy

CAP_POLICIES = tuple(name for name, one in POLICIES.items() if not one.by_place)
DEFAULT = "dtr"


def policy_named(name: str) -> Policy:
    """The policy of a name. Raises BadInputError for one that a cap does not take."""
    if name not in CAP_POLICIES:
        why = "goes by addresses, and is for stalloc evict" if name in POLICIES else "is no policy for a cap"
        raise BadInputError(f"{name!r:.42} {why}: give one of {', '.join(CAP_POLICIES)}.")
    return POLICIES[name]
