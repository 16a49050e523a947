"""PYTORCH_ALLOC_CONF: which of torch's variables counts, its pairs of key and value, and what they say.

Contract: what torch 2.11 refuses `parse_settings` refuses with one sentence, and what it takes means the same. Settings
that touch only pinned host memory or locking are taken and change nothing. numpy is not imported.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stalloc.errors import BadInputError
from stalloc.sizes import MIB

#: in torch's order of precedence: it reads the first of these that is set
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_FIRST_WITH_NEW_NAME = 2, 9  # releases of torch before it read the second and third only


def release_number(release: str) -> tuple[int, int] | None:
    """The first two numbers of a release of torch ("2.11.0+cu130"); None for what is no release."""
    number = re.match(r"(\d{1,4})\.(\d{1,4})", release)
    return (int(number[1]), int(number[2])) if number is not None else None


def variables_read(release: str) -> tuple[str, ...]:
    """The variables that a release of torch ("2.11.0+cu130") looks at, in its order; of an unknown one, a new one's."""
    number = release_number(release)
    return VARIABLES[1:] if number is not None and number < _FIRST_WITH_NEW_NAME else VARIABLES


def variable_to_set(release: str) -> str:
    """The variable to name to somebody who runs a release of torch: of an unknown one the one that all of them read."""
    return variables_read(release)[0] if release else VARIABLES[1]


def has_expandable_segments(release: str) -> bool:
    """Whether a release of torch knows the setting, which those until 2.0 stop at; so does an unknown one."""
    number = release_number(release)
    return number is None or number >= (2, 1)


def conf_in_force(
    environment: Mapping[str, str] = os.environ, variables: Sequence[str] = VARIABLES
) -> tuple[str, dict[str, str]]:
    """The variable that torch goes by and its settings by name; ("", {}) if none is set."""
    for variable in variables:
        if text := environment.get(variable, ""):
            pairs = (part.partition(":") for part in _split(text))
            return variable, {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
    return "", {}


def conf_text(settings: Mapping[str, str]) -> str:
    return ",".join(f"{name}:{value}" for name, value in settings.items())


def only_this(conf: str) -> dict[str, str]:
    """The variables of an environment in which every release of torch goes by a text; empty ones are to be unset."""
    return dict.fromkeys(VARIABLES, "") | {VARIABLES[1]: conf}


def _split(text: str) -> list[str]:
    """The parts of a text between commas; a comma in brackets belongs to its part."""
    return re.split(r",(?![^\[]*\])", text)


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
    pairs = []
    for part in _split(text.removesuffix(",")) if text else ():
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
