"""Compile what the verbs use, by using them on a small program: for the wheel, which carries the result.

Contract: run as `python -m stalloc.cli.precompile FOLDER`; what is compiled lies below FOLDER afterwards, and nothing
else is left. The code is made for every processor of this kind, not just for this one. Without FOLDER it is made for
this processor, and kept where any first use keeps it. It is not all that there is: what the small program does not
reach is compiled where it is used, and kept there.

Two processes share the work: one compiles the core, the other the planner and the models. What several functions of
the core call is compiled once for all of them, which takes half as long as to compile each where it is first used.
"""

import contextlib
import itertools
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stalloc.sizes import MIB, aligned

_SEGMENT = 1 << 40  # address of the one segment of the small program
_SEGMENT_BYTES = 512 * MIB
_NUM_STEPS = 12
_SIZES = (1024, 300_000, 3 * MIB, 7 * MIB, 700, 24 * MIB)  # of what a step allocates, and frees in reverse


def small_snapshot() -> dict[str, Any]:
    """A memory snapshot as torch writes it: equal steps on two streams, with one block that stays, then an error."""
    bottom = _SEGMENT + MIB  # above the block that stays
    events = [_event("segment_alloc", _SEGMENT, _SEGMENT_BYTES, 0), _event("alloc", _SEGMENT, MIB, 0)]
    sizes = 3 * _SIZES
    addresses = itertools.accumulate(map(aligned, sizes[:-1]), initial=bottom)
    blocks = [(address, size, n % 4 == 3) for n, (address, size) in enumerate(zip(addresses, sizes, strict=True))]
    for _ in range(_NUM_STEPS):
        events += [_event("alloc", *block) for block in blocks]
        for block in reversed(blocks):
            events += [_event("free_requested", *block), _event("free_completed", *block)]
    events.append(_event("oom", 4 * MIB, _SEGMENT_BYTES - 2 * MIB, 0) | {"device_free": 4 * MIB})
    segment = {
        "device": 0,
        "address": _SEGMENT,
        "total_size": _SEGMENT_BYTES,
        "stream": 0,
        "segment_type": "large",
        "blocks": [
            {"address": _SEGMENT, "size": MIB, "requested_size": MIB, "state": "active_allocated"},
            {"address": bottom, "size": _SEGMENT_BYTES - MIB, "requested_size": 0, "state": "inactive"},
        ],
    }
    return {"segments": [segment], "device_traces": [events], "allocator_settings": {}}


def _event(action: str, address: int, size: int, stream: int) -> dict[str, Any]:
    frames = [{"filename": "train.py", "line": 1, "name": "step"}]
    return {"action": action, "addr": address, "size": size, "stream": int(stream), "frames": frames, "time_us": 0}


def irregular_lifespans() -> str:
    """Lifespans without steps, as planning CSV: requests that never repeat are served and freed without a plan."""
    import numpy as np

    random = np.random.default_rng(1)
    start, size = random.integers(0, 2000, 400), np.exp2(random.uniform(9, 28, 400)).astype(np.int64)
    end = start + random.integers(1, 200, 400)
    rows = [",".join(map(str, row)) for row in zip(range(400), start, end, size, strict=True)]
    return "\n".join(["id,lower,upper,size", *rows, ""])


def precompile(folder: Path | None) -> None:
    """Compile, and keep the code in a folder, if given. Raises SystemExit where a verb fails."""
    if folder is not None:
        os.environ |= {"NUMBA_CACHE_DIR": str(folder), "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    import numba  # noqa: F401  (once for both)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the other process says that it compiles
            _compile_core()
            code = 0
        finally:
            os._exit(code)
    try:
        _compile_the_rest()
    finally:
        _, status = os.waitpid(child, 0)
    if status:
        _compile_core()  # which says why
    with _small_program() as (_, snapshot):
        _use_verbs(["explain", snapshot], ["simulate", "--all", snapshot])  # which need both


def _compile_core() -> None:
    """What serves requests, and what a program on a GPU asks for meanwhile."""
    from numba import types

    from stalloc.core import (
        arena,
        counters,
        frees,
        graph_loans,
        handovers,
        heap,
        lookup,
        pages,
        requests,  # noqa: F401  (it compiles its own)
        schedule_cursor,
        segments,
    )

    of_numbers = (
        *(arena.arena_is_idle, arena.forget_arena),
        *(heap.find_place, heap.find_range, heap.is_idle),
        *(graph_loans.begin_borrowing, graph_loans.begin_launch, graph_loans.end_borrowing, graph_loans.end_launch),
        *(graph_loans.forget_lent, graph_loans.hold, graph_loans.lend_no_more, graph_loans.let_lend),
        *(handovers.end_sharing, counters.take_peak, pages.keep_ranges, segments.give_segment),
        *(schedule_cursor.end_known_step, schedule_cursor.end_known_steps, schedule_cursor.expect_steps),
        *(segments.unpin_pools, segments.wake_pools, frees.poll, pages.begin_stitch),
    )
    for function in of_numbers:
        function.compile((types.int64,) * function.py_func.__code__.co_argcount)
    for function in (lookup.forget_streams, frees.give_events):
        function.compile((types.int64, types.int64[::1]))
    with _small_program() as (folder, snapshot):
        irregular = folder / "irregular.csv"
        irregular.write_text(irregular_lifespans(), encoding="utf-8")
        _use_verbs(
            ["simulate", "--allocator", "stalloc", snapshot],
            ["simulate", "--allocator", "stalloc", "--capacity", "32MiB", snapshot],
            ["simulate", "--allocator", "stalloc", str(irregular)],
        )


def _compile_the_rest() -> None:
    """The planner, what reads traces, and the models of other allocators."""
    from stalloc.replay import ALLOCATORS

    plan_at_random()
    models = [word for model in ALLOCATORS if model != "stalloc" for word in ("--allocator", model)]
    with _small_program() as (folder, snapshot):
        plan, csv, timeline = (str(folder / f"small.{form}") for form in ("plan.npz", "csv", "json"))
        _use_verbs(
            ["stats", snapshot],
            ["top", snapshot],
            ["plan", snapshot, "-o", plan],
            ["validate", plan, snapshot],
            ["convert", snapshot, csv],
            ["convert", snapshot, timeline],
            ["stats", timeline],
            ["simulate", *models, snapshot],
        )


@contextlib.contextmanager
def _small_program() -> Iterator[tuple[Path, str]]:
    """A folder, and the file of `small_snapshot` in it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.pickle"
        file.write_bytes(pickle.dumps(small_snapshot(), protocol=4))
        yield Path(folder), str(file)


def _use_verbs(*commands: list[str]) -> None:
    from stalloc.cli import main

    for arguments in commands:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            if code := main(arguments):
                raise SystemExit(f"stalloc {' '.join(arguments)} ended with {code}")


def plan_at_random() -> None:
    """Plan lifespans that need all of the planner's ways to search."""
    import numpy as np

    from stalloc.planner import plan

    random = np.random.default_rng(1)
    for count in (20, 200):
        start = random.integers(0, 4 * count, count)
        columns = start, start + random.integers(1, count, count), random.integers(1, 1000, count) * 512
        for method in ("auto", "colouring"):
            plan(columns, method=method)


if __name__ == "__main__":
    precompile(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
