"""One program, many allocators: what each would have reserved, how often it would have asked the device, and whether
the program would have fitted.

Contract: every model is fed the same events, from an empty device; figures are the models' own, to the byte. Where the
trace says what its allocator did, a model with the recorded settings is held against that event by event.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from stalloc.figures import fragmentation
from stalloc.lifespans import lower_bound
from stalloc.replay.model_events import events_of, of_torchs_allocator, recorded_conf
from stalloc.replay.protocol import Events, Kind
from stalloc.replay.registry import make
from stalloc.sizes import PAGE_BYTES, aligned, whole_pages
from stalloc.trace import Action, Trace

#: settings of torch's caching allocator that people try, and what they are for
SWEEP = (
    "",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "max_split_size_mb:1024",
    "roundup_power2_divisions:2",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "roundup_power2_divisions:4,max_split_size_mb:128",
    "max_split_size_mb:128,max_non_split_rounding_mb:64",
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:8",
)
#: these do something only when memory is short
SWEEP_UNDER_PRESSURE = ("garbage_collection_threshold:0.6", "garbage_collection_threshold:0.8")


_CLOSE = 1000  # the least memory is known within one part in so many


@dataclass(frozen=True)
class Candidate:
    """An allocator with settings, written as `--conf` takes them."""

    allocator: str
    settings: str = ""

    @classmethod
    def named(cls, text: str) -> "Candidate":
        """NAME or NAME:SETTINGS, as people write it."""
        name, _, settings = text.partition(":")
        return cls(name, settings)


@dataclass(frozen=True)
class Simulated:
    """What one allocator would have done with one device's program."""

    allocator: str
    settings: str
    peak_reserved_bytes: int
    peak_allocated_bytes: int  #: the program's, rounded up to 512 bytes a request, as long as it was served
    fragmentation: float  #: 1 - allocated peak / reserved peak
    device_allocs: int
    device_frees: int
    retries: int
    fits: bool
    failed_event: int | None  #: event index of the first request that ran out of memory
    failed_bytes: int | None  #: what it asked for
    seconds: float
    exact: bool | None = None  #: agrees with the file's own record; None where that is not of this allocator
    first_difference: int | None = None  #: event index
    reason: str = ""  #: of the difference
    counts: dict[str, int] = field(default_factory=dict)  #: what only this model counts


def simulate(trace: Trace, candidates: Sequence[Candidate], capacity_bytes: int = 0) -> list[Simulated]:
    """Feed the program of a trace to each allocator, on an empty device of `capacity_bytes` (0: without limit).

    What was live before recording is allocated first. Best first: those that fit, by peak reserved bytes, then by
    calls to the device. Raises BadInputError for allocators and settings that do not exist.
    """
    events = program_of(trace, capacity_bytes)
    return ranked(_run_and_compare(trace, candidate, capacity_bytes, events) for candidate in candidates)


def ranked(results: Iterable[Simulated]) -> list[Simulated]:
    """The results, best first: what fits, then what reserves least, then what calls the device least."""
    return sorted(
        results,
        key=lambda r: (not r.fits, r.peak_reserved_bytes, r.device_allocs + r.device_frees, r.allocator, r.settings),
    )


def run_one(trace: Trace, candidate: Candidate, capacity_bytes: int = 0, events: Events | None = None) -> Simulated:
    """The result of one allocator, not compared with the record; `events` if they are not those of the trace."""
    events = events_of(trace) if events is None else events
    began = time.perf_counter()
    model = make(candidate.allocator, candidate.settings, capacity_bytes)
    fed = model.feed(events)
    seconds = time.perf_counter() - began
    counters = model.counters()
    done = len(events.kind) if fed.failed < 0 else fed.failed
    sign = (events.kind == int(Kind.ALLOC)).astype(np.int64) - (events.kind == int(Kind.FREE_COMPLETED))
    sizes = aligned(events.size)  # as torch rounds them, from alloc to free_completed
    allocated = int(np.cumsum((sign * sizes[events.request])[:done]).max(initial=0)) if len(sizes) else 0
    failed = fed.failed >= 0
    return Simulated(
        allocator=candidate.allocator,
        settings=candidate.settings,
        peak_reserved_bytes=counters.peak_reserved_bytes,
        peak_allocated_bytes=allocated,
        fragmentation=fragmentation(allocated, counters.peak_reserved_bytes),
        device_allocs=counters.device_allocs,
        device_frees=counters.device_frees,
        retries=counters.retries,
        fits=not failed,
        failed_event=int(events.event[fed.failed]) if failed else None,
        failed_bytes=int(events.size[events.request[fed.failed]]) if failed else None,
        seconds=round(seconds, 6),
        counts=dict(counters.more),
    )


def simulate_all(
    jobs: Sequence[tuple[Trace, Sequence[Candidate]]],
    capacity_bytes: int = 0,
    told: Callable[[], None] = lambda: None,
    num_threads: int = 2,
) -> list[list[Simulated]]:
    """`simulate` for several traces side by side (compiled models run without the GIL); `told` after each result."""

    def one(trace: Trace, candidate: Candidate, events: Events) -> Simulated:
        result = _run_and_compare(trace, candidate, capacity_bytes, events)
        told()
        return result

    with ThreadPoolExecutor(num_threads) as pool:
        running = []
        for trace, wanted in jobs:
            events = program_of(trace, capacity_bytes)
            running.append([pool.submit(one, trace, candidate, events) for candidate in wanted])
        return [ranked(future.result() for future in futures) for futures in running]


def program_of(trace: Trace, capacity_bytes: int = 0) -> Events:
    """What is replayed: the requests of the trace; on a device of a given size, of a program that ran out of memory,
    those up to the last error and the one that was refused, since without it anything would seem to fit.
    """
    errors = np.flatnonzero(trace.action == int(Action.OOM))
    if not capacity_bytes or not len(errors):
        return events_of(trace)
    last = int(errors[-1])
    return with_request(trace, last, int(trace.event_size[last]), int(trace.event_stream[last]))


def with_request(trace: Trace, at_event: int, size_bytes: int, stream: int) -> Events:
    """The program up to an event, followed by the request that ran out of memory."""
    events = events_of(trace)
    kept = np.flatnonzero(events.event < at_event)
    return events._replace(
        kind=np.append(events.kind[kept], np.int8(Kind.ALLOC)),
        request=np.append(events.request[kept], trace.num_requests),
        event=np.append(events.event[kept], at_event),
        size=np.append(events.size, size_bytes),
        stream=np.append(events.stream, stream),
    )


def _run_and_compare(trace: Trace, candidate: Candidate, capacity_bytes: int, events: Events) -> Simulated:
    """The result of one allocator; if that made the record, also whether the model does what the record says."""
    result = run_one(trace, candidate, capacity_bytes, events)
    recorded = recorded_conf(trace)
    if candidate.allocator != "torch" or candidate.settings != recorded or not of_torchs_allocator(trace):
        return result
    from stalloc.replay.torch_caching import check_record

    check = check_record(trace)
    return replace(result, exact=check.exact, first_difference=check.first_difference, reason=check.reason)


def least_memory(trace: Trace, candidate: Candidate) -> int:
    """About the least bytes, in multiples of 2 MiB, with which the allocator serves a trace.

    With these the replay was seen to complete; with much less it was seen to run out, or nothing less can be since so
    much is live at a time. An allocator that takes much when there is plenty may need little.
    """
    high = whole_pages(run_one(trace, candidate).peak_reserved_bytes)
    low = whole_pages(lower_bound(trace))  # no less can do
    if low >= high or run_one(trace, candidate, low).fits:
        return min(low, high)
    while high - low > max(PAGE_BYTES, high // _CLOSE):
        middle = whole_pages((low + high) // 2)
        if run_one(trace, candidate, middle).fits:
            high = middle
        else:
            low = middle
    return high
