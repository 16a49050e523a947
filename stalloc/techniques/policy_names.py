"""Names of published ways to recompute, as `stalloc fit --policy` and `stalloc.checkpoint(policy=…)` take them.

Contract: a name means the same to both.
"""

from stalloc.errors import BadInputError

BLOCKS = "blocks"  #: blocks:N, the first N as a whole
KEEP_ATTENTION = ("keep-attention", "remat-aware")  #: one name, and the other of DistFlashAttn, for one thing
ATTENTION = ("attention", "flash")  #: parts of the names of operators that compute attention as a whole
NEED_A_FIT = ("recompute", "checkmate", "selective")  #: what is kept is known when a program was looked at


def num_blocks_of(policy: str) -> int | None:
    """The number in `blocks:N`, None for `blocks`, which is all. Raises BadInputError if it is none."""
    _, colon, number = policy.partition(":")
    if not colon:
        return None
    if not (number.isascii() and number.isdecimal()):
        raise BadInputError(f"{policy[:40]!r} has no number of blocks: give blocks:4, for example.")
    return int(number)


def is_attention(operation: str) -> bool:
    """Whether an operation computes attention as a whole."""
    return any(part in operation for part in ATTENTION)
