"""Filter stacks of images with CuPy: blur, edges and their histogram at every level of a pyramid. Plain CuPy.

    python cupy_filters.py --steps 50
    stalloc run cupy_filters.py --steps 50

Every step goes through stacks of several sizes, as a data set of photographs would, so temporaries of many sizes come
and go; the order of the sizes is the same in every step.
"""

import argparse
import time

import cupy as cp
import numpy as np

BLUR = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)  # binomial, close to a Gaussian with a deviation of one pixel
SMOOTH, DIFFERENCE = (0.25, 0.5, 0.25), (-0.5, 0.0, 0.5)  # the two halves of the Sobel filter
SHAPES = ((1.0, 1.0), (0.75, 1.0), (1.0, 0.75), (0.5, 0.75), (0.5, 0.5))  # height and width over --size
NUM_BINS = 16


def convolve(images: cp.ndarray, taps: tuple[float, ...], axis: int) -> cp.ndarray:
    """Filter images (N, H, W) along one axis, edges repeated: each tap is a shifted view, each sum a temporary."""
    radius = len(taps) // 2
    before = cp.repeat(images.take([0], axis=axis), radius, axis=axis)
    after = cp.repeat(images.take([-1], axis=axis), radius, axis=axis)
    padded = cp.concatenate((before, images, after), axis=axis)
    length = images.shape[axis]
    total = cp.zeros_like(images)
    for shift, tap in enumerate(taps):
        window = padded[:, shift : shift + length] if axis == 1 else padded[:, :, shift : shift + length]
        total = total + tap * window
    return total


def edges(images: cp.ndarray) -> cp.ndarray:
    """Edge strength (N, H, W) in [0, 1]: the Sobel gradient's length, each image normalised by its own maximum."""
    across = convolve(convolve(images, DIFFERENCE, axis=2), SMOOTH, axis=1)
    down = convolve(convolve(images, DIFFERENCE, axis=1), SMOOTH, axis=2)
    strength = cp.sqrt(across * across + down * down)
    return strength / (strength.max(axis=(1, 2), keepdims=True) + 1e-6)


def histogram(values: cp.ndarray) -> cp.ndarray:
    """Share of the pixels of each image in each of `NUM_BINS` equal bins over [0, 1]: (N, NUM_BINS)."""
    bins = cp.minimum((values * NUM_BINS).astype(cp.int32), NUM_BINS - 1)
    return cp.stack([(bins == i).mean(axis=(1, 2), dtype=cp.float32) for i in range(NUM_BINS)], axis=1)


def features(photographs: cp.ndarray, num_levels: int) -> cp.ndarray:
    """Describe photographs (N, H, W, 3) of bytes by (N, num_levels, NUM_BINS + 1) numbers."""
    weights = cp.asarray([0.299, 0.587, 0.114], dtype=cp.float32)
    grey = (photographs.astype(cp.float32) * weights).sum(axis=3) / 255
    rows = []
    for _ in range(num_levels):
        grey = convolve(convolve(grey, BLUR, axis=1), BLUR, axis=2)
        strength = edges(grey)
        mask = strength > 0.25
        strong = cp.where(mask, strength, 0).sum(axis=(1, 2)) / (mask.sum(axis=(1, 2)) + 1)
        rows.append(cp.concatenate((histogram(strength), strong[:, None].astype(cp.float32)), axis=1))
        grey = cp.ascontiguousarray(grey[:, ::2, ::2])
    return cp.stack(rows, axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", type=int, default=1024, help="pixels of the longest side")
    parser.add_argument("--batch", type=int, default=8, help="images in a stack")
    parser.add_argument("--levels", type=int, default=3, help="levels of the pyramid")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    shapes = [(args.batch, int(args.size * height), int(args.size * width), 3) for height, width in SHAPES]
    stacks = [rng.integers(0, 256, size=shape, dtype=np.uint8) for shape in shapes]
    total = cp.zeros((args.levels, NUM_BINS + 1), dtype=cp.float32)
    seconds = []
    for _ in range(args.steps):
        started = time.perf_counter()
        for stack in stacks:
            total += features(cp.asarray(stack), args.levels).mean(axis=0)
        cp.cuda.get_current_stream().synchronize()
        seconds.append(time.perf_counter() - started)

    pool = cp.get_default_memory_pool()
    rate = args.batch * len(SHAPES) / float(np.median(seconds))
    print(f"{rate:.1f} images a second, {np.median(seconds) * 1e3:.1f} ms a step")
    print(f"CuPy's default pool holds {pool.total_bytes() / 2**20:.1f} MiB, {pool.used_bytes() / 2**20:.1f} MiB in use")
    print(f"checksum {float(total.sum()) / max(args.steps, 1):.6f}")


if __name__ == "__main__":
    main()
