"""What DeepSpeed prints of a training: the breakdown of wall clock time, and what `see_memory_usage` says.

    [2023-06-21 07:39:09,443] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd_microstep: 27.41 | …
    [2023-06-21 07:39:09,533] [INFO] [utils.py:803:see_memory_usage] MA 0.31 GB         Max_MA 0.31 GB         CA 13.0…
    [2023-06-21 07:39:09,534] [INFO] [utils.py:810:see_memory_usage] CPU Virtual Memory:  used = 200.19 GB, percent = 7…

Contract: phases last exactly as long as is printed, one behind the other, and end when the line was printed, where it
says when; parts of a phase are `backward/allreduce` and those of the optimizer. A rank is a device. Older versions say
`forward` and `backward` for `fwd` and `bwd`, and newer ones print times without a date. Max_MA is the peak since the
line before, so it is put in the middle between the two; Max_CA is rounded to whole GB and not used.
"""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from stalloc.errors import BadInputError
from stalloc.trace.activity import Activity, Held, MemoryKind, PhaseRun, activity_of

_TIMES = re.compile(
    rb"(?:\[Rank (\d{1,6})\] )?(?:rank=\d{1,6} )?time \(ms\)((?: \| \w{1,60}: \d{1,12}(?:\.\d{1,6})?)+)"
)
_TIME = re.compile(rb" \| (\w+): (\d+(?:\.\d+)?)")
_DATE = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]")
_GB = rb"(\d{1,7}\.?\d{0,6}) GB"
_DEVICE = re.compile(rb"MA %s\s+Max_MA %s\s+CA %s\s+Max_CA " % (_GB, _GB, _GB))
_HOST = re.compile(rb"CPU Virtual Memory:\s+used = " + _GB)
_OTHER = re.compile(rb"\s*(?:[\x80<{]|\[\s*[\[{])")
_SAYS = (b" time (ms) | ", b"see_memory_usage] ", b"\ntime (ms) | ")
_SHORT = {b"fwd": "forward", b"forward": "forward", b"bwd": "backward", b"backward": "backward", b"step": "update"}
_MICRO = b"_microstep"


def looks_like_deepspeed_log(data: bytes) -> bool:
    """Whether it is a text, no JSON or page or pickle, that has lines of DeepSpeed's."""
    return not _OTHER.match(data) and any(word in data for word in _SAYS)


@dataclass
class _Rank:
    """What one rank said: phases, each with its parts, in nanoseconds."""

    micro: list[tuple[int, dict[str, int]]] = field(default_factory=list)  #: of lines that tell of a microstep
    whole: list[tuple[int, dict[str, int]]] = field(default_factory=list)  #: of lines that tell of a step
    optimizer: dict[str, int] = field(default_factory=dict)  #: parts of the update of the line to come
    held: list[Held] = field(default_factory=list)
    told: int = -1  #: when its memory was told of last


def read_deepspeed_log(path: Path, data: bytes) -> dict[int, Activity]:
    """By rank, when its phases ran, and what it held. Raises BadInputError if the log says neither of any."""
    ranks: dict[int, _Rank] = {}
    for line in data.splitlines():
        if found := _TIMES.search(line):
            _note_times(ranks.setdefault(int(found[1] or 0), _Rank()), _moment(line), found[2])
        elif b"see_memory_usage]" in line and (moment := _moment(line)) >= 0:
            _note_memory(ranks.setdefault(0, _Rank()), moment, line)  # the first rank alone says so
    activities = {
        rank: activity_of([], _phases(one.micro or one.whole), one.held)
        for rank, one in sorted(ranks.items())
        if one.micro or one.whole or one.held
    }
    if not activities:
        raise BadInputError(
            f"{path}: a log of DeepSpeed without times and memory: set wall_clock_breakdown in its configuration."
        )
    return activities


def _moment(line: bytes) -> int:
    """Nanoseconds at which a line was printed; -1: it does not say."""
    found = _DATE.search(line)
    if not found:
        return -1
    try:
        whole = datetime.fromisoformat(found[1].decode()).replace(tzinfo=UTC)
    except ValueError:
        return -1
    return (int(whole.timestamp()) * 1000 + int(found[2])) * 1_000_000


def _note_times(rank: _Rank, moment: int, told: bytes) -> None:
    times = {name: round(float(value) * 1_000_000) for name, value in _TIME.findall(told)}
    micro = {name.removesuffix(_MICRO): value for name, value in times.items() if name.endswith(_MICRO)}
    whole = {name: value for name, value in times.items() if name in _SHORT}
    if micro:
        rank.micro.append((moment, _named(micro) | {f"update/{name}": one for name, one in rank.optimizer.items()}))
        rank.optimizer = {}
    elif whole:
        rank.whole.append((moment, _named(times)))
    else:
        rank.optimizer = {
            name.decode().removeprefix("optimizer_"): value
            for name, value in times.items()
            if name.startswith(b"optimizer_")
        }


def _named(times: dict[bytes, int]) -> dict[str, int]:
    """`bwd_allreduce` as `backward/allreduce`; what is no phase and no part of one is left out."""
    found = {}
    for name, value in times.items():
        phase, _, part = name.partition(b"_")
        if phase in _SHORT:
            found[_SHORT[phase] + (f"/{part.decode()}" if part else "")] = value
    return found


def _phases(steps: list[tuple[int, dict[str, int]]]) -> list[PhaseRun]:
    found: list[PhaseRun] = []
    begins = [  # where the line says when it was printed
        moment - sum(value for name, value in times.items() if "/" not in name) for moment, times in steps
    ]
    now = next((begin for begin, (moment, _) in zip(begins, steps, strict=True) if moment >= 0), 0)
    for begin, (_, times) in zip(begins, steps, strict=True):
        now = max(now, begin)
        for phase in ("forward", "backward", "update"):
            end = now + times.get(phase, 0)
            parts = [(name, value) for name, value in times.items() if name.startswith(f"{phase}/")]
            for name, value in parts:
                until = min(now + value, end)  # rounded figures may add up to more
                if until > now:
                    found.append(PhaseRun(now, until, name))
                now = until
            if end > now:
                found.append(PhaseRun(now, end, f"{phase}/rest" if parts else phase))
            now = end
    return found


def _note_memory(rank: _Rank, moment: int, line: bytes) -> None:
    if found := _DEVICE.search(line):
        allocated, highest, reserved = (round(float(value) * (1 << 30)) for value in found.groups())
        before = moment if rank.told < 0 else (rank.told + moment) // 2
        rank.held += [
            Held(before, MemoryKind.ALLOCATED, highest),
            Held(moment, MemoryKind.ALLOCATED, allocated),
            Held(moment, MemoryKind.RESERVED, reserved),
        ]
        rank.told = moment
    elif host := _HOST.search(line):
        rank.held.append(Held(moment, MemoryKind.HOST, round(float(host[1]) * (1 << 30))))
