"""The rules of torch's caching allocator, each on a few allocations, and the settings as torch writes them."""

import numpy as np
import pytest

from stalloc.errors import BadInputError
from stalloc.replay.protocol import Events, Kind
from stalloc.replay.torch_caching import TorchCaching, parse_settings

MIB = 1 << 20


class Play:
    """A program as it is written: allocations by number, bytes and stream."""

    def __init__(self, settings: str = "", capacity_bytes: int = 0) -> None:
        self.model = TorchCaching(parse_settings(settings), capacity_bytes)
        self._sizes: list[int] = []
        self._streams: list[int] = []

    def _feed(self, kind: Kind, row: int):
        columns = np.array(self._sizes, np.int64), np.array(self._streams, np.int64)
        one = Events(np.array([kind], np.int8), np.array([row]), np.array([0]), *columns)
        return self.model.feed(one, keep_going=True)

    def take(self, size_bytes: int, stream: int = 0) -> tuple[int, int]:
        """(number, address), the address is -1 when memory ran out."""
        self._sizes.append(size_bytes)
        self._streams.append(stream)
        number = len(self._sizes) - 1
        return number, int(self._feed(Kind.ALLOC, number).address[0])

    def free(self, number: int) -> None:
        self._feed(Kind.FREE_COMPLETED, number)

    def give_up(self, number: int) -> None:
        self._feed(Kind.FREE_REQUESTED, number)

    def empty_cache(self) -> None:
        self._feed(Kind.EMPTY_CACHE, -1)

    @property
    def reserved_mib(self) -> float:
        return self.model.counters().reserved_bytes / MIB

    def block_bytes(self, number: int) -> int:
        blocks = self.model.blocks()
        (at,) = np.flatnonzero(blocks.request == number)
        return int(blocks.size_bytes[at])


@pytest.mark.parametrize(
    ("size_bytes", "block_bytes", "reserved_mib"),
    [
        (1, 512, 2),
        (513, 1024, 2),
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),
        (10 * MIB - 1, 10 * MIB, 10),
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (11 * MIB, 12 * MIB, 12),
        (21 * MIB + 1, 22 * MIB, 22),
    ],
)
def test_a_first_request_takes_a_segment_of_its_class(size_bytes, block_bytes, reserved_mib):
    play = Play()
    number, _ = play.take(size_bytes)
    assert (play.block_bytes(number), play.reserved_mib) == (block_bytes, reserved_mib)


def test_a_rest_of_up_to_one_mib_stays_with_a_large_block():
    play = Play()
    whole, _ = play.take(20 * MIB)
    play.free(whole)
    kept, _ = play.take(19 * MIB)
    assert play.block_bytes(kept) == 20 * MIB
    play.free(kept)
    split, _ = play.take(19 * MIB - 512)
    assert play.block_bytes(split) == 19 * MIB - 512


def test_a_small_block_keeps_no_rest_of_512_bytes():
    play = Play()
    whole, _ = play.take(1024)
    play.take(512)  # what comes behind it
    play.free(whole)
    first, address = play.take(512)
    assert play.block_bytes(first) == 512
    assert play.take(512)[1] == address + 512


def test_the_smallest_block_that_fits_is_taken_and_of_equals_the_lowest():
    play = Play()
    numbers = [play.take(size * MIB) for size in (40, 30, 30)]
    for number, _ in numbers:
        play.free(number)
    assert play.take(30 * MIB)[1] == numbers[1][1]
    assert play.take(30 * MIB)[1] == numbers[2][1]
    assert play.take(30 * MIB)[1] == numbers[0][1]


def test_a_stream_does_not_get_another_streams_memory():
    play = Play()
    number, _ = play.take(30 * MIB, stream=0)
    play.free(number)
    play.take(30 * MIB, stream=1)
    assert play.reserved_mib == 60


def test_a_block_given_up_waits_until_its_free_is_completed_or_the_cache_is_emptied():
    play = Play()
    number, address = play.take(30 * MIB)
    play.give_up(number)
    counters = play.model.counters()
    assert (counters.allocated_bytes, counters.more["waiting_blocks"]) == (0, 1)
    other, elsewhere = play.take(30 * MIB)
    assert elsewhere != address
    play.free(number)
    assert play.take(30 * MIB)[1] == address
    play.give_up(other)
    play.empty_cache()
    assert play.reserved_mib == 30


def test_a_full_device_gives_its_cache_back_before_memory_runs_out():
    play = Play(capacity_bytes=100 * MIB)
    first, _ = play.take(60 * MIB)
    play.free(first)
    second, address = play.take(80 * MIB)
    assert address > 0
    assert (play.model.counters().retries, play.reserved_mib) == (1, 80)
    assert play.take(30 * MIB)[1] == -1
    assert play.model.counters().more["out_of_memory"] == 1
    play.free(second)
    assert play.take(30 * MIB)[1] == address


def test_a_failed_request_stops_the_replay_unless_told_otherwise():
    events = Events(
        np.array([0, 0, 0], np.int8), np.arange(3), np.arange(3), np.array([60, 60, 20]) * MIB, np.zeros(3, np.int64)
    )
    stopped = TorchCaching(capacity_bytes=100 * MIB).feed(events)
    assert (stopped.failed, stopped.num_out_of_memory) == (1, 1)
    assert stopped.reserved_bytes.tolist() == [60 * MIB] * 3
    on = TorchCaching(capacity_bytes=100 * MIB).feed(events, keep_going=True)
    assert (on.failed, on.num_out_of_memory, on.reserved_bytes.tolist()[-1]) == (1, 1, 80 * MIB)


def test_a_refused_request_does_not_end_the_replay_when_the_tables_grow_afterwards():
    num_requests = 2000
    sizes = np.full(num_requests, 3 * MIB)
    sizes[0] = 2 << 40
    kinds, requests = np.zeros(num_requests, np.int8), np.arange(num_requests)
    events = Events(kinds, requests, requests, sizes, np.zeros(num_requests, np.int64))
    fed = TorchCaching(capacity_bytes=1 << 40).feed(events, keep_going=True)
    assert (fed.failed, fed.num_out_of_memory) == (0, 1)
    assert (fed.address[1:] > 0).all()


@pytest.mark.parametrize(("whole_mib", "again_mib"), [(100, 90), (32, 32)])
def test_blocks_from_the_limit_on_are_not_split(whole_mib, again_mib):
    play = Play("max_split_size_mb:32")
    number, _ = play.take(whole_mib * MIB)
    play.free(number)
    play.take(20 * MIB)
    assert play.reserved_mib == whole_mib + 20
    kept, _ = play.take(again_mib * MIB)
    assert (play.block_bytes(kept), play.reserved_mib) == (whole_mib * MIB, whole_mib + 20)


def test_expandable_segments_grow_and_shrink_by_pages():
    play = Play("expandable_segments:True")
    a, first = play.take(30 * MIB)
    b, second = play.take(30 * MIB)
    assert (second - first, play.reserved_mib) == (30 * MIB, 60)
    play.free(a)
    play.free(b)
    whole, address = play.take(70 * MIB)
    assert (address, play.reserved_mib) == (first, 80)
    play.free(whole)
    play.take(25 * MIB)
    play.empty_cache()
    assert play.reserved_mib == 40


def test_the_share_of_the_process_counts_from_the_capacity():
    play = Play("per_process_memory_fraction:0.5", capacity_bytes=100 * MIB)
    assert play.take(40 * MIB)[1] > 0
    assert play.take(12 * MIB)[1] == -1


def test_feeding_in_parts_ends_in_the_same_state():
    random = np.random.default_rng(3)
    sizes, kinds, requests, live = [], [], [], []
    for _ in range(3000):
        if live and random.random() < 0.48:
            kinds.append(2)
            requests.append(live.pop(int(random.integers(len(live)))))
        else:
            kinds.append(0)
            requests.append(len(sizes))
            live.append(len(sizes))
            sizes.append(int(2 ** random.uniform(0, 26)))
    streams = random.integers(0, 3, len(sizes))
    events = Events(np.array(kinds, np.int8), np.array(requests), np.arange(3000), np.array(sizes), streams)
    whole, parts = TorchCaching(), TorchCaching()
    whole.feed(events)
    for at in range(0, 3000, 171):
        part = slice(at, at + 171)
        parts.feed(events._replace(kind=events.kind[part], request=events.request[part], event=events.event[part]))
    assert whole.counters() == parts.counters()
    assert whole.blocks().address.tolist() == parts.blocks().address.tolist()
    assert whole.blocks().request.tolist() == parts.blocks().request.tolist()


def test_settings_are_read_as_torch_writes_them():
    settings = parse_settings(" max_split_size_mb:128, garbage_collection_threshold:0.6,large_segment_size_mb:30,")
    assert settings.max_split_bytes == 128 * MIB
    assert settings.garbage_collection_threshold == 0.6
    assert (settings.large_segment_bytes, settings.max_non_split_rounding_bytes) == (30 * MIB, 30 * MIB)
    assert parse_settings("") == parse_settings("backend:native,pinned_use_background_threads:True")
    table = parse_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_divisions
    assert table == (1,) * 9 + (2, 4) + (8,) * 5
    assert parse_settings("roundup_power2_divisions:4").roundup_divisions == (4,) * 16
    assert parse_settings("per_process_memory_fraction:1.0").memory_fraction is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_split:3", "'max_split' is none of torch's keys"),
        ("max_split_size_mb", "not key:value"),
        ("max_split_size_mb:", "not key:value"),
        ("max_split_size_mb:19", "expected a whole number from 20"),
        ("max_split_size_mb:64x", "expected a whole number"),
        ("max_split_size_mb:32,large_segment_size_mb:64", "expected a whole number from 64"),
        ("large_segment_size_mb:10", "expected a whole number from 11"),
        ("expandable_segments:true", "expected True or False"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("per_process_memory_fraction:1.5", "from 0 to 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:2]", "power of two"),
        ("roundup_power2_divisions:[1:2", "not key:value"),
        ("max_split_size_mb:64,,", "not key:value"),
        ("backend:cudaMallocAsync", "only native"),
    ],
)
def test_settings_that_torch_refuses_end_in_one_sentence(text, said):
    with pytest.raises(BadInputError, match=said) as caught:
        parse_settings(text)
    assert "\n" not in str(caught.value)
