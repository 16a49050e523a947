"""By how much an allocated peak may grow before it is too much: a share, or a number of bytes."""

import re
from dataclasses import dataclass

from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError


@dataclass(frozen=True)
class GrowthLimit:
    """A share of what it was before and a number of bytes, one of which is zero."""

    share: float
    num_bytes: int
    text: str
    """The limit as it was given."""

    def allowed_bytes(self, before_bytes: int) -> int:
        """Bytes that a peak may grow by."""
        return int(self.share * before_bytes) + self.num_bytes

    def is_exceeded(self, before_bytes: int, now_bytes: int) -> bool:
        """Whether a peak has grown by more than the limit."""
        return now_bytes - before_bytes > self.allowed_bytes(before_bytes)


def growth_limit(option: str, text: str) -> GrowthLimit:
    """What an option says: 5%, 200MiB or 0. Raises BadInputError for anything else."""
    if share := re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)%", text):
        return GrowthLimit(float(share[1]) / 100, 0, text)
    if text == "0":
        return GrowthLimit(0.0, 0, text)
    try:
        return GrowthLimit(0.0, memory_option(option, text), text)
    except BadInputError as error:
        raise BadInputError(f"{option} is {text[:40]!r}: give 5%, 200MiB or 4096B.") from error
