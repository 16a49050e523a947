"""Load and map of a device as a picture for papers and CI: PNG, SVG or PDF, by matplotlib, in the page's colours."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.analysis.grouping import class_keys
from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.files import whole
from stalloc.sizes import ALIGNMENT_BYTES, GIB
from stalloc.trace import DeviceRecord, Trace
from stalloc.writers.drawn_study import drawn_study
from stalloc.writers.page.address_map import AddressMap, planned_map, recorded_map
from stalloc.writers.page.detail import detail_levels
from stalloc.writers.palettes import FRAME, HOLE, INK, OKABE_ITO
from stalloc.writers.study_picture import panels

FORMATS = ("png", "svg", "pdf")
_COLUMNS = 1200  # of detail: stretches of events that are told apart


def write_picture(path: Path, record: DeviceRecord, form: str) -> None:
    """Draw a device: what is allocated by lifespan class, what is reserved, and where it lives; and its study, if any.

    `form` is one of FORMATS. Raises BadInputError without matplotlib, and for a file that cannot be written; then what
    was there before is still there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadInputError(
            "pictures are drawn by matplotlib: pip install 'stalloc[report]', or write a page or Markdown."
        ) from error
    drawn = drawn_study(record)
    charts = panels(drawn) if drawn is not None else []
    heights = [7.0] * (record.trace is not None) + [2.4 * -(-len(charts) // 2)] * bool(charts)
    if not heights:
        raise BadInputError(
            f"device {record.device} has neither memory nor kernels nor copies: there is nothing to draw."
        )
    figure: Any = Figure(figsize=(11, sum(heights)), layout="constrained")
    parts = list(np.atleast_1d(figure.subfigures(len(heights), 1, height_ratios=heights)))
    if record.trace is not None:
        _memory(parts[0], record.trace)
    if charts and drawn is not None:
        if drawn.found.is_estimated or not drawn.found.has_times:
            parts[-1].suptitle(drawn.findings[0], fontsize=9)
        for axes, chart in zip_longest(parts[-1].subplots(-(-len(charts) // 2), 2, squeeze=False).flat, charts):
            if chart is None:
                axes.remove()
            else:
                chart(axes)
    with whole(path) as file:
        figure.savefig(file, format=form, dpi=160, metadata={"Date": None} if form == "svg" else None)


def _memory(figure: Any, trace: Trace) -> None:
    maps = [made for made in (recorded_map(trace), planned_map(trace)) if made is not None]
    upper, lower = figure.subfigures(2, 1, height_ratios=[2, 3])
    classes = class_keys(trace, np.arange(trace.num_requests))
    names = list(dict.fromkeys(str(key) for key in classes))
    kind = np.array([names.index(str(key)) for key in classes], np.int64)
    _load(upper.subplots(), trace, names, kind)
    for axes, made in zip(np.atleast_1d(lower.subplots(1, len(maps))), maps, strict=True):
        _map(axes, trace, made, kind)


def _load(axes: Any, trace: Trace, names: list[str], kind: Column) -> None:
    size, events = trace.aligned_size(), max(trace.num_events, 1)
    at = _highest(trace.live_bytes(size)[1:])
    series = [trace.live_bytes(np.where(kind == number, size, 0))[1:][at] / GIB for number in range(len(names))]
    if series:
        colors = [OKABE_ITO[number % len(OKABE_ITO)] for number in range(len(names))]
        axes.stackplot(at, *series, labels=names, colors=colors, linewidth=0)
    if len(trace.action) and trace.reserved_bytes().max(initial=0):
        axes.step(at, trace.reserved_bytes()[at] / GIB, where="post", color=INK, linewidth=1, label="reserved")
    axes.set(xlim=(0, events), ylim=(0, None), xlabel="event", ylabel="GiB")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=6)


def _highest(total: Column) -> Column:
    """The event at which most lives in each of _COLUMNS stretches."""
    every = max(1, -(-len(total) // _COLUMNS))
    padded = np.pad(total, (0, -len(total) % every), constant_values=-1)
    highest: Column = np.argmax(padded.reshape(-1, every), axis=1) + np.arange(0, len(padded), every)
    return highest


def _map(axes: Any, trace: Trace, made: AddressMap, kind: Column) -> None:
    from matplotlib.collections import PolyCollection

    def boxes(left: Column, right: Column, bottom: Column, top: Column) -> Any:
        corners = [(left, bottom), (left, top), (right, top), (right, bottom)]
        return np.stack([np.stack([x, y * ALIGNMENT_BYTES / GIB], axis=1) for x, y in corners], axis=1)

    size = trace.aligned_size()
    zoom = max(0, (max(trace.num_events, 1) // _COLUMNS).bit_length())
    rows = np.flatnonzero(detail_levels(trace.start, trace.end, size) >= zoom)
    begin, end, low, high = made.segments.T
    held = PolyCollection(boxes(begin, end, low, high), facecolors=HOLE, edgecolors=FRAME, linewidths=0.3)
    place = made.place[rows]
    blocks = PolyCollection(
        boxes(trace.start[rows] + 1, trace.end[rows] + 1, place, place + size[rows] // ALIGNMENT_BYTES),
        facecolors=np.array(OKABE_ITO)[kind[rows] % len(OKABE_ITO)],
        edgecolors="none",
    )
    for collection in (held, blocks):
        collection.set_rasterized(True)  # a vector drawing of every block would be larger than the trace
        axes.add_collection(collection)
    height = made.height * ALIGNMENT_BYTES
    axes.set(xlim=(0, max(trace.num_events, 1)), ylim=(0, height / GIB), xlabel="event", ylabel="GiB of addresses")
    axes.set_title(f"{made.name}: {human_bytes(height)}", fontsize=10)
