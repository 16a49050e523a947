"""Pickles built to hang, fill or crash: each ends in one sentence, within what a small file may cost."""

import collections
import gzip
import io
import pickle
import re
import resource
import struct

import numpy as np
import pytest
from properties import variants
from recordings import path_of

from stalloc.errors import BadInputError
from stalloc.trace import load_traces

EVENT = {"action": "alloc", "addr": 1 << 47, "size": 10, "stream": 0, "time_us": 5}
BLOCK = {"size": 512, "requested_size": 10, "state": "active_allocated", "address": 1 << 47}
SEGMENT = {"device": 0, "address": 1 << 47, "total_size": 512, "stream": 0, "blocks": [BLOCK]}
SNAPSHOT = {"segments": [SEGMENT], "device_traces": [[EVENT]]}


def opcodes(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


DOUBLED_TUPLE = b")" + b"\x94h\x00h\x00\x86" + b"".join(b"\x94h%ch%c\x86" % (i, i) for i in range(1, 64))
DOUBLED_LIST = b"]" + b"".join(b"\x94](h%ch%ce" % (i, i) for i in range(64))
HUGE = b"\x8b" + struct.pack("<i", 1_000_000) + b"\x01" * 1_000_000


@pytest.fixture
def memory_limit():
    """No more than 1 GB above what the process has already."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused(tmp_path, content: bytes, name="s.pickle") -> str:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        load_traces(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    {
        "a doubling tuple as a key": (opcodes(b"}" + DOUBLED_TUPLE + b"Ns"), "kinds of objects that no snapshot has"),
        "a doubling tuple as a value": (opcodes(DOUBLED_TUPLE), "kinds of objects that no snapshot has"),
        "a tuple as a key": (opcodes(b"}K\x01\x85Ns"), "neither a string nor an integer"),
        "None as a key": (opcodes(b"}NNs"), "neither a string nor an integer"),
        "a number with a point as a key": (opcodes(b"}G" + b"\0" * 8 + b"Ns"), "neither a string nor an integer"),
        "a list as a key": (opcodes(b"}]Ns"), "neither a string nor an integer"),
        "tuples and lists that are thrown away": (opcodes(b")" + b"\x85]0" * 1_000_000), "kinds of objects"),
        "lists in lists": (opcodes(b"]" * 1_000_000 + b"a" * 999_999), "too deeply"),
        "dictionaries in dictionaries": (opcodes(b"}" + b"K\x01}" * 100 + b"s" * 100), "too deeply"),
        "a million marks": (opcodes(b"(" * 1_000_000), "too deeply"),
        "defaultdicts in defaultdicts": (
            opcodes(b"ccollections\ndefaultdict\n\x94)R" + b"K\x01h\x00)R" * 1000 + b"s" * 1000),
            "too deeply",
        ),
        "a list in itself": (opcodes(b"]\x94h\x00a"), "holds itself"),
        "lists in each other": (opcodes(b"]\x94]\x94h\x00ah\x00h\x01a"), "holds itself"),
        "a list that grows after it was used": (opcodes(b"]\x94]h\x00a0h\x00Na"), "no snapshot has|holds itself"),
        "a set": (opcodes(b"\x8f"), "kinds of objects that no snapshot has"),
        "a frozen set": (opcodes(b"(\x91"), "kinds of objects that no snapshot has"),
        "bytes": (opcodes(b"C\x01a"), "kinds of objects that no snapshot has"),
        "a bytearray": (b"\x80\x05\x96" + struct.pack("<q", 1) + b"a.", "kinds of objects that no snapshot has"),
        "a buffer from elsewhere": (b"\x80\x05\x97.", "kinds of objects that no snapshot has"),
        "an extension": (opcodes(b"\x82\x01"), "kinds of objects that no snapshot has"),
        "an object stored elsewhere": (opcodes(b"K\x01Q"), "kinds of objects that no snapshot has"),
        "an object of a class": (opcodes(b"ccollections\nOrderedDict\n)\x81"), "kinds of objects"),
        "state for a dictionary": (opcodes(b"}}K\x01Nsb"), "kinds of objects that no snapshot has"),
        "a factory that is called with something": (opcodes(b"ccollections\nOrderedDict\n]\x85R"), "no snapshot|calls"),
        "a factory as a value": (opcodes(b"]ccollections\nOrderedDict\na"), "kinds of objects that no snapshot has"),
        "a dictionary with half a pair": (opcodes(b"}(K\x01u"), "damaged pickle"),
        "a number of a megabyte": (opcodes(HUGE), "beyond 64 bits"),
        "a number of many digits": (b"I" + b"9" * 1_000_000 + b"\n.", "beyond 64 bits"),
        "a long number of many digits": (b"L" + b"9" * 1_000_000 + b"L\n.", "beyond 64 bits"),
        "a fraction of many digits": (b"F" + b"9" * 1_000_000 + b"\n.", "beyond 64 bits"),
        "nothing to remember": (opcodes(b"\x94"), "more objects than it holds"),
        "nothing to append to": (opcodes(b"Na"), "damaged pickle"),
        "more than one result": (opcodes(b"NN"), "damaged pickle"),
        "a frame that is longer than the file": (opcodes(b"\x95" + b"\xff" * 7 + b"\x7fN"), "cut short"),
        "a tuple of a thousand": (opcodes(b"(" + b"N" * 1000 + b"t"), "kinds of objects that no snapshot has"),
    }.values(),
)
def test_what_no_snapshot_holds_is_refused_before_it_is_built(tmp_path, memory_limit, content, said):
    assert re.search(said, refused(tmp_path, content))


@variants("each", [b"\x8f", b"]", b"}", b"]]a", b"}K\x01Ns"])
def test_ten_million_containers_of_a_few_kilobytes_are_refused(tmp_path, memory_limit, each):
    number = 10_000_000 // len(each)
    packed = gzip.compress(opcodes(b"](" + each * number + b"e"))
    assert len(packed) < 60_000
    refused(tmp_path, packed, "s.pickle.gz")


def with_event(**changes) -> dict:
    return {**SNAPSHOT, "device_traces": [[EVENT | changes]]}


LAUGH: list = []
for _ in range(64):
    LAUGH = [LAUGH, LAUGH]


@pytest.mark.parametrize(
    "snapshot",
    [
        with_event(action=LAUGH),
        with_event(size=LAUGH),
        with_event(stream=LAUGH),
        with_event(frames=LAUGH),
        with_event(frames=[{"filename": LAUGH, "line": 1, "name": "f"}]),
        {**SNAPSHOT, "segments": [SEGMENT | {"address": LAUGH}]},
        {**SNAPSHOT, "segments": [SEGMENT | {"total_size": LAUGH}]},
        {**SNAPSHOT, "segments": [SEGMENT | {"segment_pool_id": LAUGH}]},
        {**SNAPSHOT, "segments": [SEGMENT | {"blocks": LAUGH}]},
        {**SNAPSHOT, "external_annotations": [{"stage": "START", "name": LAUGH, "time_us": 1}]},
        {**SNAPSHOT, "external_annotations": LAUGH},
        {**SNAPSHOT, "stalloc": {"devices": {"0": {"notes": [LAUGH], "source": "x"}}}},
        {**SNAPSHOT, "stalloc": {"devices": {"0": {"notes": [], "source": LAUGH}}}},
        {**SNAPSHOT, "allocator_settings": {"a": LAUGH, "b": {"c": LAUGH}}},
        {**SNAPSHOT, "segments": LAUGH},
        {**SNAPSHOT, "device_traces": LAUGH},
        {**SNAPSHOT, "something new": LAUGH},
    ],
)
def test_a_list_that_doubles_is_nowhere_written_out(tmp_path, memory_limit, snapshot):
    path = tmp_path / "laugh.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    said = ""
    try:
        assert len(load_traces(path)) == 1
    except BadInputError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 500


def test_devices_times_annotations_are_bounded(tmp_path):
    many = {
        "segments": [],
        "device_traces": [[dict(EVENT)] for _ in range(2000)],
        "external_annotations": [{"stage": "x"}] * 100_000,
    }
    path = tmp_path / "many.pickle"
    path.write_bytes(pickle.dumps(many))
    with pytest.raises(BadInputError):
        load_traces(path)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.defaultdict])
def test_plain_containers_of_other_kinds_are_read(tmp_path, protocol, kind):
    snapshot = kind()
    snapshot.update(SNAPSHOT | {"more": kind(), "flags": (True, None, 1.5, "x" * 300), "none": ()})
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol))
    (trace,) = load_traces(path)
    assert trace.num_requests == 1


def test_more_containers_than_the_tables_of_the_scan_hold_at_first_are_read(tmp_path):
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 4)
    events = [EVENT | {"action": "snapshot", "time_us": time} for time in range(100_000)]
    pickler.dump({**SNAPSHOT, "device_traces": [[EVENT, *events]]})
    path = tmp_path / "s.pickle"
    path.write_bytes(file.getvalue())
    (trace,) = load_traces(path)
    assert len(trace.action) == 100_001


def assert_the_same_without_stacks(path) -> bool:
    """Whether stacks were skipped."""
    skipped = False
    for whole, quick in zip(load_traces(path), load_traces(path, call_sites=False), strict=True):
        for column in ("start", "end", "size", "stream", "action", "address", "event_size", "time_us", "segment_size"):
            assert np.array_equal(getattr(whole, column), getattr(quick, column))
        assert (whole.names, whole.info) == (quick.names, quick.info)
        skipped |= "site" in whole.extra and "site" not in quick.extra
    return skipped


@variants("name", ["rank0.pickle.gz", "rank1.pickle.gz"])
def test_a_real_snapshot_says_the_same_where_its_stacks_are_skipped(name):
    assert assert_the_same_without_stacks(path_of(name))


FRAME = {"filename": "train.py", "line": 3, "name": "step"}
MANY_FRAMES = [{"filename": f"{number}.py", "line": number, "name": "f"} for number in range(3000)]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "frames",
    [
        [FRAME],
        [],
        MANY_FRAMES,  # several APPENDS, and several frames of the fourth protocol
        [FRAME | {"frames": [FRAME, {"frames": [FRAME, FRAME]}]}],
        [FRAME, "frames", [FRAME]],
        FRAME,
        None,
    ],
)
def test_stacks_of_any_form_are_skipped_or_read(tmp_path, protocol, frames):
    free = [EVENT | {"action": action, "frames": list(frames or [])} for action in ("free_requested", "free_completed")]
    snapshot = with_event(frames=frames)
    snapshot["device_traces"][0] += [*free, dict(EVENT)]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol))
    assert_the_same_without_stacks(path)


@pytest.mark.parametrize("times", [2, 300])
def test_what_a_stack_shares_with_the_rest_is_not_lost(tmp_path, times):
    """A text is written out again; of a container, or where that would be more than the file, all is read."""
    text = "a name that a frame and annotations share " + "x" * 10_000
    shared = [{"stage": "START", "name": text, "time_us": 1, "frame": frame} for frame in (FRAME, None)]
    for annotations in (shared, shared[1:] * times):
        snapshot = with_event(frames=[FRAME | {"name": text}, FRAME])
        path = tmp_path / "s.pickle"
        path.write_bytes(pickle.dumps({**snapshot, "external_annotations": annotations}))
        assert_the_same_without_stacks(path)
        (trace,) = load_traces(path, call_sites=False)
        assert text[:20] in trace.names[0]
