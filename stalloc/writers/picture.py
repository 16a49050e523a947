"""A device as a picture for papers and CI, by matplotlib, in the page's colours: load, map, charts of its study."""

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.analysis.holders import class_keys
from stalloc.analysis.offload_study import Series
from stalloc.analysis.study_findings import copies_text
from stalloc.analysis.study_record import PartUse
from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, human_seconds
from stalloc.files import whole
from stalloc.printable import printable
from stalloc.sizes import ALIGNMENT_BYTES, GIB, MIB
from stalloc.trace import DeviceRecord, Trace
from stalloc.writers.page.address_map import AddressMap, detail_levels, planned_map, recorded_map
from stalloc.writers.page.story import Drawn, drawn_study
from stalloc.writers.palettes import FRAME, HOLE, INK, OKABE_ITO

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
    live = trace.live_bytes(size)[1:]
    every = max(1, -(-len(live) // _COLUMNS))  # of each stretch, the event at which most lives
    padded = np.pad(live, (0, -len(live) % every), constant_values=-1)
    at = np.argmax(padded.reshape(-1, every), axis=1) + np.arange(0, len(padded), every)
    series = [trace.live_bytes(np.where(kind == number, size, 0))[1:][at] / GIB for number in range(len(names))]
    if series:
        colors = [OKABE_ITO[number % len(OKABE_ITO)] for number in range(len(names))]
        axes.stackplot(at, *series, labels=names, colors=colors, linewidth=0)
    if len(trace.action) and trace.reserved_bytes().max(initial=0):
        axes.step(at, trace.reserved_bytes()[at] / GIB, where="post", color=INK, linewidth=1, label="reserved")
    axes.set(xlim=(0, events), ylim=(0, None), xlabel="event", ylabel="GiB")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=6)


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


_SPLIT = (
    ("computes", "compute_seconds", OKABE_ITO[0]),
    ("copies", "copy_seconds", OKABE_ITO[1]),
    ("both", "overlap_seconds", OKABE_ITO[2]),
    ("idle", "idle_seconds", HOLE),
)
_LINKS = {
    "host to device": OKABE_ITO[5],
    "device to host": OKABE_ITO[4],
    "device to device": OKABE_ITO[3],
    "disk read": OKABE_ITO[6],
    "disk write": OKABE_ITO[2],
}
_ALLOCATED, _HOST = OKABE_ITO[0], OKABE_ITO[3]
_MIN_ROWS, _MAX_PARTS = 3, 30
_DRAWN_BYTES = 1 << 20  # below which memory of the host and traffic over time would be an empty picture
Panel = Callable[[Any], None]


def panels(drawn: Drawn) -> list[Panel]:
    """What to draw, each into axes of its own."""
    found, series = drawn.found, drawn.series
    chosen: list[Panel] = []
    if found.knows_computing:
        chosen.append(lambda axes: _time(axes, drawn))
    if series is None:
        chosen.append(lambda axes: _memory_by_phase(axes, drawn))
    elif _drawn_levels(series):
        chosen.append(lambda axes: _memory_over_time(axes, drawn, series))
    if series is not None and any((link.num_bytes or 0) >= _DRAWN_BYTES for link in found.links):
        chosen.append(lambda axes: _traffic(axes, drawn, series))
    if found.links:
        chosen += [lambda axes: _by_phase(axes, drawn), lambda axes: _sizes(axes, drawn)]
    if any(phase.headroom_bytes is not None for phase in found.phases):
        chosen.append(lambda axes: _headroom(axes, drawn))
    if found.parts:
        chosen.append(lambda axes: _parts(axes, drawn) if found.has_times else _parts_moved(axes, drawn))
    return chosen


def _rows(axes: Any, names: list[str], said: list[str], ends: list[float]) -> None:
    """Names in front of horizontal bars, and what is said behind them."""
    axes.set_yticks(range(len(names)), [printable(name, 28) for name in names])
    axes.set_ylim(max(len(names), _MIN_ROWS) - 0.5, -0.5)
    for row, (text, end) in enumerate(zip(said, ends, strict=True)):
        axes.text(end, row, f"  {text}", va="center", fontsize=8)
    axes.set_xlim(0, 1.9 * max([*ends, 1e-12]))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _bars(axes: Any, title: str, bars: list[tuple[str, float, str, str]]) -> None:
    """Horizontal bars: the name, length and colour of each, and what is said behind it."""
    lengths = [length for _, length, _, _ in bars]
    axes.barh(range(len(bars)), lengths, color=[color for _, _, color, _ in bars], height=0.6)
    _rows(axes, [name for name, *_ in bars], [said for *_, said in bars], lengths)
    axes.set_title(title, fontsize=10)


def _time(axes: Any, drawn: Drawn) -> None:
    phases = drawn.found.phases
    left = np.zeros(len(phases))
    for name, part, color in _SPLIT:
        width = np.array([getattr(phase, part) for phase in phases])
        axes.barh(range(len(phases)), width, left=left, color=color, label=name, height=0.6)
        left += width
    said = [human_seconds(phase.seconds) + (f" in {phase.runs} runs" if phase.runs > 1 else "") for phase in phases]
    _rows(axes, [phase.name for phase in phases], said, left.tolist())
    axes.set_title("time of each phase", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _over_time(axes: Any, drawn: Drawn, series: Series, count: int) -> Any:
    """The milliseconds at which each stretch begins, on axes with the phases as shades."""
    total = 1e3 * drawn.found.seconds
    names = list(dict.fromkeys(name for name, _, _ in drawn.found.stretches))
    for name, begin, end in drawn.found.stretches:
        left, right = 1e3 * begin, 1e3 * end
        axes.axvspan(left, right, color=INK, alpha=0.1 if names.index(name) % 2 else 0.03, linewidth=0)
        if right - left > 0.012 * len(name) * total:
            above = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 7}
            axes.text((left + right) / 2, 1.0, printable(name), **above)
    axes.set(xlim=(0, total), xlabel="ms")
    return np.arange(count) * 1e3 * series.stretch_seconds


def _legend_below(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.25))


def _most(values: list[int | None]) -> int:
    return max((one for one in values if one is not None), default=0)


def _drawn_levels(series: Series) -> dict[str, list[int | None]]:
    levels = series.memory_bytes.items()
    return {kind: values for kind, values in levels if kind != "host" or _most(values) >= _DRAWN_BYTES}


def _memory_over_time(axes: Any, drawn: Drawn, series: Series) -> None:
    known = _drawn_levels(series)
    most = max(map(_most, known.values()))
    unit, name = (GIB, "GiB") if most >= 0.1 * GIB else (MIB, "MiB")
    looks = {"allocated": _ALLOCATED, "reserved": INK, "host": _HOST}
    moments = _over_time(axes, drawn, series, len(next(iter(known.values()))))
    for kind, counted in known.items():
        values = np.array(counted, float)  # not a number where it is not known
        if kind == "allocated":
            axes.fill_between(moments, values / unit, step="post", color=looks[kind], linewidth=0, label=kind)
        else:
            axes.step(moments, values / unit, where="post", color=looks[kind], linewidth=1, label=kind)
    axes.set(ylim=(0, None), ylabel=name)
    axes.set_title("memory", fontsize=10, pad=14)
    _legend_below(axes)


def _memory_by_phase(axes: Any, drawn: Drawn) -> None:
    bars = [
        (phase.name, float(size), color, f"{human_bytes(size)} {name}")
        for phase in drawn.found.phases
        for name, size, color in (("allocated", phase.allocated_bytes, _ALLOCATED), ("host", phase.host_bytes, _HOST))
        if size
    ]
    _bars(axes, "memory of each phase, at the most", bars)


def _traffic(axes: Any, drawn: Drawn, series: Series) -> None:
    shown = [link for link in drawn.found.links if (link.num_bytes or 0) >= _DRAWN_BYTES]
    moments = _over_time(axes, drawn, series, len(series.link_bytes_per_second[shown[0].link]))
    for link in shown:
        color = _LINKS[link.link]
        rate = np.array(series.link_bytes_per_second[link.link]) / GIB
        used = "" if link.used is None else f", used to {link.used:.1%}"
        axes.fill_between(moments, rate, step="post", color=color, alpha=0.8, linewidth=0, label=f"{link.link}{used}")
        if link.peak_rate is not None:
            axes.axhline(link.peak_rate / GIB, color=color, linestyle="--", linewidth=1)
    axes.set(ylim=(0, None), ylabel="GiB/s")
    kind = "estimated" if drawn.found.is_estimated else "measured"
    axes.set_title(f"traffic; dashed: the {kind} peak", fontsize=10, pad=14)
    _legend_below(axes)


def _by_phase(axes: Any, drawn: Drawn) -> None:
    timed, bars = drawn.found.has_times, []
    for phase in drawn.found.phases:
        for link, size in phase.moved_bytes.items():
            used = f", {phase.link_used[link]:.1%}" if timed and link in phase.link_used else ""
            bars.append((phase.name, float(size), _LINKS[link], f"{human_bytes(size)} {link}{used}"))
    _bars(axes, "traffic by phase" + (", and how far the link is used" if timed else ""), bars)


def _sizes(axes: Any, drawn: Drawn) -> None:
    timed, bars = drawn.found.has_times, []
    for one in drawn.found.sizes:
        length = (one.rate or 0.0) if timed else float(one.num_bytes or 0)
        said = f"{human_bytes(round(length))}{'/s' if timed else ''}: {copies_text(one.copies)} {one.link}"
        bars.append((one.size, length, _LINKS[one.link], said))
    _bars(axes, "copies by size" + (", and the rate that they reach" if timed else ""), bars)


def _headroom(axes: Any, drawn: Drawn) -> None:
    total = drawn.found.total_bytes or 0
    left = [(phase, phase.headroom_bytes) for phase in drawn.found.phases if phase.headroom_bytes is not None]
    held = [total - size for _, size in left]
    axes.barh(range(len(left)), held, color=OKABE_ITO[0], height=0.6)
    axes.barh(range(len(left)), [size for _, size in left], left=held, color=HOLE, height=0.6)
    said = [f"{human_bytes(size)} left" for _, size in left]
    _rows(axes, [phase.name for phase, _ in left], said, [float(total)] * len(left))
    axes.set_title("headroom of each phase", fontsize=10)


def _parts(axes: Any, drawn: Drawn) -> None:
    parts = _last_phase(drawn)
    start = [1e3 * part.start_seconds for part in parts]
    axes.barh(range(len(parts)), [1e3 * part.seconds for part in parts], left=start, color=HOLE, height=0.6)
    computes = [1e3 * part.compute_seconds for part in parts]
    axes.barh(range(len(parts)), computes, left=start, color=OKABE_ITO[0], height=0.6)
    names = [printable(f"{part.phase}/{part.name}", 28) for part in parts]
    axes.set_yticks(range(len(parts)), names, fontsize=min(9, 100 / len(parts)))
    axes.set(xlabel="ms", ylim=(max(len(parts), _MIN_ROWS) - 0.5, -0.5))
    axes.set_title(f"subgroups of {printable(parts[0].phase)}; blue: computes", fontsize=10)


def _last_phase(drawn: Drawn) -> list[PartUse]:
    """The subgroups of the phase that has them last, which is the update where there is one; as many as can be read."""
    phase = drawn.found.parts[-1].phase
    return [part for part in drawn.found.parts if part.phase == phase][:_MAX_PARTS]


def _parts_moved(axes: Any, drawn: Drawn) -> None:
    bars = [
        (f"{part.phase}/{part.name}", float(size), _LINKS[link], f"{human_bytes(size)} {link}")
        for part in _last_phase(drawn)
        for link, size in part.moved_bytes.items()
    ]
    _bars(axes, "what subgroups move", bars[:_MAX_PARTS])
