"""Plans from traces and from tapes.

Contract: a plan made here passes the naive validator. In a program's plan requests of different streams never share
an address: each stream has a region of its own. A trace's plan takes all requests and ignores streams, since it says
where they could have lived, not where they will.
"""

import dataclasses
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stalloc import __version__
from stalloc.errors import BadInputError
from stalloc.planner.layout import plan_arrays
from stalloc.planner.record import Plan
from stalloc.planner.ring import ring_bound
from stalloc.trace import Trace

if TYPE_CHECKING:
    from stalloc.lifespans.tape import Tape


def plan(trace: Trace, *, alignment: int = 512, fold: Literal["auto", "never"] = "auto") -> Plan:
    """The plan of one device's trace.

    "auto": a recording of our own that repeats becomes a "program" plan, to be followed for ever; everything else,
    and everything with fold="never", a "trace" plan of the whole recording.

    Raises BadInputError for an alignment that is no power of two, or sizes beyond 2**61 bytes.
    """
    if fold not in ("auto", "never"):
        raise BadInputError(f"fold is {fold!r}: give 'auto' or 'never'.")
    provenance = _provenance(trace, alignment, fold)
    if fold == "auto" and trace.info.get("source") == "stalloc recorder":
        from stalloc.lifespans import tape as tapes  # only a recording of our own needs it

        tape = tapes.fold(trace)
        if tape is not None:
            program = plan_tape(tape, alignment, device=trace.device)
            return dataclasses.replace(
                program,
                offset=tapes.expand(tape, program.tape_offset, trace),
                size=trace.size,
                start=trace.start,
                end=trace.end,
                stream=trace.stream,
                tape_row=tape.row,
                provenance=provenance,
            )
    layout = plan_arrays(trace.start, trace.end, trace.size, alignment=alignment)
    return Plan(
        offset=layout.offset,
        size=trace.size,
        start=trace.start,
        end=trace.end,
        stream=trace.stream,
        device=trace.device,
        alignment=alignment,
        peak_bytes=layout.peak_bytes,
        lower_bound_bytes=layout.lower_bound_bytes,
        optimal=layout.peak_bytes == layout.lower_bound_bytes,
        method=layout.method,
        kind="trace",
        provenance=provenance,
    )


def plan_tape(tape: "Tape", alignment: int = 512, *, device: int = 0) -> Plan:
    """The "program" plan of a tape; its rows are the tape's entries, those not `planned` with offset -1."""
    offset = np.full(len(tape.size), -1, np.int64)
    region, methods = 0, []
    planned = np.flatnonzero(tape.planned)
    for stream in np.unique(tape.stream[planned]):
        rows = planned[tape.stream[planned] == stream]
        layout = plan_arrays(
            tape.start[rows],
            tape.end[rows],
            tape.size[rows],
            alignment=alignment,
            ring=(tape.ring_start, tape.ring_end),
        )
        offset[rows] = region + layout.offset
        region += layout.peak_bytes
        methods.append(layout.method)
    rounded = (tape.size + (alignment - 1)) & -alignment
    counted = planned[(rounded[planned] > 0) & (tape.start[planned] < tape.end[planned])]
    bound = ring_bound(tape.start[counted], tape.end[counted], rounded[counted], tape.ring_start, tape.ring_end)
    return Plan(
        offset=offset,
        size=tape.size,
        start=tape.start,
        end=tape.end,
        stream=tape.stream,
        device=device,
        alignment=alignment,
        peak_bytes=region,
        lower_bound_bytes=bound,
        optimal=region == bound,
        method="; ".join(methods) or "nothing to place",
        kind="program",
        provenance={"stalloc": __version__},
        num_prologue=tape.num_prologue,
        ring_start=tape.ring_start,
        ring_end=tape.ring_end,
        tape_row=np.arange(len(tape.size), dtype=np.int64),
        tape_size=tape.size,
        tape_stream=tape.stream,
        tape_start=tape.start,
        tape_end=tape.end,
        tape_offset=offset,
    )


def _provenance(trace: Trace, alignment: int, fold: str) -> dict[str, Any]:
    """What the plan was made from: the origin that the trace names, the options, the version."""
    return {
        "source": str(trace.info.get("source", "")),
        "file": PurePath(str(trace.info.get("file", ""))).name,
        "options": {"alignment": alignment, "fold": fold},
        "stalloc": __version__,
    }
