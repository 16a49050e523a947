"""The model of CuPy's pool against the real one: reserved, used, cached bytes, chunks and addresses at every event."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stalloc.replay import Events, Kind
from stalloc.replay.cupy_pool import CupyPool, CupyPoolSettings

MIB = 1 << 20
ORACLE = Path(__file__).parent / "programs" / "cupy_pool_oracle.py"


def real_programs(directory: Path, seed: int, num_programs: int, num_events: int) -> list[dict[str, np.ndarray]]:
    """What the real pool did with random programs, in a fresh interpreter."""
    path = directory / f"{seed}.npz"
    command = [sys.executable, str(ORACLE), str(path), str(seed), str(num_programs), str(num_events)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(path) as found:
        names = list(found)
        columns = {name: found[name] for name in names}
    return [
        {name.partition("/")[2]: column for name, column in columns.items() if name.startswith(f"{number}/")}
        for number in range(num_programs)
    ]


def check_program(real: dict[str, np.ndarray]) -> tuple[int, int]:
    """Feed the model what the pool was fed; how many requests were refused, and how many emptied the cache first."""
    print(f"seed {real['seed']}, limit {real['limit']}, capacity {real['capacity']}")
    model = CupyPool(CupyPoolSettings(limit=int(real["limit"])), int(real["capacity"]))
    count = len(real["kind"])
    # the request of an event is its position
    events = Events(real["kind"].astype(np.int8), real["request"], np.arange(count), real["size"], real["stream"])
    refused = 0
    start = 0
    while start < count:
        rest = Events(events.kind[start:], events.request[start:], events.event[start:], events.size, events.stream)
        fed = model.feed_as_chosen(rest, real["address"][start:])
        stop = count if fed.failed < 0 else start + fed.failed
        assert not real["refused"][start:stop].any(), "the real pool refused a request that the model served"
        assert np.array_equal(fed.reserved_bytes[: stop - start], real["total"][start:stop])
        if stop < count:
            assert real["refused"][stop], f"the model refused event {stop}, which the real pool served"
            assert model.counters().reserved_bytes == real["total"][stop]
            refused += 1
        start = stop + 1
    placed = (real["kind"] == Kind.ALLOC) & (real["refused"] == 0)
    assert np.array_equal(model.addresses()[placed], real["address"][placed])
    return refused, model.counters().retries


def check_every_event(real: dict[str, np.ndarray]) -> None:
    """As check_program, and used bytes, cached bytes and the number of cached chunks after each event."""
    model = CupyPool(CupyPoolSettings(limit=int(real["limit"])), int(real["capacity"]))
    for i in range(len(real["kind"])):
        one = slice(i, i + 1)
        events = Events(
            real["kind"][one].astype(np.int8), real["request"][one], np.array([i]), *sizes_and_streams(real)
        )
        model.feed_as_chosen(events, real["address"][one])
        counters = model.counters()
        told = real["total"][i], real["used"][i], real["cached"][i], real["free_blocks"][i]
        used = counters.more["used_bytes"]
        ours = counters.reserved_bytes, used, counters.reserved_bytes - used, counters.more["free_blocks"]
        assert ours == told, f"event {i}"


def sizes_and_streams(real: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return real["size"], real["stream"]


@pytest.mark.usefixtures("cupy_installed")
def test_the_model_does_what_the_real_pool_does(tmp_path: Path) -> None:
    refused, retries = [], []
    for real in real_programs(tmp_path, 100, 12, 1500):
        counts = check_program(real)
        refused.append(counts[0])
        retries.append(counts[1])
        check_every_event(real)
    assert sum(refused) > 0
    assert sum(retries) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("cupy_installed")
def test_the_model_does_what_the_real_pool_does_in_many_programs(tmp_path: Path) -> None:
    for real in real_programs(tmp_path, 10_000, 25, 5000):
        check_program(real)
        check_every_event(real)
