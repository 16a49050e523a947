"""What every model upholds, whatever its rules: random programs, fed in one piece and in many."""

import dataclasses
import itertools
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from stalloc.errors import BadInputError
from stalloc.replay import Allocator, BlockMap, Events, Fed, Kind
from stalloc.replay.registry import ALLOCATORS, make

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: model, settings, bytes that it keeps when all is freed and the cache is emptied (None: at most what it held)
MODELS = [
    ("cupy", "", 0),
    ("cupy", "limit:96MiB", 0),
    ("gmlake", "", 0),
    ("gmlake", "fragmentation_limit:0", 0),
    ("gmlake", "fragmentation_limit:4MiB,smallest_part:4MiB,stitch_limit:200MiB,allocate_and_stitch:0", 0),
    ("bfc", "", None),
    ("bfc", "growth:0,limit:128MiB,max_internal_fragmentation:1MiB", None),
    ("rmm_pool", "", None),
    ("rmm_pool", "initial:16MiB,maximum:256MiB", None),
    ("rmm_arena", "", None),
    ("rmm_arena", "size:160MiB", None),
    ("rmm_binning", "", None),
    ("rmm_binning", "smallest_exponent:9,largest_exponent:14,initial:16MiB", None),
    ("stream_ordered", "", 0),
    ("stream_ordered", "opportunistic:0,release_threshold:32MiB,synchronize_every:100", 0),
    ("tlsf", "", 0),
    ("tlsf", "region:1MiB,divisions:4", 0),
    ("contiguous", "", None),
    ("contiguous", "scoped_percent:20", None),
    ("compacting", "", 0),
    ("compacting", "move:0", 0),
    ("stalloc", "mode:plan", None),
    ("stalloc", "mode:observe", 0),
]
IDS = [f"{name}-{settings}".rstrip("-") for name, settings, _ in MODELS]


def each_model(first: int, after_last: int) -> pytest.MarkDecorator:
    """Every model with the first of some seeds, and slowly with the others."""
    rows = [
        pytest.param(
            name, settings, seeds, id=f"{ident}-{seeds.start}", marks=[pytest.mark.slow] * (seeds.start > first)
        )
        for (name, settings, _), ident in zip(MODELS, IDS, strict=True)
        for seeds in (range(first, first + 1), range(first + 1, after_last))
    ]
    return pytest.mark.parametrize(("name", "settings", "seeds"), rows)


def test_every_model_is_tested_here_or_against_torch() -> None:
    elsewhere = {"torch", "expandable"}  # tests/test_replay_torch*.py
    assert {name for name, _, _ in MODELS} | elsewhere == set(ALLOCATORS)


_TWICE = """
import numpy as np
from stalloc.replay import Events, Kind
from stalloc.replay.registry import make
for writeable in (True, False):
    kind, number = np.array([Kind.ALLOC], np.int8), np.array([0])
    events = Events(kind, number, number, np.array([1]), number)
    for column in (events.kind, events.size, events.stream):
        column.flags.writeable = writeable
    model = make("cupy", "", 0)
    assert model.feed(events).reserved_bytes.tolist() == [512]
print(len(type(model).driver.signatures))
"""


def test_columns_that_come_out_of_a_file_are_fed_by_the_same_compiled_code(
    run_program: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """They cannot be written, which is another type to numba."""
    done = run_program(_TWICE)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


STITCHED_FROM = 1 << 46  # GMLake's stitched blocks have addresses of their own, and several blocks of memory


def program(seed: int, num_events: int = 1500, *, num_streams: int = 2, all_freed: bool = False) -> Events:
    """A random program: a few common sizes and odd ones, some without bytes; frees, some of them long in waiting."""
    rng = np.random.default_rng(seed)
    common = rng.integers(1, 6 * MIB, 8)
    events: list[tuple[int, int]] = []
    size: list[int] = []
    stream: list[int] = []
    live: list[int] = []
    waiting: list[int] = []
    while len(events) < num_events:
        draw = rng.random()
        if draw < 0.01:
            events.append((Kind.EMPTY_CACHE, -1))
        elif draw < 0.1 and waiting:
            events.append((Kind.FREE_COMPLETED, waiting.pop(int(rng.integers(len(waiting))))))
        elif (draw < 0.5 and live) or len(live) > 60:
            request = live.pop(int(rng.integers(len(live))))
            events.append((Kind.FREE_REQUESTED, request))
            if rng.random() < 0.2:
                waiting.append(request)
            else:
                events.append((Kind.FREE_COMPLETED, request))
        else:
            live.append(len(size))
            events.append((Kind.ALLOC, len(size)))
            kinds = int(rng.choice(common)), int(np.exp(rng.uniform(0, np.log(20 * MIB)))), int(rng.integers(0, 3))
            size.append(kinds[int(rng.choice(3, p=[0.6, 0.38, 0.02]))])
            stream.append(int(rng.integers(num_streams)))
    if all_freed:
        events += [(Kind.FREE_COMPLETED, request) for request in live + waiting]
        events.append((Kind.EMPTY_CACHE, -1))
    kind, request = np.array(events, np.int64).T
    return Events(kind.astype(np.int8), request.copy(), np.arange(len(kind)), np.array(size), np.array(stream))


def part(events: Events, low: int, high: int | None = None) -> Events:
    """Some of the events."""
    piece = slice(low, high)
    return events._replace(kind=events.kind[piece], request=events.request[piece], event=events.event[piece])


def prepared(name: str, settings: str, events: Events, capacity: int = 0) -> Any:
    """A model; one that plans knows the whole program."""
    model: Any = make(name, settings, capacity)
    if hasattr(model, "plan_for"):
        model.plan_for(events)
    return model


def check_map(blocks: BlockMap) -> None:
    """Blocks cover the segments without a gap or an overlap."""
    assert (blocks.size_bytes > 0).all()
    assert np.array_equal(np.unique(blocks.segment), np.arange(len(blocks.segment_address)))
    assert (np.diff(blocks.segment_address) > 0).all()
    ends = blocks.segment_address + blocks.segment_size
    assert (ends[:-1] <= blocks.segment_address[1:]).all()
    for segment in range(len(blocks.segment_address)):
        inside = np.flatnonzero(blocks.segment == segment)
        address, size = blocks.address[inside], blocks.size_bytes[inside]
        assert address[0] == blocks.segment_address[segment]
        assert address[-1] + size[-1] == ends[segment]
        assert np.array_equal(address[1:], (address + size)[:-1])


def check_state(model: Any, events: Events, done: int) -> None:
    """The map, the counters and the addresses agree with the events that were done."""
    kind, request = events.kind[:done], events.request[:done]
    completed = set(request[kind == Kind.FREE_COMPLETED].tolist())
    given_up = set(request[kind == Kind.FREE_REQUESTED].tolist()) | completed
    placed = [row for row in request[kind == Kind.ALLOC].tolist() if events.size[row] > 0]
    held = [row for row in placed if row not in completed]
    blocks, counters = model.blocks(), model.counters()
    check_map(blocks)
    assert counters.reserved_bytes == blocks.segment_size.sum()
    assert counters.allocated_bytes == sum(int(events.size[row]) for row in held if row not in given_up)
    taken = blocks.request >= 0
    where: dict[int, list[int]] = {row: [] for row in held}
    for block in np.flatnonzero(taken).tolist():
        where[int(blocks.request[block])].append(block)
    addresses = model.addresses()
    for row in held:
        mine = where[row]
        assert blocks.size_bytes[mine].sum() >= events.size[row]
        assert (blocks.waiting[mine] == (row in given_up)).all()
        if addresses[row] < STITCHED_FROM:
            assert blocks.address[mine].tolist() == [addresses[row]]


def same(a: Fed, b: Fed) -> bool:
    return (
        np.array_equal(a.reserved_bytes, b.reserved_bytes)
        and np.array_equal(a.allocated_bytes, b.allocated_bytes)
        and a.failed == b.failed
    )


@each_model(0, 4)
def test_blocks_never_overlap_and_figures_agree(name: str, settings: str, seeds: range) -> None:
    for seed in seeds:
        print(f"seed {seed}")
        events = program(seed, num_streams=1 + seed % 3)
        model = prepared(name, settings, events)
        start = 0
        for stop in [*range(50, len(events.kind), 211), len(events.kind)]:
            fed = model.feed(part(events, start, stop))
            if fed.failed >= 0:
                check_state(model, events, start + fed.failed)
                break
            assert (fed.reserved_bytes >= 0).all()
            assert fed.reserved_bytes[-1] == model.counters().reserved_bytes
            check_state(model, events, stop)
            start = stop


@each_model(10, 13)
def test_pieces_are_the_same_as_the_whole_and_equal_input_gives_equal_figures(
    name: str, settings: str, seeds: range
) -> None:
    for seed in seeds:
        print(f"seed {seed}")
        events = program(seed, num_streams=1 + seed % 3)
        whole, again, pieces = (prepared(name, settings, events) for _ in range(3))
        fed = whole.feed(events)
        assert same(fed, again.feed(events))
        assert whole.counters() == again.counters()
        cuts = [0, *np.sort(np.random.default_rng(seed).integers(0, len(events.kind), 20)).tolist(), len(events.kind)]
        done = 0
        for low, high in itertools.pairwise(cuts):
            piece = pieces.feed(part(events, low, high))
            stop = high if piece.failed < 0 else low + piece.failed
            assert np.array_equal(piece.reserved_bytes[: stop - low], fed.reserved_bytes[low:stop])
            assert np.array_equal(piece.allocated_bytes[: stop - low], fed.allocated_bytes[low:stop])
            done = stop
            if piece.failed >= 0:
                break
        assert done == (len(events.kind) if fed.failed < 0 else fed.failed)
        assert pieces.counters() == whole.counters()
        assert np.array_equal(pieces.addresses(), whole.addresses())
        for ours, theirs in zip(dataclasses.astuple(pieces.blocks()), dataclasses.astuple(whole.blocks()), strict=True):
            assert np.array_equal(ours, theirs)


@each_model(20, 24)
def test_the_capacity_is_never_exceeded(name: str, settings: str, seeds: range) -> None:
    failures = 0
    for seed in seeds:
        print(f"seed {seed}")
        events = program(seed, num_streams=1 + seed % 3)
        unlimited = prepared(name, settings, events)
        unlimited.feed(events)
        peak = unlimited.counters().peak_allocated_bytes
        for capacity in (peak // 2, peak + peak // 4):
            model = prepared(name, settings, events, capacity)
            fed = model.feed(events)
            assert fed.reserved_bytes.max() <= capacity
            assert model.counters().peak_reserved_bytes <= capacity
            check_state(model, events, len(events.kind) if fed.failed < 0 else fed.failed)
            failures += fed.failed >= 0
    assert failures >= len(seeds), "half of what is allocated at the peak can never be enough"


@pytest.mark.parametrize(("name", "settings", "kept"), MODELS, ids=IDS)
def test_what_is_left_when_all_is_freed_and_the_cache_is_emptied(name: str, settings: str, kept: int | None) -> None:
    for seed in range(30, 32):
        print(f"seed {seed}")
        events = program(seed, all_freed=True)
        model = prepared(name, settings, events)
        fed = model.feed(events)
        if fed.failed >= 0:
            continue
        counters = model.counters()
        assert counters.allocated_bytes == 0
        assert (model.blocks().request == -1).all()
        assert counters.reserved_bytes <= (counters.peak_reserved_bytes if kept is None else kept)
        segments = model.blocks().segment_size
        held = segments.sum() // (2 << 20) if name == "stalloc" else len(segments)  # it takes memory by pages
        assert counters.device_allocs - counters.device_frees == held


@pytest.mark.parametrize("name", sorted({name for name, _, _ in MODELS}))
def test_requests_without_bytes_take_nothing(name: str) -> None:
    column: Callable[..., Any] = np.array
    kind = column([Kind.ALLOC, Kind.ALLOC, Kind.FREE_COMPLETED, Kind.FREE_COMPLETED], np.int8)
    events = Events(kind, column([0, 1, 0, 1]), np.arange(4), column([0, 1000]), column([0, 0]))
    model: Allocator = make(name)
    fed = model.feed(events)
    assert fed.failed == -1
    assert fed.allocated_bytes.tolist() == [0, 1000, 1000, 0]
    assert (model.blocks().request == -1).all()


@pytest.mark.parametrize("name", sorted({name for name, _, _ in MODELS}))
def test_an_event_of_a_request_that_has_no_row_is_refused(name: str) -> None:
    events = program(0)
    with pytest.raises(BadInputError, match="outside of the 3 rows"):
        make(name).feed(events._replace(size=events.size[:3], stream=events.stream[:3]))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("jemalloc", "", "no model of an allocator 'jemalloc'"),
        ("cupy", "limits:3", "has no setting 'limits'"),
        ("cupy", "limit", "has no value"),
        ("cupy", "limit:much", "is 'much'"),
        ("cupy", "limit:-5", "is '-5'"),
        ("stalloc", "mode:magic", "is 'magic'"),
    ],
)
def test_names_and_settings_that_do_not_exist_are_refused(name: str, settings: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said) as error:
        make(name, settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in MODELS}))
def test_a_negative_capacity_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match="negative"):
        make(name, "", -1)


def test_every_tested_model_is_in_the_registry() -> None:
    assert {name for name, _, _ in MODELS} <= set(ALLOCATORS)


@pytest.mark.parametrize(("name", "settings", "kept"), MODELS, ids=IDS)
def test_models_in_threads_do_not_disturb_each_other(name: str, settings: str, kept: int | None) -> None:
    programs = [program(seed, num_events=500) for seed in range(40, 44)]

    def one(events: Events) -> Any:
        model = prepared(name, settings, events)
        return model.feed(events), model.counters()

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(one, programs))
    for events, (fed, counters) in zip(programs, together, strict=True):
        alone = one(events)
        assert same(alone[0], fed)
        assert alone[1] == counters
