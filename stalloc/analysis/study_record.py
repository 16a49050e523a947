"""What a study of copies and phases says of one device: frozen records, bytes and seconds, for whoever shows them.

Links are named as people read them: host to device, device to host, device to device, disk read, disk write.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """One phase, over all times that it ran."""

    name: str
    runs: int
    seconds: float
    compute_seconds: float  #: alone
    copy_seconds: float  #: alone
    overlap_seconds: float
    idle_seconds: float  #: in which neither the device nor its links work
    host_compute_seconds: float
    moved_bytes: dict[str, int]  #: by link
    link_used: dict[str, float]  #: by link, as a share of what its measured peak rate could have moved
    allocated_bytes: int | None  #: the most
    reserved_bytes: int | None
    headroom_bytes: int | None  #: the least that the device had left; an upper bound if reserved memory is unknown
    host_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """One link over the whole record."""

    link: str
    copies: int
    num_bytes: int | None  #: None: the file does not say
    busy_seconds: float
    rate: float | None  #: bytes a second while a copy ran
    peak_rate: float | None
    used: float | None  #: share of what the peak rate could have moved in the whole time


@dataclass(frozen=True, kw_only=True)
class SizeUse:
    """Copies of one link of about one size."""

    link: str
    size: str
    copies: int
    num_bytes: int | None
    rate: float | None


@dataclass(frozen=True, kw_only=True)
class PartUse:
    """A part of a phase, such as a subgroup of the update, in all times that it ran."""

    phase: str
    name: str
    runs: int
    start_seconds: float  #: of its first run, from the beginning of the study
    seconds: float
    compute_seconds: float  #: of the device or the host
    moved_bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Blocking:
    """Copies that the program stood still for."""

    copies: int
    num_bytes: int
    copy_seconds: float
    pageable_bytes: int  #: the part of `num_bytes` in pageable host memory
    stood_seconds: float  #: in the calls that asked for them, which may wait for earlier work as well


@dataclass(frozen=True, kw_only=True)
class AsReady:
    """The recorded work as if each piece began once what it needs is on the device and its queue is free.

    What one copy leaves in host memory for another is not known, so what needs that may have to wait longer.
    """

    seconds: float
    copy_seconds: float  #: of copies alone
    more_bytes: int  #: the most by which earlier copies to the device would raise what is held there


@dataclass(frozen=True, kw_only=True)
class Study:
    """The study of one device: what it computed, copied and held over time."""

    device: int
    device_name: str
    total_bytes: int | None
    is_estimated: bool  #: whether the times are those of a GPU that is not there
    headroom_is_bound: bool  #: whether headroom is only an upper bound, as not all that was held is known
    has_times: bool  #: whether seconds and rates mean anything: not on a virtual GPU, which computes nothing
    begin_ns: int
    seconds: float
    phases: list[PhaseUse]  #: in the order in which they first ran
    stretches: list[tuple[str, float, float]]  #: name of the phase, begin and end in seconds
    links: list[LinkUse]
    sizes: list[SizeUse]
    parts: list[PartUse]
    blocking: Blocking | None
    missed_overlap_seconds: float  #: of copies alone: what could have run while their phase computed alone, at most
    missed_across_seconds: float  #: of copies alone: what could have run while any phase computed alone, at most
    as_ready: AsReady | None  #: how much of that overlap the operations permit; None if dependencies are unknown
    missing: list[str]

    @property
    def knows_computing(self) -> bool:
        """Whether it is known when the device computes; otherwise overlap and idle time are unknown too."""
        return self.has_times and any(phase.compute_seconds + phase.overlap_seconds for phase in self.phases)


def as_json(found: Study) -> dict[str, Any]:
    """A study as plain values for JSON, with null for times that say nothing."""
    entry = dataclasses.asdict(found)
    return entry if found.has_times else _without_times(entry)


def _without_times(value: Any, name: str = "") -> Any:
    if name == "stretches":
        return []
    if isinstance(value, dict):
        return {key: _without_times(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_times(one) for one in value]
    return None if name.endswith(("seconds", "rate", "used", "_ns")) else value
