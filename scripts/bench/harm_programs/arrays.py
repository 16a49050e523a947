"""Programs in CuPy, which marks no steps: python arrays.py NAME [STEPS]."""

import random

import cupy as cp
from steps import each_step, end_of_step, program, run


@program(400)
def elementwise(num_steps: int) -> None:
    """A loop of small expressions, whose host time is what counts."""
    arrays = [cp.ones(1 << 20, cp.float32) for _ in range(64)]
    for _ in each_step(num_steps, "equal"):
        for a in arrays[:16]:
            a = (a * 2 + 1) / 3 - a


@program(60)
def waves(num_steps: int) -> None:
    """Fourier transforms of planes, forth and back."""
    wave = cp.ones((24, 512, 512), cp.complex64)
    for _ in each_step(num_steps, "equal"):
        bent = wave * cp.exp(1j * cp.random.random((512, 512), dtype=cp.float32)).astype(cp.complex64)
        wave = cp.fft.ifft2(cp.fft.fft2(bent, axes=(1, 2)), axes=(1, 2)).astype(cp.complex64)


@program(100)
def stencil(num_steps: int) -> None:
    """A heat equation; every 20th state is kept."""
    state, kept = cp.zeros((2048, 2048), cp.float32), []
    for step in each_step(num_steps, "equal"):
        inner = state[1:-1, 1:-1]
        around = state[:-2, 1:-1] + state[2:, 1:-1] + state[1:-1, :-2] + state[1:-1, 2:]
        state = cp.pad(inner + cp.float32(0.1) * (around - 4 * inner), 1)
        if step % 20 == 19:
            kept.append(state.copy())


@program(100)
def random_sizes(num_steps: int) -> None:
    """Tables of ever new sizes are sorted and summed."""
    rng = random.Random(1)
    for step in range(num_steps):
        table = cp.zeros((rng.randrange(1 << 16, 1 << 20), 32), cp.float32)
        cp.cumsum(cp.sort(table, axis=0), axis=0).max(axis=0)
        end_of_step(str(step))


@program(100)
def two_shapes(num_steps: int) -> None:
    """Two kinds of batches in random order."""
    rng = random.Random(2)
    weights = cp.ones((1024, 1024), cp.float32)
    for _ in range(num_steps):
        num = rng.choice([8192, 24576])
        x = cp.ones((num, 1024), cp.float32)
        for _ in range(4):
            x = cp.maximum(x * weights[0] + 1, 0)
        x.sum(axis=0)
        end_of_step(str(num))


@program(100)
def two_streams(num_steps: int) -> None:
    """Two streams take turns."""
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    for step in range(num_steps):
        with streams[step % 2]:
            x = cp.ones((6, 1 << 22), cp.float32)
            (x * x).sum(axis=0).max()
        streams[step % 2].synchronize()
        end_of_step(str(step % 2))


@program(80)
def growing_table(num_steps: int) -> None:
    """Rows are appended, so that the whole table is copied each time; a new one begins every 40th step."""
    table = cp.zeros((0, 4096), cp.float32)
    for step in range(num_steps):
        if step % 40 == 0:
            table = cp.zeros((0, 4096), cp.float32)
        table = cp.concatenate((table, cp.zeros((512, 4096), cp.float32)))
        table.mean(axis=0)
        end_of_step(str(step % 40))


@program(60)
def blocks_freed(num_steps: int) -> None:
    """Every tenth step the pool is told to free all blocks, and something large is made."""
    x = cp.ones((1 << 22,), cp.float32)
    for step in range(num_steps):
        parts = [x * i for i in range(12)]
        total = sum(parts[1:], parts[0])
        if step % 10 == 9:
            del parts
            cp.get_default_memory_pool().free_all_blocks()
            cp.zeros((12 << 22,), cp.float32).sum()
        total.max()
        end_of_step(str(step % 10 == 9))


if __name__ == "__main__":
    run()
