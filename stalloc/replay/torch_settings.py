"""The settings of PyTorch's CUDA caching allocator, in torch's own syntax.

Upheld: a text that torch 2.11 refuses is refused here with one sentence, and one that it takes means the same.
Settings that touch only pinned host memory or locking are taken and change nothing.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from stalloc.allocator_conf import split_conf
from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.sizes import MIB

NUM_INTERVALS = 16
"""Powers of two from 1 MiB to 64 GiB, each with its own number of divisions."""

_INERT = {
    "pinned_use_background_threads": bool,
    "pinned_use_cuda_host_register": bool,
    "pinned_num_register_threads": int,
    "pinned_reserve_segment_size_mb": int,
    "release_lock_on_cudamalloc": bool,
    "graph_capture_record_stream_reuse": bool,
}
_PAIR = re.compile(r"([^:]+):(\[[^\]]*\]|[^:]+)")


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """What PYTORCH_ALLOC_CONF says; the defaults are torch's."""

    max_split_bytes: int = 0
    """Blocks of this size and above are never split; 0: all blocks may be."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """A request that may not split takes a cached block that is larger by less than this."""
    large_segment_bytes: int = 20 * MIB
    """Device segments for requests between 1 MiB and 10 MiB, and pages of large expandable segments."""
    roundup_divisions: tuple[int, ...] = field(default=(0,) * NUM_INTERVALS)
    """Divisions between two powers of two that a request is rounded up to, from [1 MiB, 2 MiB) on; 0: none."""
    garbage_collection_threshold: float = 0.0
    """Share of the memory that the process may use above which cached blocks are given back by age; 0: never."""
    memory_fraction: float | None = None
    """Share of the capacity that the process may use; None: not limited, and then nothing is collected by age."""
    expandable_segments: bool = False
    """One growing segment for each stream and pool, mapped page by page."""

    def divisions(self) -> Column:
        """(16,) int64."""
        return np.array(self.roundup_divisions, np.int64)


def parse_settings(text: str) -> TorchSettings:
    """Settings from the text of PYTORCH_ALLOC_CONF, as torch 2.11 reads it.

    Raises BadInputError for an unknown key or a value that torch refuses.
    """
    pairs = _pairs("".join(text.split()))
    # torch reads its environment twice, so the size of large segments counts for keys before it too
    large_mb = _whole("large_segment_size_mb", dict(pairs).get("large_segment_size_mb", "20"), 11)
    values: dict[str, object] = {}
    for key, value in pairs:
        if key == "large_segment_size_mb":
            values["large_segment_bytes"] = large_mb * MIB
            values.setdefault("max_non_split_rounding_bytes", large_mb * MIB)
        elif key == "max_split_size_mb":
            values["max_split_bytes"] = _whole(key, value, large_mb) * MIB
        elif key == "max_non_split_rounding_mb":
            values["max_non_split_rounding_bytes"] = _whole(key, value, large_mb) * MIB
        elif key == "garbage_collection_threshold":
            values["garbage_collection_threshold"] = _share(key, value, closed=False)
        elif key == "per_process_memory_fraction":
            share = _share(key, value, closed=True)
            values["memory_fraction"] = share if share < 1 else None  # torch sets no limit for the whole
        elif key == "roundup_power2_divisions":
            values["roundup_divisions"] = _divisions(key, value)
        elif key == "expandable_segments":
            values["expandable_segments"] = _truth(key, value)
        elif key == "backend":
            if value != "native":
                raise BadInputError(
                    f"allocator settings: backend is {value[:40]!r}, and only native is PyTorch's caching allocator: "
                    f"leave it out, or choose another model."
                )
        elif key in _INERT:
            _truth(key, value) if _INERT[key] is bool else _whole(key, value, 0)
        else:
            raise BadInputError(
                f"allocator settings: {key[:40]!r} is none of torch's keys: expected max_split_size_mb, "
                f"roundup_power2_divisions, garbage_collection_threshold, expandable_segments or another of its list."
            )
    return TorchSettings(**values)  # type: ignore[arg-type]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Key and value of each pair; commas and colons within brackets belong to the value."""
    pairs = []
    for part in split_conf(text.removesuffix(",")) if text else ():
        match = _PAIR.fullmatch(part)
        if not match:
            raise BadInputError(
                f"allocator settings: {part[:40]!r} is not key:value: write e.g. max_split_size_mb:128."
            )
        pairs.append((match[1], match[2]))
    return pairs


def _whole(key: str, value: str, lowest: int) -> int:
    if not re.fullmatch(r"\d{1,12}", value) or int(value) < lowest:
        raise BadInputError(f"allocator settings: {key} is {value[:40]!r}, expected a whole number from {lowest}.")
    return int(value)


def _share(key: str, value: str, closed: bool) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not (0 <= share <= 1 if closed else 0 < share < 1):
        shape = "from 0 to 1" if closed else "between 0 and 1, both excluded"
        raise BadInputError(f"allocator settings: {key} is {value[:40]!r}, expected a number {shape}.")
    return share


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise BadInputError(f"allocator settings: {key} is {value[:40]!r}, expected True or False.")
    return value == "True"


def _power(key: str, value: str, zero: bool) -> int:
    number = _whole(key, value, 0 if zero else 1)
    if number & (number - 1):
        raise BadInputError(f"allocator settings: {key} holds {value[:40]!r}, expected a power of two.")
    return number


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or `[256:1,512:2,>:8]`: MiB boundary to divisions, > for all above the last."""
    if not value.startswith("["):
        return (_power(key, value, zero=False),) * NUM_INTERVALS
    table, last, first = [0] * NUM_INTERVALS, 0, True
    for part in filter(None, value[1:-1].split(",")):
        boundary, colon, number = part.partition(":")
        if not colon:
            raise BadInputError(f"allocator settings: {key} holds {part[:40]!r}, expected boundary:divisions.")
        divisions = _power(key, number, zero=True)
        if boundary == ">":
            table[last + 1 :] = [divisions] * (NUM_INTERVALS - last - 1)
            continue
        index = min(_power(key, boundary, zero=False).bit_length() - 1, NUM_INTERVALS - 1)
        if first:
            table[:index] = [divisions] * index
            first = False
        table[index] = divisions
        last = index
    return tuple(table)
