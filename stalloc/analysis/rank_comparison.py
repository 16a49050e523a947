"""The ranks of one job side by side: how far memory differs between them, which stand out, and which decides.

Contract: of a trace only figures are kept, so that a thousand ranks take no more memory than one. What a file does not
tell is None, and no figure of the comparison is made from it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median

import numpy as np

from stalloc.analysis.holders import class_keys, held_by
from stalloc.analysis.moments import recorded
from stalloc.trace import Trace

#: figures that are compared, as RankFigures names them and as people read them
COMPARED = {
    "allocated_bytes": "allocated at the end",
    "reserved_bytes": "reserved at the end",
    "allocated_peak_bytes": "allocated peak",
    "reserved_peak_bytes": "reserved peak",
    "persistent_bytes": "persistent at the peak",
    "scoped_bytes": "scoped at the peak",
    "transient_bytes": "transient at the peak",
}
#: as Iglewicz and Hoaglin advise (How to Detect and Handle Outliers, 1993), with the factor that goes with it
_MOST_SCORE, _SCORE_OF_DEVIATION = 3.5, 0.6745
#: of the median of the peak: where nearly all ranks are equal, any byte would stand out
_LEAST_SHARE = 0.01
_RANK = re.compile(r"rank[ _=-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,7})")


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One device of one rank's file."""

    file: str
    rank: int | None  #: None where neither the file's name nor the other names tell
    device: int
    requests: int
    allocated_bytes: int  #: live at the end of the record
    reserved_bytes: int | None
    allocated_peak_bytes: int  #: sizes rounded up to the alignment, with what is told only as a total
    reserved_peak_bytes: int | None
    persistent_bytes: int  #: live at the allocated peak, as are the next two
    scoped_bytes: int
    transient_bytes: int
    device_bytes: int | None  #: the total memory of the device
    out_of_memory_bytes: int | None  #: the bytes that the last out-of-memory error asked for; None if there was none

    @property
    def label(self) -> str:
        """The name that reports give the rank, without its device."""
        return f"rank {self.rank}" if self.rank is not None else self.file

    @property
    def used_share(self) -> float | None:
        """The allocated peak as a share of the device; None where that is not known."""
        return self.allocated_peak_bytes / self.device_bytes if self.device_bytes else None


@dataclass(frozen=True)
class Spread:
    """One figure over all ranks that tell it."""

    least: RankFigures
    median_bytes: int
    most: RankFigures
    imbalance: float | None  #: most over median; None where the median is 0


@dataclass(frozen=True)
class Outlier:
    """A figure in which one rank stands out."""

    rank: RankFigures
    figure: str  #: a key of COMPARED
    num_bytes: int
    median_bytes: int


@dataclass(frozen=True)
class RankComparison:
    """The comparison of all ranks: spreads of their figures, and ranks that stand out."""

    ranks: tuple[RankFigures, ...]
    spreads: dict[str, Spread]  #: by the key of COMPARED
    outliers: tuple[Outlier, ...]  #: the outliers, farthest from the median first
    deciding: RankFigures | None
    """The rank that a larger batch fails on first: the highest share of its device, else the highest peak."""


def rank_figures(file: str, rank: int | None, trace: Trace, alignment: int = 512) -> RankFigures:
    """The figures of one device, with sizes rounded up to `alignment` bytes."""
    size, told = trace.aligned_size(alignment), recorded(trace, alignment)
    live = trace.live_bytes(size)
    at = int(np.argmax(live)) - 1  # the first of `live` is before the first event
    at_peak = np.flatnonzero((trace.start <= at) & (trace.end > at))
    of_class = held_by(class_keys(trace, at_peak), size[at_peak])
    knows_reserved = told.reserved_peak_bytes is not None
    return RankFigures(
        file=file,
        rank=rank,
        device=trace.device,
        requests=trace.num_requests,
        allocated_bytes=int(size[trace.end >= trace.num_events].sum()) + told.unseen_bytes,
        reserved_bytes=int(trace.reserved_bytes()[-1]) if knows_reserved else None,
        allocated_peak_bytes=told.allocated_peak_bytes + told.unseen_bytes,
        reserved_peak_bytes=told.reserved_peak_bytes,
        persistent_bytes=of_class.get("persistent", (0, 0))[0],
        scoped_bytes=of_class.get("scoped", (0, 0))[0],
        transient_bytes=of_class.get("transient", (0, 0))[0],
        device_bytes=trace.info.get("total_bytes"),
        out_of_memory_bytes=told.out_of_memory_bytes,
    )


def number_ranks(files: Sequence[str]) -> list[int | None]:
    """The rank of each file: `rank3` in its name or a folder's, else the one number in which all names differ."""
    found = [_RANK.findall(file) for file in files]
    if all(found) and len({int(numbers[-1]) for numbers in found}) == len(files):
        return [int(numbers[-1]) for numbers in found]
    pieces = [_NUMBER.split(file) for file in files]
    if len({tuple(one[::2]) for one in pieces}) == 1:
        columns = list(zip(*(one[1::2] for one in pieces), strict=True))
        differing = [column for column in columns if len(set(column)) > 1]
        if len(differing) == 1 and len(set(map(int, differing[0]))) == len(files):
            return [int(number) for number in differing[0]]
    of_name = [_RANK.findall(PurePath(file).name) for file in files]
    return [int(numbers[-1]) if numbers else None for numbers in of_name]


def compare_ranks(ranks: Sequence[RankFigures]) -> RankComparison:
    """Compare ranks; one that stands out is far from the median by the deviation of all, and by 1 % of the peak."""
    spreads: dict[str, Spread] = {}
    outliers: list[tuple[float, Outlier]] = []
    worth_telling = _LEAST_SHARE * median([one.allocated_peak_bytes for one in ranks] or [0])
    for figure in COMPARED:
        known = [(value, one) for one in ranks if (value := getattr(one, figure)) is not None]
        if not known:
            continue
        values = [value for value, _ in known]
        middle = median(values)
        deviation = median(abs(value - middle) for value in values)
        most = max(known, key=lambda pair: pair[0])
        least = min(known, key=lambda pair: pair[0])
        spreads[figure] = Spread(least[1], round(middle), most[1], most[0] / middle if middle else None)
        for value, one in known:
            away = abs(value - middle)
            if away >= worth_telling and _SCORE_OF_DEVIATION * away > _MOST_SCORE * deviation:
                outliers.append((away, Outlier(one, figure, value, round(middle))))
    outliers.sort(key=lambda pair: -pair[0])
    by_share = all(one.used_share is not None for one in ranks)
    deciding = max(ranks, key=lambda one: one.used_share or 0.0 if by_share else one.allocated_peak_bytes, default=None)
    return RankComparison(tuple(ranks), spreads, tuple(one for _, one in outliers), deciding)
