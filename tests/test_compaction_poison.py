"""Poisoned memory: who writes what is not theirs is found, who does not is left alone."""

import numpy as np
import pytest

from stalloc import kernels
from stalloc.compaction import CorruptionError, Poison


class _Memory:
    """A kilobyte-grained allocator of host memory under poison."""

    def __init__(self) -> None:
        self.bytes = np.zeros(1 << 16, np.uint8)
        self.base = self.bytes.ctypes.data
        self.poison = Poison(kernels.host_fill, kernels.host_mismatches)

    def allocate(self, at: int, requested: int) -> np.ndarray:
        rounded = -(-requested // 512) * 512
        self.poison.allocated(self.base + at, requested, rounded)
        return self.bytes[at : at + requested]

    def free(self, at: int) -> None:
        self.poison.freed(self.base + at)


def test_fresh_memory_reads_as_nan() -> None:
    memory = _Memory()
    for kind in (np.float16, np.float32, np.float64):
        assert np.isnan(memory.allocate(0, 1000).view(kind)).all()


def test_a_write_after_the_free_is_found_when_the_bytes_are_used_again() -> None:
    memory = _Memory()
    block = memory.allocate(0, 4096)
    memory.free(0)
    block[2000] = 1
    memory.allocate(0, 1024)  # these bytes are whole
    with pytest.raises(CorruptionError, match=r"was written after it was freed \(1 bytes differ\)"):
        memory.allocate(1024, 2048)


def test_a_write_after_the_free_is_found_at_a_check_and_when_memory_is_returned() -> None:
    memory = _Memory()
    block = memory.allocate(0, 4096)
    memory.poison.check()
    memory.free(0)
    memory.poison.check()
    block[:3] = 1
    with pytest.raises(CorruptionError, match="3 bytes differ"):
        memory.poison.check()
    with pytest.raises(CorruptionError, match="3 bytes differ"):
        memory.poison.returned(memory.base, memory.base + 4096)
    memory.poison.check()  # nobody owns it any more


def test_a_write_past_the_end_is_found_at_the_free_and_the_block_is_free() -> None:
    memory = _Memory()
    memory.allocate(0, 1000)
    memory.allocate(1024, 700)
    memory.bytes[1000] = 0
    with pytest.raises(CorruptionError, match="was written past its end"):
        memory.poison.check()
    with pytest.raises(CorruptionError, match="was written past its end"):
        memory.free(0)
    memory.poison.check()
    memory.free(1024)
    memory.allocate(0, 2048)


def test_a_program_that_writes_only_what_it_owns_never_hears_of_it() -> None:
    print("seed 4")
    rng = np.random.default_rng(4)
    memory = _Memory()
    live: dict[int, int] = {}
    for _ in range(500):
        if live and rng.random() < 0.5:
            at = int(rng.choice(list(live)))
            memory.free(at)
            del live[at]
        else:
            at, size = int(rng.integers(0, 100)) * 512, int(rng.integers(1, 6000))
            if all(at + size + 512 <= a or a + n + 512 <= at for a, n in live.items()):
                memory.allocate(at, size)[:] = rng.integers(0, 256)
                live[at] = size
        memory.poison.check()


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from stalloc.compaction.poison import wanted

    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("STALLOC_POISON", value)
        assert wanted() is expected
